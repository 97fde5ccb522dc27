"""The dispatcher of a process that holds every expert: nothing travels. Not for more than one process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halo_core.expert_parallel.dispatcher import Recomputation, Ticket


@dataclass(frozen=True, kw_only=True)
class Local:
    """The identity, but for weights below fp32, which are widened as every dispatcher does."""

    name: str = "local"
    recomputation: Recomputation = "resend"

    def dispatch(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Ticket]:
        """Return what came in, as rows."""
        ticket = Ticket(num_tokens=len(hidden), sent_rows=0, received_rows=len(hidden))
        return hidden, ids, weights.to(torch.promote_types(weights.dtype, torch.float32)), ticket

    def combine(self, partial: Tensor, ticket: Ticket) -> Tensor:
        """Return `partial`: each token has one row."""
        return partial

    def close(self) -> None:
        """Nothing was allocated."""
