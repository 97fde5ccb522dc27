"""Where in the whole tensor the elements lie that this process holds, as boxes of whole rows.

Not for files (`halo_core.checkpoint.pieces` has a box per process and who writes it). A shard may be several boxes, and
their place in the whole does not depend on how many processes share it: that is what noise is drawn by.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass(frozen=True, kw_only=True, eq=False)
class Box:
    """Rows of equal length: each lies in one piece in this process's memory, and in one piece in the whole tensor.

    local [R] int64: where a row begins among this process's elements in row-major order. offset [R] int64: where it
    begins in the whole tensor in row-major order. length: elements of a row.
    """

    local: Tensor
    offset: Tensor
    length: int


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Neighbouring indices of one dim: `size` of them, from `start` in the whole, from `local` in this process."""

    start: int
    local: int
    size: int


def boxes_of(tensor: Tensor) -> tuple[Box, ...]:
    """Return the boxes that this process holds of a tensor; none where it holds no element, one of a plain tensor.

    Raises:
        NotImplementedError: a layout whose processes hold summands, or one that is not a choice of indices per dim.
    """
    if not isinstance(tensor, DTensor):
        return rows_of(tensor.shape, tensor.shape, [[_Run(start=0, local=0, size=size)] for size in tensor.shape])
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return ()
    held = [torch.arange(size) for size in tensor.shape]
    for at, count, placement in zip(place, tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, _StridedShard):
            halves = _chunks(held[placement.dim], placement.split_factor)
            held[placement.dim] = torch.cat([_chunks(half, count)[at] for half in halves])
        elif isinstance(placement, Shard):
            held[placement.dim] = _chunks(held[placement.dim], count)[at]
        elif not isinstance(placement, Replicate):
            raise NotImplementedError(f"a tensor laid out as {tensor.placements} has no elements of its own here")
    local = tuple(indices.numel() for indices in held)
    with torch.no_grad():
        if local != tuple(tensor.to_local().shape):
            raise NotImplementedError(f"a part {tuple(tensor.to_local().shape)} of a tensor laid out as "
                                      f"{tensor.placements} is not the {local} that its layout gives")
    return rows_of(tensor.shape, local, [_runs(indices) for indices in held])


def rows_of(whole: Sequence[int], local: Sequence[int], runs: Sequence[Sequence[_Run]]) -> tuple[Box, ...]:
    """Return the boxes of one run per dim, for every choice of runs. whole and local: the shapes."""
    if not math.prod(local):
        return ()
    if not whole:
        return (Box(local=torch.zeros(1, dtype=torch.int64), offset=torch.zeros(1, dtype=torch.int64), length=1),)
    return tuple(_rows(whole, local, choice) for choice in itertools.product(*runs))


def _rows(whole: Sequence[int], local: Sequence[int], runs: Sequence[_Run]) -> Box:
    """Return the box of one run per dim, its rows as long as they lie in one piece on both sides."""
    strides, local_strides = _row_major(whole), _row_major(local)
    begin = sum(run.start * stride for run, stride in zip(runs, strides, strict=True))
    begin_local = sum(run.local * stride for run, stride in zip(runs, local_strides, strict=True))
    # The first dim from which on every later one is held whole: from there a row is one piece.
    dim = len(whole) - 1
    while dim > 0 and runs[dim].size == whole[dim] == local[dim]:
        dim -= 1
    length = runs[dim].size * strides[dim]
    offsets, locals_ = torch.tensor([begin]), torch.tensor([begin_local])
    for outer in range(dim):
        steps = torch.arange(runs[outer].size)
        offsets = (offsets.unsqueeze(-1) + steps * strides[outer]).flatten()
        locals_ = (locals_.unsqueeze(-1) + steps * local_strides[outer]).flatten()
    return Box(local=locals_, offset=offsets, length=length)


def _row_major(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _chunks(indices: Tensor, count: int) -> list[Tensor]:
    """Return `count` parts as distributed tensors are cut: of equal size but for the last, some perhaps empty."""
    size = -(-indices.numel() // count)
    return [indices[number * size : (number + 1) * size] for number in range(count)]


def _runs(indices: Tensor) -> list[_Run]:
    """Return the runs of neighbours in a list of indices."""
    borders = (torch.nonzero(indices.diff() != 1).flatten() + 1).tolist()
    starts = [0, *borders]
    return [
        _Run(start=int(indices[first]), local=first, size=end - first)
        for first, end in zip(starts, [*borders, indices.numel()], strict=True) if end > first
    ]  # fmt: skip
