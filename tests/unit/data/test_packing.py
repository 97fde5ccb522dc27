"""Packing: which rows share a pack, what a pack is as a batch, and the account of every token. Not for models."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trl import pack_dataset

from halo_core.checkpoint.identity import data_of
from halo_core.config import RunConfig
from halo_core.data import IGNORED, Account, Pack, Row, Rows, SplitAccount, collate, packing, units_of
from halo_core.data.packing import STRATEGIES, best_fit_decreasing, cut, lay_out
from halo_core.data.units import FIRST_OF_PIECE, FIRST_OF_ROW, longest_row, num_rows, pack
from halo_core.errors import Refused

PAD = 7
LENGTHS = st.lists(st.integers(1, 30), max_size=25)
FLAGS = st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=15)


def rows_of(flags: list[list[bool]]) -> Rows:
    """Return rows with these flags; every token is a number of its own, and row numbers have gaps."""
    rows = Rows()
    token = 100
    for index, own in enumerate(flags):
        rows.add(Row(row_id=3 * index, input_ids=list(range(token, token + len(own))), supervised=own))
        token += len(own)
    return rows


def learnt(rows: Any, max_length: int | None = None) -> Counter[tuple[int, int]]:
    """Return what is learnt of rows or packs, in pairs of the token before and the token to be predicted."""
    found: Counter[tuple[int, int]] = Counter()
    for unit in rows:
        batch = collate([unit], PAD)
        assert max_length is None or batch.input_ids.shape[1] <= max_length
        where = batch.targets != IGNORED
        found.update(zip(batch.input_ids[where].tolist(), batch.targets[where].tolist(), strict=True))
    return found


def best_fit_one_by_one(lengths: list[int], max_length: int) -> list[int]:
    """Return the pack of each length as the definition has it: the longest first, to where least space is left."""
    packs, count = [0] * len(lengths), 0
    spaces: dict[int, deque[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = [space for space, waiting in spaces.items() if waiting and space >= lengths[index]]
        space = min(fitting, default=max_length)
        if fitting:
            number = spaces[space].popleft()
        else:
            number, count = count, count + 1
        packs[index] = number
        spaces.setdefault(space - lengths[index], deque()).append(number)
    return packs


@given(lengths=LENGTHS, spare=st.integers(0, 40))
@example(lengths=[13, 11, 3], spare=0)
@example(lengths=[13, 11, 3], spare=4084)
@example(lengths=[5, 5, 5, 5, 5, 2, 2, 2, 1], spare=8)
def test_best_fit_decreasing_is_what_one_by_one_would_give(lengths: list[int], spare: int) -> None:
    max_length = max(lengths, default=1) + spare
    packs = best_fit_decreasing(np.array(lengths, dtype=np.int64), max_length)
    assert packs.tolist() == best_fit_one_by_one(lengths, max_length)


@given(lengths=LENGTHS, max_length=st.sampled_from([2, 3, 10, 16, 31, 4097]), strategy=st.sampled_from(STRATEGIES))
@example(lengths=[13, 11, 3], max_length=10, strategy="bfd_split")
@example(lengths=[13, 11, 3], max_length=4097, strategy="bfd")
@example(lengths=[10, 10, 20, 1], max_length=10, strategy="wrapped")
def test_every_token_is_in_one_pack_and_no_pack_is_too_long(
    lengths: list[int], max_length: int, strategy: str
) -> None:
    if strategy == "bfd":
        lengths = [length for length in lengths if length <= max_length]
    layout = lay_out(cut(np.array(lengths, dtype=np.int64), max_length, strategy), max_length)
    pieces = layout.pieces
    sizes = [pieces.lengths[begin:end].sum() for begin, end in zip(layout.borders, layout.borders[1:], strict=False)]
    assert all(0 < size <= max_length for size in sizes)
    covered = sorted(
        (row, token) for row, start, end in zip(pieces.rows, pieces.starts, pieces.ends, strict=True)
        for token in range(start, end)
    )  # fmt: skip
    assert covered == [(row, token) for row, length in enumerate(lengths) for token in range(length)]
    if strategy == "bfd":
        assert sorted(pieces.rows) == list(range(len(lengths))), "a row was split or lost"
    if strategy == "wrapped":
        assert all(size == max_length for size in sizes[:-1]), "a pack before the last one is not full"
        assert pieces.rows.tolist() == sorted(pieces.rows), "rows left their order"
    if strategy == "bfd_split":
        cuts = set(pieces.starts[pieces.starts > 0].tolist())
        assert all(start % max_length == 0 for start in cuts), "a row was cut where it need not be"


@settings(deadline=None)
@given(lengths=LENGTHS, max_length=st.integers(2, 35), strategy=st.sampled_from(STRATEGIES))
def test_number_of_packs_is_trls(lengths: list[int], max_length: int, strategy: str) -> None:
    from datasets import Dataset

    lengths = [length for length in lengths if strategy != "bfd" or length <= max_length] or [2]
    table = Dataset.from_dict({"input_ids": [list(range(length)) for length in lengths]})
    theirs = pack_dataset(table, seq_length=max_length, strategy=strategy, map_kwargs={"batch_size": 1000})
    ours = lay_out(cut(np.array(lengths), max_length, strategy), max_length)
    begins = zip(ours.borders, ours.borders[1:], strict=False)
    sizes = [ours.pieces.lengths[begin:end].sum() for begin, end in begins]
    assert sorted(sizes) == sorted(len(ids) for ids in theirs["input_ids"])


@pytest.mark.parametrize(("strategy", "packs"), [
    ("bfd_split", [[(0, 0, 10)], [(1, 0, 10)], [(0, 10, 13), (2, 0, 3), (1, 10, 11)]]),
    ("wrapped", [[(0, 0, 10)], [(0, 10, 13), (1, 0, 7)], [(1, 7, 11), (2, 0, 3)]]),
])  # fmt: skip
def test_rows_of_13_11_and_3_tokens_in_packs_of_10_by_hand(strategy: str, packs: list[Any]) -> None:
    layout = lay_out(cut(np.array([13, 11, 3]), 10, strategy), 10)
    pieces = list(zip(layout.pieces.rows, layout.pieces.starts, layout.pieces.ends, strict=True))
    found = [pieces[begin:end] for begin, end in zip(layout.borders, layout.borders[1:], strict=False)]
    assert sorted(sorted(pack) for pack in found) == sorted(sorted(pack) for pack in packs)


def test_rows_that_do_not_go_whole_into_a_pack_are_an_error_and_not_cut() -> None:
    with pytest.raises(ValueError, match="11"):
        cut(np.array([3, 11]), 10, "bfd")


def test_the_packer_takes_fewer_steps_than_there_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packer that looked at every pack for each row would take a million times as many."""
    looks = 0
    smallest = packing._Spaces.smallest

    def counted(spaces: Any, length: int) -> int | None:
        nonlocal looks
        looks += 1
        return smallest(spaces, length)

    monkeypatch.setattr(packing._Spaces, "smallest", counted)
    lengths = np.random.default_rng(0).integers(1, 2049, 50_000)
    packs = best_fit_decreasing(lengths, 4097)
    filled = np.bincount(packs, weights=lengths)
    assert filled.max() <= 4097 and filled[:-1].mean() > 0.98 * 4097
    assert looks < len(lengths)


