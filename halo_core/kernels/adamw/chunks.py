"""How the elements of many parameters are divided among the programs of one launch. No Triton here.

Not for the noise: a chunk says where its elements lie in the whole tensor, and noise follows from that alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halo_core.kernels.adamw.boxes import Box
from halo_core.kernels.adamw.noise import WORDS

VECTOR = 8
"""Elements that one thread reads at once: 16 bytes of bf16. A whole chunk begins at a multiple of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunks:
    """A row of (part, local, offset, length) per program, [C, 4] int64.

    part: number of the parameter. local: the first element among those of this process. offset: the same in the whole
    tensor. whole: chunks of exactly one block, which begin where memory and noise are read in full width. ragged: the
    others, which together with their lead-in fit into a block.
    """

    whole: Tensor
    ragged: Tensor

    @property
    def count(self) -> int:
        """Return the number of chunks."""
        return len(self.whole) + len(self.ragged)

    def to(self, device: torch.device) -> Chunks:
        """Return the same rows on a device."""
        return Chunks(whole=self.whole.to(device), ragged=self.ragged.to(device))


def chunks(boxes: Sequence[Sequence[Box]], aligned: Sequence[bool], block: int) -> Chunks:
    """Return the chunks of all parameters.

    boxes: of each parameter. aligned: whether all its tensors begin at a multiple of 16 bytes. block: elements of a
    program, a multiple of `VECTOR`.
    """
    whole, ragged = [], []
    for part, (held, fits) in enumerate(zip(boxes, aligned, strict=True)):
        for box in held:
            straight = (box.local % VECTOR == 0) & (box.offset % WORDS == 0) & fits
            full = box.length // block
            rows = box.local[straight], box.offset[straight]
            whole.append(_pieces(part, *rows, 0, full, block, block))
            ragged.append(_pieces(part, *rows, full * block, int(box.length > full * block), block, box.length))
            # Elsewhere a program first reaches back to a multiple of four, so it has less room.
            room = block - WORDS
            rows = box.local[~straight], box.offset[~straight]
            ragged.append(_pieces(part, *rows, 0, -(-box.length // room), room, box.length))
    nothing = torch.empty(0, 4, dtype=torch.int64)
    return Chunks(whole=torch.cat([nothing, *whole]), ragged=torch.cat([nothing, *ragged]))


def _pieces(part: int, local: Tensor, offset: Tensor, begin: int, count: int, size: int, end: int) -> Tensor:
    """Return `count` chunks of `size` elements for each row, from its element `begin`; none goes beyond `end`."""
    if not count or not len(local):
        return torch.empty(0, 4, dtype=torch.int64)
    starts = begin + torch.arange(count) * size
    lengths = torch.full_like(starts, size) if end == size else (end - starts).clamp(max=size)
    rows = (local.unsqueeze(-1) + starts, offset.unsqueeze(-1) + starts, lengths.expand(len(local), count))
    return torch.stack([torch.full_like(rows[0], part), *rows], dim=-1).view(-1, 4)
