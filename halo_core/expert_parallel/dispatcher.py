"""The interface of a dispatcher: tokens go to the processes that hold their experts, and their sums come back.

Not for computing experts. Shapes: T this process's tokens, N the rows it receives, H hidden, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

Recomputation: TypeAlias = Literal["resend", "keep"]
"""What a recomputed layer does about received tokens: `resend` exchanges them again and holds nothing meanwhile,
`keep` holds them from the first pass and sends nothing. Counts and row order are never exchanged again either way."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What is to be exchanged, known before there is a model.

    ep: processes that share the experts, of which `per_machine` are neighbours. num_slots: K. hidden_size: H, in
    elements of `dtype`. device: where tensors are.
    """

    ep: int
    per_machine: int
    num_experts: int
    num_slots: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(kw_only=True, eq=False)
class Ticket:
    """What one dispatch found out about its rows, for the way back and for a recomputation.

    num_tokens: T. sent_rows: rows that left for another process, None where only the device knows. received_rows: N,
    this process's own among them.
    """

    num_tokens: int
    sent_rows: int | None
    received_rows: int


class Dispatcher(Protocol):
    """Sends a token once to each process that holds any of its experts.

    Collectives and their order are the same on every process whatever the routing is, also without any token.
    """

    @property
    def name(self) -> str:
        """Return the word that configurations use for it."""
        ...

    @property
    def recomputation(self) -> Recomputation:
        """Return what it does when a layer is computed again for backward."""
        ...

    def dispatch(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Return the received rows (tokens [N, H], local_ids [N, K], local_weights [N, K]) and their ticket.

        hidden [T, H]; ids [T, K] int64 among all experts; weights [T, K], any float dtype, with a gradient.
        A slot whose expert lives elsewhere has the id `number of local experts` and the weight 0.
        local_weights are fp32, or wider where `weights` are.
        """
        ...

    def combine(self, partial: Tensor, ticket: Any) -> Tensor:
        """Return [T, H]: for each token the sum of its rows of `partial` [N, H]; weights are no business of it."""
        ...

    def close(self) -> None:
        """Give back what was allocated; a collective, to be called before process groups are destroyed."""
        ...
