"""Which rows, or pieces of rows, share a pack of at most `max_length` tokens: a pure function of their lengths.

Not for the rows themselves nor for what is learnt of them (`units.py`), nor for the order of packs (`order.py`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

STRATEGIES = ("bfd", "bfd_split", "wrapped")
"""The strategies, as TRL names them. `bfd`: best fit decreasing, every row whole. `bfd_split`: the same over rows and
the pieces of rows longer than a pack. `wrapped`: the rows one after the other, cut wherever a pack is full.
Source: Ding et al., Fewer Truncations Improve Language Modeling (arXiv 2404.10830), for best fit decreasing."""


def splits(strategy: str) -> bool:
    """Return whether a strategy cuts rows longer than a pack, so that none of them is too long."""
    return strategy != "bfd"


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Rows, or what they are cut into, in the order of the data; all arrays are [pieces] int64.

    rows: the index of the row. starts, ends: its tokens, from the first one to the one after the last. packs: the
    number of the pack, from 0, where cutting has decided it already (`wrapped`); else None.
    """

    rows: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    packs: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each piece, [pieces] int64."""
        lengths: np.ndarray = self.ends - self.starts
        return lengths

    def taken(self, which: np.ndarray) -> Pieces:
        """Return the pieces of a mask [pieces] bool, or of indices in their order."""
        packs = None if self.packs is None else self.packs[which]
        return Pieces(rows=self.rows[which], starts=self.starts[which], ends=self.ends[which], packs=packs)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Packs of pieces. pieces: in the order of packs, within one in the order of the data. borders [packs + 1] int64:
    pack n holds the pieces from borders[n] to borders[n + 1]; no pack is empty."""

    pieces: Pieces
    borders: np.ndarray

    def __len__(self) -> int:
        return len(self.borders) - 1


def cut(lengths: np.ndarray, max_length: int, strategy: str) -> Pieces:
    """Return the pieces of rows of `lengths` [rows] int64, each at least 1 and, under `bfd`, at most `max_length`.

    Raises:
        ValueError: for our own bugs: an empty row, one that is too long, a strategy that is not known.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"no such packing strategy: {strategy}")
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and (lengths.min() < 1 or (not splits(strategy) and lengths.max() > max_length)):
        raise ValueError(f"rows of {lengths.min()} to {lengths.max()} tokens do not go whole into {max_length}")
    # Where a row begins, counted in tokens from a place where a pack begins: its own, or that of the first row.
    begins = np.cumsum(lengths) - lengths if strategy == "wrapped" else np.zeros_like(lengths)
    first = begins // max_length
    counts = (begins + lengths - 1) // max_length - first + 1
    rows = np.repeat(np.arange(len(lengths)), counts)
    # The place of a piece among those of its row, from 0.
    places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    packs = first[rows] + places
    return Pieces(
        rows=rows,
        starts=np.maximum(begins[rows], packs * max_length) - begins[rows],
        ends=np.minimum((begins + lengths)[rows], (packs + 1) * max_length) - begins[rows],
        packs=packs if strategy == "wrapped" else None,
    )


def lay_out(pieces: Pieces, max_length: int) -> Layout:
    """Return the packs of `pieces`: those decided by cutting, else by best fit decreasing."""
    packs = best_fit_decreasing(pieces.lengths, max_length) if pieces.packs is None else pieces.packs
    order = np.argsort(packs, kind="stable")
    in_order = packs[order]
    begins = np.flatnonzero(np.diff(in_order, prepend=-1))  # packs count from 0, so the first one begins at 0
    borders = np.append(begins, len(in_order))
    return Layout(pieces=pieces.taken(order), borders=borders)


def best_fit_decreasing(lengths: np.ndarray, max_length: int) -> np.ndarray:
    """Return the pack of each length, [pieces] int64 from 0; no pack holds more than `max_length`.

    The longest comes first, equal ones in their order, and each goes where it leaves the least space; among equal
    spaces, to the pack that has had it the longest. Pieces of one length are placed together: a pack takes as many of
    them as fit before the next pack is looked at, which is where one by one would have put them, so a million pieces
    take well under a second.
    """
    order = np.argsort(-lengths, kind="stable")
    packs = np.empty(len(lengths), dtype=np.int64)
    ordered = lengths[order]
    runs = np.append(np.flatnonzero(np.diff(ordered, prepend=-1)), len(ordered))  # where each length begins
    spaces = _Spaces()
    num_packs = 0
    for begin, end in pairwise(runs):
        length, left = int(ordered[begin]), order[begin:end]
        while len(left):
            space = spaces.smallest(length)
            each = (max_length if space is None else space) // length
            wanted = -(-len(left) // each)
            if space is None:
                space, chosen = max_length, np.arange(num_packs, num_packs + wanted)
                num_packs += wanted
            else:
                chosen = spaces.take(space, wanted)
            count = min(len(left), each * len(chosen))
            packs[left[:count]] = np.repeat(chosen, each)[:count]
            left = left[count:]
            last = count - each * (len(chosen) - 1)  # what the last pack got: fewer when they run out
            spaces.put(space - each * length, chosen[:-1])
            spaces.put(space - last * length, chosen[-1:])
    return packs


class _Spaces:
    """Packs by the space they have left, in tokens; full ones are forgotten."""

    def __init__(self) -> None:
        self._packs: dict[int, deque[np.ndarray]] = {}
        self._sizes: list[int] = []

    def smallest(self, length: int) -> int | None:
        """Return the smallest space of at least `length` that some pack has."""
        place = bisect_left(self._sizes, length)
        return self._sizes[place] if place < len(self._sizes) else None

    def put(self, space: int, packs: np.ndarray) -> None:
        """Add packs that have this space."""
        if space == 0 or not len(packs):
            return
        if space not in self._packs:
            self._packs[space] = deque()
            insort(self._sizes, space)
        self._packs[space].append(packs)

    def take(self, space: int, wanted: int) -> np.ndarray:
        """Return, and remove, the first packs that have this space: `wanted` of them, or fewer."""
        waiting = self._packs[space]
        packs = waiting.popleft()
        if len(packs) > wanted:
            waiting.appendleft(packs[wanted:])
            packs = packs[:wanted]
        if not waiting:
            del self._packs[space]
            self._sizes.remove(space)
        return packs
