"""Where documents lie: numbers, borders and lengths of segment ids, padding as documents of their own."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halo_core.kernels.documents import find


def test_documents_and_stretches_of_padding_are_counted_over_the_whole_batch() -> None:
    found = find(torch.tensor([[0, 1, 1, 2, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]))
    assert found.numbers.tolist() == [[0, 1, 1, 2, 3, 3], [4] * 6, [5] * 6]
    assert found.borders.tolist() == [0, 1, 3, 4, 6, 12, 18]
    assert found.lengths == (1, 2, 1, 2, 6, 6)
    assert found.longest == 6
    assert found.has_several
    assert found.is_padded
    assert found.numbers.dtype == found.borders.dtype == torch.int32


def test_one_document_a_row_is_not_several_whatever_pads_it() -> None:
    assert not find(torch.tensor([[0, 1, 1], [1, 0, 0]])).has_several
    whole = find(torch.tensor([[1, 1], [1, 1]]))
    assert not whole.has_several
    assert not whole.is_padded
    assert whole.borders.tolist() == [0, 2, 4], "a row's end is a border"


def test_no_position_has_no_document() -> None:
    found = find(torch.zeros(0, 4, dtype=torch.int64))
    assert found.borders.tolist() == [0]
    assert (found.lengths, found.longest, found.has_several, found.is_padded) == ((), 0, False, False)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1, max_size=3))
def test_borders_lengths_and_numbers_say_the_same(rows: list[list[int]]) -> None:
    found = find(torch.tensor(rows))
    assert found.borders.diff().tolist() == list(found.lengths)
    assert sum(found.lengths) == 7 * len(rows)
    counted = torch.repeat_interleave(torch.arange(len(found.lengths)), torch.tensor(found.lengths))
    assert found.numbers.flatten().tolist() == counted.tolist()
    together = [
        (row, place) for row, ids in enumerate(rows) for place in range(6) if ids[place] == ids[place + 1]
    ]
    same = found.numbers[:, 1:] == found.numbers[:, :-1]
    assert together == [tuple(place) for place in same.nonzero().tolist()]
