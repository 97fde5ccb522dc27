"""The digest of rows and packs taken from their buffers, against the one taken unit by unit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halo_core.checkpoint.identity import data_of
from halo_core.data.made_from import tokenizer_digest
from halo_core.data.rows import Row, Rows
from halo_core.data.units import pack


def rows_of(sizes: list[int], seed: int) -> Rows:
    words = np.random.default_rng(seed)
    rows = Rows()
    for number, size in enumerate(sizes):
        rows.add(Row(row_id=2 * number, input_ids=words.integers(0, 99, size).tolist(), supervised=[True] * size))
    return rows


@given(sizes=st.lists(st.integers(2, 20), min_size=1, max_size=12), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_buffers_give_the_digest_of_their_units(sizes: list[int], seed: int) -> None:
    rows = rows_of(sizes, seed)
    assert data_of(rows) == data_of(list(rows))
    for strategy in ("bfd", "bfd_split", "wrapped"):
        packs, _ = pack(rows, 20 if strategy == "bfd" else 7, strategy)
        assert data_of(packs) == data_of(list(packs)), strategy


@pytest.mark.parametrize("what", ["tokens", "flags", "row_ids", "order"])
def test_digest_sees_every_difference(what: str) -> None:
    rows = rows_of([3, 4, 5], 0)
    values = {"tokens": rows.tokens.copy(), "flags": rows.flags.copy(), "row_ids": rows.row_ids.copy()}
    if what == "order":
        values["row_ids"] = values["row_ids"][::-1].copy()
    else:
        values[what][1] ^= 1
    other = Rows.over(
        row_ids=values["row_ids"], ends=rows.ends, input_ids=values["tokens"], supervised=values["flags"]
    )  # fmt: skip
    assert data_of(other) != data_of(rows)


def test_digest_of_a_tokenizer_sees_whether_special_tokens_are_split(tokenizer: Any) -> None:
    before = tokenizer_digest(tokenizer)
    assert tokenizer_digest(tokenizer) == before
    tokenizer.split_special_tokens = True
    assert tokenizer_digest(tokenizer) != before


def test_digest_of_a_tokenizer_whose_parts_cannot_be_written_is_there(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unwritable:
        def to_str(self) -> str:
            raise Exception("Custom PreTokenizer cannot be serialized")

    whole = tokenizer_digest(tokenizer)
    monkeypatch.setattr(type(tokenizer), "backend_tokenizer", Unwritable())
    assert len(tokenizer_digest(tokenizer)) == 32
    assert tokenizer_digest(tokenizer) != whole
