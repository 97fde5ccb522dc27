"""Rows of random tokens, all of one length, for steps whose result nobody wants.

Not for data that is read (`halo_core.data.prepare`).
"""

from __future__ import annotations

import numpy as np

from halo_core.data.rows import Row, Rows


def make(count: int, *, length: int, vocab_size: int, seed: int) -> Rows:
    """Return `count` rows of exactly `length` tokens, every token supervised: nothing is padded or packed.

    The same arguments give the same rows on every machine.
    """
    # Raw words, which numpy keeps the same over its versions; the bias of the remainder is below one in 10**13.
    words = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count * length)
    tokens = (words % np.uint64(vocab_size)).astype(np.int64).reshape(count, length)
    rows = Rows()
    for row_id, row in enumerate(tokens):
        rows.add(Row(row_id=row_id, input_ids=row.tolist(), supervised=[True] * length))
    return rows