@given(flags=FLAGS, max_length=st.sampled_from([30, 31, 64, 4097]), pad=st.integers(0, 3))
def test_supervised_text_is_the_same_packed_or_not(flags: list[list[bool]], max_length: int, pad: int) -> None:
    rows = rows_of(flags)
    packs, account = pack(rows, max_length, "bfd")
    assert learnt(packs, max_length) == learnt(rows)
    assert sorted(row.row_id for unit in packs for row in unit.rows) == [row.row_id for row in rows]
    assert (account.tokens, account.documents, account.lost_targets) == (int(rows.lengths.sum()), len(rows), 0)
    batch = collate(packs[:], PAD)
    flat = collate(packs[:], PAD, flatten=True)
    assert (batch.tokens, batch.supervised_tokens) == (flat.tokens, flat.supervised_tokens)
    assert flat.padding_tokens == 0 and flat.input_ids.shape == (1, account.tokens)
    assert batch.row_ids == flat.row_ids and batch.num_documents == len(rows)
    assert num_rows(packs) == len(rows)


@given(flags=FLAGS, max_length=st.integers(2, 12), strategy=st.sampled_from(["bfd_split", "wrapped"]))
def test_what_is_not_learnt_where_rows_are_cut_is_counted_and_nothing_else_changes(
    flags: list[list[bool]], max_length: int, strategy: str
) -> None:
    rows = rows_of(flags)
    packs, account = pack(rows, max_length, strategy)
    whole, cut_up = learnt(rows), learnt(packs, max_length)
    assert cut_up <= whole, "a pair is learnt that no row has"
    pieces = [row for unit in packs for row in unit.rows]
    starts = {(row.row_id, row.start) for row in pieces if row.start}
    lost = whole - cut_up
    first = {row.row_id: row.input_ids[0] for row in rows}
    # Every lost target begins a later piece, one that is in a pack or one that was left out.
    assert account.lost_targets == lost.total()
    assert {(row_id, first[row_id] + start) for row_id, start in starts if rows[row_id // 3].supervised[start]} <= {
        (row.row_id, target) for row in rows for _, target in lost if target in row.input_ids
    }
    assert sum(len(row.input_ids) for row in pieces) == account.tokens
    assert account.tokens + account.left_out_tokens == rows.lengths.sum()
    whole_rows = {row.row_id for row in rows if len(row.input_ids) == 1 or not any(row.supervised[1:])}
    assert all(row.num_targets or row.row_id in whole_rows for row in pieces), "a piece teaches nothing"
    assert account.cut_rows == sum(
        bool({piece.start for piece in pieces if piece.row_id == row.row_id} - {0})
        or len(row.input_ids) > sum(len(piece.input_ids) for piece in pieces if piece.row_id == row.row_id)
        for row in rows
    )


def test_positions_segments_and_targets_of_a_pack_by_hand() -> None:
    """Rows of three, one and two tokens beside a single row of seven; the padding counts on."""
    rows = rows_of([[True] * 3, [True], [True] * 2, [True] * 7])
    batch = collate([Pack(rows=(rows[0], rows[1], rows[2])), rows[3]], PAD)
    x = IGNORED
    assert batch.input_ids.tolist() == [[100, 101, 102, 103, 104, 105, PAD], [106, 107, 108, 109, 110, 111, 112]]
    assert batch.targets.tolist() == [[101, 102, x, x, 105, x, x], [107, 108, 109, 110, 111, 112, x]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2, 3, 3, 0], [1] * 7]
    assert batch.row_ids == (0, 3, 6, 9)
    assert (batch.tokens, batch.padding_tokens, batch.num_documents, batch.supervised_tokens) == (13, 1, 4, 9)
    assert batch.documents.lengths == (3, 1, 2, 1, 7) and batch.documents.has_several
    flat = collate([Pack(rows=(rows[0], rows[1], rows[2])), rows[3]], PAD, flatten=True)
    assert flat.input_ids.tolist() == [list(range(100, 113))]
    assert flat.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 0, 1, 2, 3, 4, 5, 6]]
    assert flat.segment_ids.tolist() == [[1, 1, 1, 2, 3, 3, 4, 4, 4, 4, 4, 4, 4]]
    assert flat.documents.lengths == (3, 1, 2, 7) and not flat.documents.is_padded


