"""Makes a batch out of tokenised rows: padding on the right, and the one place where targets are shifted.

Not for masks (decided per row when it is prepared) and not for packing several rows into one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halo_core.data.batch import IGNORED, Batch
from halo_core.data.rows import Row


def collate(rows: Sequence[Row], pad_id: int) -> Batch:
    """Return the batch [B, S] of `rows`: B = number of rows, S = length of the longest one in tokens.

    Padding is known by its position alone (segment 0), so a pad token that is also the end token of a turn is learnt
    where it ends a turn and ignored where it fills. No rows at all (a rank that has none in a short last window) give
    one position of padding: the rank runs the same forward and adds nothing.
    """
    length = max((len(row.input_ids) for row in rows), default=1)
    shape = (max(len(rows), 1), length)
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    targets = torch.full(shape, IGNORED, dtype=torch.int64)
    segment_ids = torch.zeros(shape, dtype=torch.int64)
    for index, row in enumerate(rows):
        tokens = torch.tensor(row.input_ids, dtype=torch.int64)
        supervised = torch.tensor(row.supervised, dtype=torch.bool)
        assert tokens.shape == supervised.shape, f"row {row.row_id}: {len(tokens)} tokens, {len(supervised)} flags"
        count = len(tokens)
        input_ids[index, :count] = tokens
        segment_ids[index, :count] = 1
        targets[index, : count - 1] = torch.where(supervised[1:], tokens[1:], IGNORED)
    return Batch(
        input_ids=input_ids,
        targets=targets,
        weights=(targets != IGNORED).to(torch.float32),
        # Counted on over the padding: positions that start again at 0 read as a packed document to attention code
        # that looks for document borders in them.
        position_ids=torch.arange(length, dtype=torch.int64).expand(shape).contiguous(),
        segment_ids=segment_ids,
        row_ids=tuple(row.row_id for row in rows),
    )
