"""The reference dispatcher, by torch's collectives: gloo on CPU, NCCL on CUDA.

Not for speed within one machine: `deepep.py`. A process exchanges, per layer: counts (int64, one per process), hidden
rows, and one small block of expert ids and routing weights; in backward hidden rows and weights. The one wait for the
device is for the counts.
Shapes: T tokens, K experts per token, N rows received, S rows sent, H hidden, W processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halo_core.expert_parallel import recall
from halo_core.expert_parallel.dispatcher import Recomputation, Ticket
from halo_core.expert_parallel.rows import Rows, destinations, local_slots, plan, summed


@dataclass(kw_only=True, eq=False)
class SplitTicket(Ticket):
    """A ticket with the rows as indices, and how many go to and come from each process.

    kept: what the first pass received, where recomputation is `keep`; taken out by the recomputation.
    """

    rows: Rows
    send: list[int]
    receive: list[int]
    kept: tuple[Tensor, Tensor, Tensor] | None = field(default=None)


@dataclass(frozen=True, kw_only=True, eq=False)
class AllToAll:
    """Exchanges rows by `all_to_all_single`.

    group: the processes that share the experts. num_experts: of all of them together, the same number on each.
    """

    group: dist.ProcessGroup
    num_experts: int
    recomputation: Recomputation = "resend"
    name: str = "all_to_all"

    def __post_init__(self) -> None:
        assert self.num_experts % self.group.size() == 0, f"{self.num_experts} experts on {self.group.size()} processes"

    @property
    def experts_per_rank(self) -> int:
        """Return the number of experts of each process."""
        return self.num_experts // self.group.size()

    def dispatch(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, SplitTicket]:
        """Return received rows and their ticket; see `Dispatcher.dispatch`."""
        ticket = recall.ticket(lambda: self._counted(ids))
        wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
        tokens, local_ids, local_weights = _Dispatch.apply(hidden, wide, ids, ticket, self)
        return tokens, local_ids, local_weights, ticket

    def combine(self, partial: Tensor, ticket: SplitTicket) -> Tensor:
        """Return each token's sum; see `Dispatcher.combine`."""
        combined: Tensor = _Combine.apply(partial, ticket, self.group)
        return combined

    def close(self) -> None:
        """Nothing was allocated."""

    def _counted(self, ids: Tensor) -> SplitTicket:
        """Tell every process how many rows come, and wait for that, the only time per layer."""
        wanted = destinations(ids, self.experts_per_rank, self.group.size())
        sent = wanted.sum(0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        send, receive = torch.stack([sent, received]).tolist()
        return SplitTicket(
            num_tokens=len(ids),
            sent_rows=sum(send) - send[self.group.rank()],
            received_rows=sum(receive),
            rows=plan(ids, wanted, self.experts_per_rank, sum(send)),
            send=send,
            receive=receive,
        )


def exchange(values: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows [sum(receive), ...] that all have for this process, in their order; values [sum(send), ...]."""
    arrived = values.new_empty((sum(receive), *values.shape[1:]))
    dist.all_to_all_single(arrived, values.contiguous(), receive, send, group=group)
    return arrived


class _Dispatch(torch.autograd.Function):
    """Rows there; in backward their gradients back. Both directions in one node, so their order is always the same."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weights: Tensor, ids: Tensor, ticket: SplitTicket, by: AllToAll
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens [N, H], local_ids [N, K] int64, local_weights [N, K]; hidden [T, H], weights and ids [T, K]."""
        ctx.ticket, ctx.group = ticket, by.group
        if ticket.kept is not None:
            tokens, local_ids, local_weights = ticket.kept
            ticket.kept = None
        else:
            rows, send, receive = ticket.rows, ticket.send, ticket.receive
            tokens = exchange(hidden[rows.token_of_row], send, receive, by.group)
            slots = local_slots(ids, weights, rows, by.experts_per_rank)
            local_ids, local_weights = _opened(exchange(_packed(*slots), send, receive, by.group), weights.dtype)
            if by.recomputation == "keep":
                ticket.kept = (tokens.detach(), local_ids, local_weights.detach())
        ctx.mark_non_differentiable(local_ids)
        return tokens, local_ids, local_weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Return the gradients of `hidden` and `weights`."""
        ticket, group = ctx.ticket, ctx.group
        of_rows = exchange(gradients[0], ticket.receive, ticket.send, group)
        of_slots = exchange(gradients[2], ticket.receive, ticket.send, group)
        rows = ticket.rows
        # A slot travelled usefully in one row only, so its gradient is found there and nothing is added up.
        return summed(of_rows, rows.rows_of_token), _picked(of_slots, rows.row_of_slot), None, None, None


class _Combine(torch.autograd.Function):
    """Rows back, added up; in backward every row gets its token's gradient."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, ticket: SplitTicket, group: dist.ProcessGroup) -> Tensor:
        """Return [T, H] of partial [N, H]."""
        ctx.ticket, ctx.group = ticket, group
        back = exchange(partial, ticket.receive, ticket.send, group)
        return summed(back, ticket.rows.rows_of_token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of `partial`."""
        ticket = ctx.ticket
        return exchange(gradients[0][ticket.rows.token_of_row], ticket.send, ticket.receive, ctx.group), None, None


def _packed(local_ids: Tensor, local_weights: Tensor) -> Tensor:
    """Return ids and the bits of weights side by side, [S, 2K] integers, so that both travel at once."""
    weights = local_weights.contiguous()
    bits = weights.view(torch.int32 if weights.dtype.itemsize == 4 else torch.int64)
    return torch.cat([local_ids.to(bits.dtype), bits], dim=1)


def _opened(packed: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    ids, bits = packed.chunk(2, dim=1)
    return ids.to(torch.int64), bits.contiguous().view(dtype)


def _picked(of_slots: Tensor, row_of_slot: Tensor) -> Tensor:
    """Return [T, K]: for each slot its own column of the row that carried it; of_slots [S, K]."""
    if not len(of_slots):
        return of_slots.new_zeros(row_of_slot.shape)
    return of_slots.gather(0, row_of_slot)