@given(flags=FLAGS)
def test_rows_one_by_one_are_the_same_batch_as_packs_of_one_and_flat_batches_of_one(flags: list[list[bool]]) -> None:
    rows = rows_of(flags)
    plain, packed = collate(rows[:], PAD), collate([Pack(rows=(row,)) for row in rows], PAD)
    for name in ("input_ids", "targets", "weights", "position_ids", "segment_ids"):
        assert torch.equal(getattr(plain, name), getattr(packed, name))
    first, flat = collate(rows[:1], PAD), collate(rows[:1], PAD, flatten=True)
    assert all(torch.equal(getattr(first, name), getattr(flat, name)) for name in ("input_ids", "targets"))


@pytest.mark.parametrize("flatten", [False, True])
def test_no_units_give_one_ignored_position(flatten: bool) -> None:
    batch = collate([], PAD, flatten=flatten)
    assert batch.input_ids.tolist() == [[PAD]] and batch.targets.tolist() == [[IGNORED]]
    assert (batch.tokens, batch.padding_tokens, batch.num_documents, batch.row_ids) == (0, 1, 0, ())


def prepared(rows: Rows, evaluation: Rows | None = None) -> Any:
    """Return what preparing such rows leaves behind, as far as packing reads it."""

    def account(name: str, of: Rows) -> SplitAccount:
        tokens = int(of.lengths.sum())
        return SplitAccount(
            name=name, sources={"rows.jsonl": len(of)}, rows_read=len(of), blank_lines=0, rows=len(of),
            tokens_read=tokens, tokens=tokens, supervised_tokens=sum(row.num_targets for row in of),
        )  # fmt: skip

    evaluated = None if evaluation is None else account("evaluation", evaluation)
    return SimpleNamespace(
        train=rows, evaluation=evaluation, account=Account(train=account("training", rows), evaluation=evaluated)
    )


