"""Makes a batch out of rows or packs: documents side by side, padding on the right, and the one place where targets
are shifted.

Not for masks (decided per row when it is prepared) and not for choosing which rows share a pack (`packing.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halo_core.data.batch import IGNORED, Batch
from halo_core.data.units import Unit
from halo_core.kernels import documents as borders


def collate(units: Sequence[Unit], pad_id: int, flatten: bool = False) -> Batch:
    """Return the batch [B, S] of `units`: B = their number, S = tokens of the longest; a pack is one row of it.

    flatten: all documents in one row [1, T] of real tokens, so that nothing is padded.

    Each document counts its positions from 0 and has a segment of its own, from 1 within its row; no target crosses
    from one document to the next, so the first token of each is no target. Padding is known by its position alone
    (segment 0), so a pad token that is also the end token of a turn is learnt where it ends a turn and ignored where
    it fills. No units at all (a rank that has none in a short last window) give one position of padding: the rank runs
    the same forward and adds nothing.
    """
    packs = [unit.documents for unit in units]
    if flatten:
        packs = [tuple(document for documents in packs for document in documents)]
    length = max((sum(len(document.input_ids) for document in documents) for documents in packs), default=0) or 1
    shape = (max(len(packs), 1), length)
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    targets = torch.full(shape, IGNORED, dtype=torch.int64)
    segment_ids = torch.zeros(shape, dtype=torch.int64)
    # Counted on over the padding: positions that start again at 0 read as a packed document to attention code
    # that looks for document borders in them.
    position_ids = torch.arange(length, dtype=torch.int64).repeat(shape[0], 1)
    for index, documents in enumerate(packs):
        begin = 0
        for segment, document in enumerate(documents, start=1):
            tokens = torch.tensor(document.input_ids, dtype=torch.int64)
            supervised = torch.tensor(document.supervised, dtype=torch.bool)
            count = len(tokens)
            assert tokens.shape == supervised.shape, f"row {document.row_id}: {count} tokens, {len(supervised)} flags"
            end = begin + count
            input_ids[index, begin:end] = tokens
            segment_ids[index, begin:end] = segment
            position_ids[index, begin:end] = torch.arange(count, dtype=torch.int64)
            targets[index, begin : end - 1] = torch.where(supervised[1:], tokens[1:], IGNORED)
            begin = end
        if documents:
            last = len(documents[-1].input_ids)
            position_ids[index, begin:] = torch.arange(last, last + length - begin, dtype=torch.int64)
    return Batch(
        input_ids=input_ids,
        targets=targets,
        weights=(targets != IGNORED).to(torch.float32),
        position_ids=position_ids,
        segment_ids=segment_ids,
        row_ids=tuple(document.row_id for documents in packs for document in documents),
        documents=borders.find(segment_ids),
    )
