"""Rows of random tokens, all of one length or of many, for steps whose result nobody wants.

Not for data that is read (`halo_core.data.prepare`).
"""

from __future__ import annotations

import numpy as np

from halo_core.data.rows import Row, Rows

SHORTEST = 2
"""Tokens of the shortest row from which something can be learnt."""


def make(count: int, *, length: int, vocab_size: int, seed: int, mean_length: int | None = None) -> Rows:
    """Return `count` rows of exactly `length` tokens, every token supervised: nothing is padded or packed.

    mean_length: rows have many lengths instead, see `lengths`; `length` is the longest then.

    The same arguments give the same rows on every machine.
    """
    words = np.random.PCG64(np.random.SeedSequence(seed)).random_raw  # raw: numpy keeps them the same over its versions
    counts = [length] * count if mean_length is None else lengths(words(count), mean_length, length).tolist()
    # The bias of the remainder is below one in 10**13.
    tokens = (words(sum(counts)) % np.uint64(vocab_size)).astype(np.int64)
    rows = Rows()
    begin = 0
    for row_id, size in enumerate(counts):
        rows.add(Row(row_id=row_id, input_ids=tokens[begin : begin + size].tolist(), supervised=[True] * size))
        begin += size
    return rows


def lengths(words: np.ndarray, mean: int, longest: int) -> np.ndarray:
    """Return row lengths [rows] int64 in rising order, from one random 64-bit word each: many short, a few long ones.

    Exponentially distributed with this mean, in tokens, then cut to at most `longest` and at least two, which takes a
    fiftieth from the mean where `longest` is four times as much. Each row has its own equal share of the distribution,
    so that a few rows have its mean too.
    """
    shares = (np.arange(len(words)) + (words >> np.uint64(11)).astype(np.float64) / 2.0**53) / max(len(words), 1)
    drawn = np.ceil(-mean * np.log1p(-shares)).astype(np.int64)
    return np.clip(drawn, SHORTEST, longest)