@given(flags=FLAGS, max_length=st.integers(2, 40), strategy=st.sampled_from(STRATEGIES))
def test_the_account_of_tokens_and_targets_adds_up(flags: list[list[bool]], max_length: int, strategy: str) -> None:
    flags = [own for own in flags if strategy != "bfd" or len(own) <= max_length] or [[True, True]]
    rows = rows_of(flags)
    config = RunConfig(packing=True, max_length=max_length, packing_strategy=strategy)
    try:
        units = units_of(config, prepared(rows))
    except Refused:
        assert pack(rows, max_length, strategy)[1].lost_targets == sum(row.num_targets for row in rows)
        return
    account = units.account.train
    assert account.packing is not None
    assert account.tokens_read == account.tokens + account.packing.left_out_tokens
    assert account.supervised_tokens + sum(account.lost_targets.values()) == sum(map(sum, flags))
    batches = [collate([unit], PAD) for unit in units.train]
    assert sum(batch.tokens for batch in batches) == account.tokens
    assert sum(batch.supervised_tokens for batch in batches) == account.supervised_tokens
    assert sum(batch.num_documents for batch in batches) == account.packing.documents
    assert account.packing.efficiency == account.tokens / (len(units.train) * max_length)
    assert f"{account.packing.documents} document" in account.text()


def test_account_says_in_words_and_numbers_what_became_of_each_token() -> None:
    rows = rows_of([[False] * 12 + [True], [True] * 11, [True] * 3])
    config = RunConfig(packing=True, max_length=10, packing_strategy="bfd_split")
    account = units_of(config, prepared(rows)).account.train
    assert account.lost_targets == {FIRST_OF_ROW: 2, FIRST_OF_PIECE: 1}
    told = account.text()
    assert "  packed (bfd_split): 3 documents in 2 packs of at most 10 tokens, 80.0% filled\n" in told
    assert "  cut into pieces: 2 rows, each piece a document of its own\n" in told
    assert "  left out: 2 pieces of cut rows with nothing to learn, 11 tokens" in told
    assert "  not learnt: 1 token to be learnt, but first of a later piece" in told
    assert account.as_dict()["packing"]["left_out_tokens"] == 11
    assert (account.tokens, account.supervised_tokens, account.tokens_read) == (16, 12, 27)


def test_evaluation_is_packed_as_training_is_unless_it_is_said_otherwise() -> None:
    rows = rows_of([[True] * 4] * 6)
    found = {}
    for train in (False, True):
        for evaluation in (None, False, True):
            config = RunConfig(packing=train, eval_packing=evaluation, max_length=12)
            units = units_of(config, prepared(rows, rows))
            found[train, evaluation] = (len(units.train), len(units.evaluation or ()))
    assert found == {
        (False, None): (6, 6), (False, False): (6, 6), (False, True): (6, 2),
        (True, None): (2, 2), (True, False): (2, 6), (True, True): (2, 2),
    }  # fmt: skip


def test_rows_too_long_follow_overlong_unless_packing_cuts_them() -> None:
    plain = RunConfig(max_length=8)
    assert longest_row(plain, evaluation=False) == 8
    packed = replace(plain, packing=True)
    assert longest_row(packed, evaluation=False) == 8
    for strategy in ("bfd_split", "wrapped"):
        cutting = replace(packed, packing_strategy=strategy)
        assert longest_row(cutting, evaluation=False) is None and longest_row(cutting, evaluation=True) is None
        assert longest_row(replace(cutting, eval_packing=False), evaluation=True) == 8


def test_rows_from_arrays_are_the_rows_that_were_added() -> None:
    rows = rows_of([[True, False], [False], [True] * 5])
    again = Rows.over(row_ids=rows.row_ids, ends=rows.ends, input_ids=rows.tokens, supervised=rows.flags)
    assert list(again) == list(rows)
    assert list(pack(again, 5, "wrapped")[0]) == list(pack(rows, 5, "wrapped")[0])


def test_identity_of_rows_knows_which_rows_share_a_pack_and_where_they_were_cut() -> None:
    rows = rows_of([[True] * 4] * 6)
    plain = data_of(rows)
    digests = {
        data_of(pack(rows, max_length, strategy)[0])["digest"]
        for max_length, strategy in ((8, "bfd"), (12, "bfd"), (24, "bfd"), (3, "bfd_split"), (2, "bfd_split"))
    }
    assert len(digests | {plain["digest"]}) == 6
    assert data_of(pack(rows, 4, "bfd")[0]) == plain, "packs of one row are those rows"
    assert data_of(pack(rows, 8, "bfd")[0])["count"] == plain["count"] == 6
    whole = Row(row_id=0, input_ids=[1, 2], supervised=[True, True])
    assert data_of([whole]) != data_of([replace(whole, start=2)])
