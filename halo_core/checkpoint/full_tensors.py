"""Whole tensors, one at a time, on the process that writes them: from the processes that hold their parts.

Not for converting or writing them. At no time does a process have more than one part of another in its memory besides
the tensor being put together, and that is in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from halo_core import process_group
from halo_core.checkpoint import agreement
from halo_core.checkpoint.pieces import Piece, check_whole, local, piece_of, whole, writers
from halo_core.checkpoint.stored import StoredTensors

WRITER = 0
"""The rank that gets the tensors."""


class FullTensors(Protocol):
    """Gives a model's tensors by name."""

    def get(self, name: str) -> Tensor | None:
        """Return the whole tensor on the host, or None on a process that does not write."""


class Gathered:
    """The tensors of a sharded model. Made, and asked for the same names in the same order, on every process.

    Raises:
        RuntimeError: the parts of all processes do not make up a tensor.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = state
        self.rank = process_group.rank()
        held = agreement.gathered({name: piece_of(tensor) for name, tensor in state.items()})
        # The writer is asked first, so that what it holds itself does not travel.
        chosen = writers(held, range(len(held)))
        check_whole({name: tensor.shape for name, tensor in state.items()}, chosen)
        self.parts: dict[str, list[tuple[Piece, int]]] = {name: [] for name in state}
        for (name, piece), owner in chosen.items():
            self.parts[name].append((piece, owner))

    def get(self, name: str) -> Tensor | None:
        """Return the whole tensor on the writer, None elsewhere; a collective of the processes that hold parts."""
        tensor = self.state[name]
        own = local(tensor)
        if self.rank != WRITER:
            for _, owner in self.parts[name]:
                if owner == self.rank:
                    _exchange(dist.isend, own.contiguous(), WRITER)
            return None
        if piece_of(tensor) == whole(tensor.shape):
            return own.cpu()
        put_together = torch.empty(tensor.shape, dtype=tensor.dtype)
        for piece, owner in self.parts[name]:
            part = own
            if owner != WRITER:
                part = torch.empty(piece.shape, dtype=tensor.dtype, device=own.device)
                _exchange(dist.irecv, part, owner)
            put_together[piece.within(whole(tensor.shape))].copy_(part)
        return put_together


class FromFiles:
    """The tensors that files hold in parts. names: the name asked for -> the stored one, where they differ."""

    def __init__(self, stored: StoredTensors, names: Mapping[str, str]) -> None:
        self.stored, self.names = stored, names

    def get(self, name: str) -> Tensor:
        """Return the whole tensor."""
        return self.stored.whole(self.names.get(name, name))


def _exchange(act: Callable[..., Any], tensor: Tensor, peer: int) -> None:
    # As a batch: alone, NCCL would form a communicator for each pair of processes and keep its memory.
    for work in dist.batch_isend_irecv([dist.P2POp(act, tensor, peer)]):
        work.wait()
