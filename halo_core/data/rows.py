"""Tokenised rows, and a compact sequence of many of them.

Not for reading or rendering them (`read.py`, `template.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tokenised row.

    `row_id` is its position in the data as read, from 0, dropped rows counted. `supervised[i]` says whether token `i`
    of `input_ids` is to be learnt; the first token never has a position to be predicted from.
    """

    row_id: int
    input_ids: Sequence[int]
    supervised: Sequence[bool]

    @property
    def num_targets(self) -> int:
        """The number of tokens that are learnt: the supervised ones that have a token before them."""
        return sum(self.supervised[1:])


class Rows(Sequence[Row]):
    """A read-only sequence of rows in three flat buffers: about five bytes a token instead of some sixteen."""

    def __init__(self) -> None:
        self._row_ids = array("q")
        self._ends = array("q", [0])
        self._input_ids = array("i")
        self._supervised = bytearray()

    def add(self, row: Row) -> None:
        """Append a row; only for the one who prepares the sequence."""
        self._row_ids.append(row.row_id)
        self._input_ids.extend(row.input_ids)
        self._supervised.extend(row.supervised)
        self._ends.append(len(self._input_ids))

    def __len__(self) -> int:
        return len(self._row_ids)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        start, end = self._ends[position], self._ends[position + 1]
        return Row(
            row_id=self._row_ids[position],
            input_ids=self._input_ids[start:end].tolist(),
            supervised=[flag == 1 for flag in self._supervised[start:end]],
        )

    def __iter__(self) -> Iterator[Row]:
        return (self[position] for position in range(len(self)))

    def length(self, index: int) -> int:
        """Return the number of tokens of one row, without making the row."""
        return self._ends[index + 1] - self._ends[index]
