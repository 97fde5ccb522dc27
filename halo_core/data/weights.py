"""Data sets with weights: how often an epoch sees each of their rows, and the rows in that number.

Not for the order of an epoch (`order.py`). Everything is a function of counts and weights alone: no seed, so every
process and every run makes the same choice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from halo_core.data.rows import Rows

_BLOCK = 1 << 22
"""Tokens copied at once, about."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some rows in flat arrays: row_ids [rows] int64, lengths [rows] int64, input_ids [tokens] int32, supervised
    [tokens] uint8."""

    row_ids: np.ndarray
    lengths: np.ndarray
    input_ids: np.ndarray
    supervised: np.ndarray


def times_seen(count: int, weight: float) -> np.ndarray:
    """Return how often an epoch sees each of `count` rows of a set with this weight, [count] int64.

    Each row as often as the whole part of the weight says, and the nearest number of rows to the rest once more:
    2.5 is every row twice and half of them a third time, 0.5 half of them. Which half follows from a hash.
    """
    exact = Fraction(repr(float(weight)))
    whole = int(exact)
    seen = np.full(count, whole, dtype=np.int64)
    more = int((exact - whole) * count + Fraction(1, 2))
    if more:
        key = hashlib.blake2b(f"rows of a weight, {count} rows".encode(), digest_size=16).digest()
        words = np.random.PCG64(np.random.SeedSequence(int.from_bytes(key, "little"))).random_raw(count)
        seen[np.argsort(words, kind="stable")[:more]] += 1
    return seen


def seen_of(kept: Mapping[str, int], weights: Mapping[str, float]) -> np.ndarray:
    """Return how often an epoch sees each kept row, [rows] int64. kept: data set -> rows kept of it, in their order."""
    parts = [times_seen(count, weights.get(key, 1.0)) for key, count in kept.items()]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def positions(seen: np.ndarray) -> np.ndarray:
    """Return the positions of the rows that an epoch sees, [sum of seen] int64: once through the data, then again."""
    passes = [np.flatnonzero(seen > number) for number in range(int(seen.max(initial=0)))]
    return np.concatenate(passes) if passes else np.zeros(0, dtype=np.int64)


def blocks(rows: Rows, which: np.ndarray) -> Iterator[Block]:
    """Yield the rows at the positions `which` [n] int64, some at once, so that memory stays bounded."""
    lengths = rows.lengths[which]
    begin = 0
    filled = np.cumsum(lengths)
    while begin < len(which):
        base = int(filled[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(filled, base + _BLOCK, side="right")))
        own, sizes = which[begin:end], lengths[begin:end]
        firsts = rows.ends[own]
        within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        tokens = np.repeat(firsts, sizes) + within
        yield Block(
            row_ids=rows.row_ids[own], lengths=sizes, input_ids=rows.tokens[tokens], supervised=rows.flags[tokens]
        )
        begin = end


def gathered(rows: Rows, which: np.ndarray) -> Rows:
    """Return the rows at the positions `which` as rows in memory."""
    found: Sequence[Block] = list(blocks(rows, which))
    return Rows.over(
        row_ids=np.concatenate([block.row_ids for block in found]),
        ends=np.concatenate([[0], np.cumsum(np.concatenate([block.lengths for block in found]))]).astype(np.int64),
        input_ids=np.concatenate([block.input_ids for block in found]),
        supervised=np.concatenate([block.supervised for block in found]),
    )
