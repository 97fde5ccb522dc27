"""From rows to a batch: padding, the shift of targets, what counts as a token. Not for masks of conversations."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from halo_core.data import IGNORED, Row, Rows, collate

TOKENS = st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=12)


def made(row_id: int, tokens: list[tuple[int, bool]]) -> Row:
    """Return a row out of pairs of token and flag."""
    return Row(row_id=row_id, input_ids=[token for token, _ in tokens], supervised=[flag for _, flag in tokens])


@given(rows=st.lists(TOKENS, min_size=1, max_size=5), pad_id=st.integers(0, 20))
def test_each_position_predicts_the_next_supervised_token(rows: list[list[tuple[int, bool]]], pad_id: int) -> None:
    batch = collate([made(index, tokens) for index, tokens in enumerate(rows)], pad_id)
    length = max(len(tokens) for tokens in rows)
    for index, tokens in enumerate(rows):
        for position in range(length):
            follows = tokens[position + 1] if position + 1 < len(tokens) else (0, False)
            expected = follows[0] if follows[1] else IGNORED
            assert batch.targets[index, position] == expected
            assert batch.weights[index, position] == (1.0 if follows[1] else 0.0)
            assert batch.input_ids[index, position] == (tokens[position][0] if position < len(tokens) else pad_id)
            assert batch.segment_ids[index, position] == (1 if position < len(tokens) else 0)
            assert batch.position_ids[index, position] == position
    assert batch.tokens == sum(len(tokens) for tokens in rows)
    assert batch.supervised_tokens == sum(flag for tokens in rows for _, flag in tokens[1:])
    assert batch.row_ids == tuple(range(len(rows)))


def test_pad_token_that_is_the_end_token_is_learnt_inside_the_row_and_ignored_after_it() -> None:
    end = 9
    rows = [made(0, [(1, False), (2, True), (end, True)]), made(1, [(1, False), (2, True), (3, True), (4, True)])]
    batch = collate(rows, pad_id=end)
    assert batch.targets[0].tolist() == [2, end, IGNORED, IGNORED]
    assert batch.input_ids[0].tolist() == [1, 2, end, end]


def test_types_are_those_of_the_contract_and_move_together() -> None:
    batch = collate([made(5, [(1, True), (2, True)])], 0).to("cpu")
    kinds = {name: getattr(batch, name).dtype for name in ("input_ids", "targets", "position_ids", "segment_ids")}
    assert set(kinds.values()) == {torch.int64}
    assert batch.weights.dtype == torch.float32
    assert batch.row_ids == (5,)


def test_no_rows_give_a_batch_without_tokens_or_targets() -> None:
    batch = collate([], pad_id=7)
    assert batch.input_ids.tolist() == [[7]]
    assert (batch.tokens, batch.supervised_tokens, batch.row_ids) == (0, 0, ())


@given(rows=st.lists(TOKENS, max_size=6))
def test_compact_rows_are_the_rows_that_went_in(rows: list[list[tuple[int, bool]]]) -> None:
    expected = [made(3 * index, tokens) for index, tokens in enumerate(rows)]
    stored = Rows()
    for row in expected:
        stored.add(row)
    assert list(stored) == expected
    assert stored[1:] == expected[1:]
    assert len(stored) == len(expected)
    for index, row in enumerate(expected):
        assert stored[index - len(expected)] == row
        assert stored.length(index) == len(row.input_ids)
        assert stored[index].num_targets == sum(row.supervised[1:])
