"""Which part of a tensor a process holds, which process writes it, and how parts of two layouts overlap.

Not for files. A part is a box: where it begins in the whole tensor, and its shape. Sharding over experts, over
processes, over both and not at all are then one case, and a tensor can be read in another layout than it was written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of a tensor. offset: its first element's index in the whole. shape: its own, per dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def within(self, outer: Piece) -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that holds `outer`."""
        starts = [own - first for own, first in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


def whole(shape: Iterable[int]) -> Piece:
    """Return the box that is all of a tensor."""
    sizes = tuple(shape)
    return Piece(offset=(0,) * len(sizes), shape=sizes)


def piece_of(tensor: Tensor) -> Piece:
    """Return the box that this process holds; a plain tensor is whole everywhere.

    Raises:
        NotImplementedError: a tensor whose processes hold summands, or several boxes, which no checkpoint has.
    """
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    chunks = tensor.__create_chunk_list__()  # what torch's own checkpoints ask a tensor
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local(tensor).shape):
        raise NotImplementedError(f"a tensor laid out as {tensor.placements} is not one box per process")
    return Piece(offset=tuple(chunks[0].offsets), shape=tuple(chunks[0].sizes))


def local(tensor: Tensor) -> Tensor:
    """Return this process's own part, sharing its memory, outside autograd."""
    with torch.no_grad():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert isinstance(own, Tensor)
        return own.detach()


def overlap(first: Piece, second: Piece) -> Piece | None:
    """Return the box that two boxes of one tensor share, or None."""
    starts = [max(one, other) for one, other in zip(first.offset, second.offset, strict=True)]
    sizes = [
        min(a + m, b + n) - start
        for a, m, b, n, start in zip(first.offset, first.shape, second.offset, second.shape, starts, strict=True)
    ]
    if any(size <= 0 for size in sizes):
        return None
    return Piece(offset=tuple(starts), shape=tuple(sizes))


def writers(held: Sequence[Mapping[str, Piece]], among: Sequence[int]) -> dict[tuple[str, Piece], int]:
    """Return who writes which box: of the processes `among` that hold it, the lowest. Empty boxes are left out.

    held: per rank, name -> box.
    """
    chosen: dict[tuple[str, Piece], int] = {}
    for rank in sorted(among):
        for name, piece in held[rank].items():
            if piece.numel:
                chosen.setdefault((name, piece), rank)
    return chosen


def check_whole(shapes: Mapping[str, Sequence[int]], written: Iterable[tuple[str, Piece]]) -> None:
    """Check that the boxes to be written make up every tensor, none twice.

    Raises:
        RuntimeError: naming a tensor of which an element would be lost or doubled.
    """
    counts = dict.fromkeys(shapes, 0)
    for name, piece in written:
        counts[name] += piece.numel
    for name, shape in shapes.items():
        if counts[name] != math.prod(shape):
            raise RuntimeError(f"{name} has {math.prod(shape)} elements and {counts[name]} of them would be written")
