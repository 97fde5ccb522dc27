"""Tokenised rows, and a compact sequence of many of them.

Not for reading or rendering them (`read.py`, `template.py`), nor for putting several together (`units.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

_PIECES_AT_ONCE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tokenised row, or a piece of one that was cut.

    `row_id` is its position in the data as read, from 0, dropped rows counted. `supervised[i]` says whether token `i`
    of `input_ids` is to be learnt; the first token never has a position to be predicted from. `start` is the place of
    the first token in the whole row: above 0 in the later pieces of a row that packing has cut.
    """

    row_id: int
    input_ids: Sequence[int]
    supervised: Sequence[bool]
    start: int = 0

    @property
    def documents(self) -> tuple[Row, ...]:
        """The documents of this unit: the row itself. A pack answers with all of its rows."""
        return (self,)

    @property
    def num_targets(self) -> int:
        """The number of tokens that are learnt: the supervised ones that have a token before them."""
        return sum(self.supervised[1:])


class Rows(Sequence[Row]):
    """A read-only sequence of rows in three flat buffers: about five bytes a token instead of some sixteen."""

    def __init__(self) -> None:
        self._row_ids: Any = array("q")
        self._ends: Any = array("q", [0])
        self._input_ids: Any = array("i")
        self._supervised: Any = bytearray()

    @classmethod
    def over(cls, *, row_ids: np.ndarray, ends: np.ndarray, input_ids: np.ndarray, supervised: np.ndarray) -> Rows:
        """Return rows that lie in arrays already, such as files mapped into memory; nothing is copied.

        row_ids [rows] int64. ends [rows + 1] int64: row n holds the tokens from ends[n] to ends[n + 1]; ends[0] is 0.
        input_ids [tokens] int32. supervised [tokens] uint8, 0 or 1. No row can be added to them.
        """
        rows = cls()
        rows._row_ids, rows._ends, rows._input_ids, rows._supervised = row_ids, ends, input_ids, supervised
        return rows

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
        return self.piece(position, 0, self.length(position))

    def __iter__(self) -> Iterator[Row]:
        return (self[position] for position in range(len(self)))

    def length(self, index: int) -> int:
        """Return the number of tokens of one row, without making the row."""
        return int(self._ends[index + 1] - self._ends[index])

    def piece(self, index: int, start: int, end: int) -> Row:
        """Return the tokens `start` to `end` of row `index` (from 0) as a row of their own."""
        first = int(self._ends[index])
        return Row(
            row_id=int(self._row_ids[index]),
            input_ids=self._input_ids[first + start : first + end].tolist(),
            supervised=[flag == 1 for flag in bytes(self._supervised[first + start : first + end])],
            start=start,
        )

    def feed(self, update: Callable[[Any], object]) -> int:
        """Give `update` the bytes of every row, and return how many rows there are; see `feed_pieces`."""
        zeros = np.zeros(len(self), dtype=np.int64)
        self.feed_pieces(update, np.arange(len(self)), zeros, self.lengths, zeros)
        return len(self)

    def feed_pieces(
        self, update: Callable[[Any], object], rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, packs: np.ndarray
    ) -> None:
        """Give `update` the bytes of pieces of rows, in their order; all arguments are [pieces] int64.

        rows: the index of the row. starts, ends: its tokens. packs: of the first piece of a pack of several, how many
        they are; else 0. The bytes are equal exactly when row number, tokens, flags, place and pack of each piece are.
        A hash of a million short rows takes three seconds this way, and thirteen row by row (one core of a Xeon).
        """
        tokens, flags = self.tokens, self.flags
        for block in (slice(first, first + _PIECES_AT_ONCE) for first in range(0, len(rows), _PIECES_AT_ONCE)):
            begins, lengths = self.ends[rows[block]] + starts[block], ends[block] - starts[block]
            heads = np.stack([self.row_ids[rows[block]], lengths], axis=1)
            columns = (begins.tolist(), (begins + lengths).tolist(), starts[block].tolist(), packs[block].tolist())
            for head, begin, end, start, pack in zip(heads, *columns, strict=True):
                if pack:  # no row has a negative number
                    update(array("q", [-pack]).tobytes())
                update(head)
                update(tokens[begin:end].astype(np.int64))
                update(flags[begin:end])
                if start:
                    update(array("q", [start]).tobytes())

    @property
    def ends(self) -> np.ndarray:
        """The borders of the rows in the tokens of them all, [rows + 1] int64: the first is 0."""
        return np.asarray(self._ends, dtype=np.int64)

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each row, [rows] int64."""
        return np.diff(self.ends)

    @property
    def row_ids(self) -> np.ndarray:
        """The number of each row in the data as read, [rows] int64."""
        return np.asarray(self._row_ids, dtype=np.int64)

    @property
    def tokens(self) -> np.ndarray:
        """The tokens of all rows, one row after the other, [tokens] int32."""
        return np.asarray(self._input_ids, dtype=np.int32)

    @property
    def flags(self) -> np.ndarray:
        """For each token of all rows whether it is to be learnt, [tokens] uint8, 0 or 1."""
        return np.frombuffer(self._supervised, dtype=np.uint8) if len(self._supervised) else np.zeros(0, np.uint8)
