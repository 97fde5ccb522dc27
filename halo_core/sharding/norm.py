"""Arithmetic over gradients that are cut over processes in different ways: each piece counts once.

Not for one process alone, where a gradient is a plain tensor: the results would be the same at more cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def local(tensor: Tensor) -> Tensor:
    """Return this process's piece of a tensor: the memory itself, without a graph; a plain tensor is all piece."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def counts_here(tensor: Tensor) -> bool:
    """Return whether this process's piece is the one that counts, of all equal ones on other processes.

    Equal pieces are those along mesh axes over which the tensor is replicated; a plain tensor is whole on every
    process, so the first one's counts.
    """
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "this process is no part of the tensor's mesh"
    return _first_along_replicas(place, tensor.placements)


def squares(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares over this process's pieces that count, fp64; over all processes, the norm's square."""
    norms = [
        torch.linalg.vector_norm(local(gradient), dtype=torch.float64).to(device)
        for gradient in gradients
        if counts_here(gradient)
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    total: Tensor = torch.stack(norms).square().sum()
    return total


def first_not_finite(tensors: Mapping[str, Tensor], device: torch.device) -> str | None:
    """Return the first name whose tensor has an infinity or a NaN anywhere, the same on every process; a collective.

    tensors: the same names in the same order on every process.
    """
    if not tensors:
        return None
    flags = torch.stack([(~torch.isfinite(local(tensor))).any().to(device) for tensor in tensors.values()]).int()
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return next((name for name, flag in zip(tensors, flags.tolist(), strict=True) if flag), None)


def _first_along_replicas(place: Sequence[int], placements: Sequence[object]) -> bool:
    return all(
        at == 0 for at, placement in zip(place, placements, strict=True) if isinstance(placement, Replicate)
    )
