"""The dispatcher for GPUs of one machine: DeepEP's kernels write rows straight into each other's memory.

Not for several machines or for CPU (`all_to_all.py`), and not for starting DeepEP (`deepep_start.py`).

DeepEP works on four operations that are each other's backward: dispatch sends a token once to each process that holds
any of its experts, combine adds a token's rows up; the handle of a dispatch lets either happen again along the same
ways. Its kernels take bf16 rows of a multiple of 512 bytes, so that rows are filled up with zeros on the way where they
are shorter. Rows pass through a buffer of fixed size in chunks: no number of tokens is too large for it.
Shapes: T tokens, K experts per token, N rows received, H hidden, W processes.
Source: the Python interface of DeepEP 1.2 (https://github.com/deepseek-ai/DeepEP, `deep_ep/buffer.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halo_core import process_group
from halo_core.errors import Problem, Refused
from halo_core.expert_parallel import recall
from halo_core.expert_parallel.dispatcher import Recomputation, Ticket

WIDTH_STEP = 256
"""Rows are copied by warps of 32 threads, 16 bytes each: 256 elements of bf16."""


@dataclass(kw_only=True, eq=False)
class HandleTicket(Ticket):
    """A ticket with DeepEP's handle of the ways that rows took.

    local_ids [N, K] int64, local_weights [N, K] fp32: what came with the rows; DeepEP sends them only without a handle,
    and a recomputation needs the same. arrived [N, H]: received rows that nobody has taken yet.
    kept [N, H]: the same for the recomputation, where recomputation is `keep`.
    """

    handle: Any
    local_ids: Tensor
    local_weights: Tensor
    arrived: Tensor | None
    kept: Tensor | None = None


@dataclass(kw_only=True, eq=False)
class DeepEp:
    """Exchanges rows by DeepEP's intranode `Buffer`.

    group: the processes that share the experts, all on one machine. num_experts: of all of them together.
    hidden_size: of a token. buffer: from `open_buffer`, None once closed. index_dtype: what DeepEP takes ids in.
    """

    group: dist.ProcessGroup
    num_experts: int
    hidden_size: int
    buffer: Any
    index_dtype: torch.dtype = torch.int64
    recomputation: Recomputation = "resend"
    name: str = "deepep"

    def __post_init__(self) -> None:
        assert self.num_experts % self.group.size() == 0, f"{self.num_experts} experts on {self.group.size()} processes"

    @property
    def experts_per_rank(self) -> int:
        """Return the number of experts of each process."""
        return self.num_experts // self.group.size()

    def dispatch(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, HandleTicket]:
        """Return received rows and their ticket; see `Dispatcher.dispatch`. The one wait is for the number of rows.

        Raises:
            Refused: hidden is not bf16.
        """
        assert weights.dtype.itemsize <= 4, f"DeepEP carries routing weights in fp32, not {weights.dtype}"
        wide = weights.to(torch.float32)
        rows = self._as_sent(hidden)
        ticket = recall.ticket(lambda: self._first(rows.detach(), ids, wide.detach()))
        tokens, local_ids, local_weights = _Dispatch.apply(rows, wide, ticket, self)
        return self._as_computed(tokens), local_ids, local_weights, ticket

    def combine(self, partial: Tensor, ticket: HandleTicket) -> Tensor:
        """Return each token's sum, added in fp32; see `Dispatcher.combine`.

        Raises:
            Refused: partial is not bf16.
        """
        combined: Tensor = _Combine.apply(self._as_sent(partial), ticket, self)
        return self._as_computed(combined)

    def close(self) -> None:
        """Give the buffer back, once every process has come here and no kernel uses it any more."""
        if self.buffer is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        process_group.barrier()
        self.buffer.destroy()
        self.buffer = None

    def _as_sent(self, rows: Tensor) -> Tensor:
        """Return rows [.., H] as DeepEP takes them: bf16, filled up to a multiple of `WIDTH_STEP`."""
        if rows.dtype != torch.bfloat16:
            raise Refused(dtype_problem(rows.dtype))
        missing = sent_width(self.hidden_size) - self.hidden_size
        return torch.nn.functional.pad(rows, (0, missing)) if missing else rows

    def _as_computed(self, rows: Tensor) -> Tensor:
        # Without the copy, rows would lie apart in memory, which grouped matrix products do not take.
        return rows if rows.shape[1] == self.hidden_size else rows[:, : self.hidden_size].contiguous()

    def _first(self, rows: Tensor, ids: Tensor, weights: Tensor) -> HandleTicket:
        """Find out where rows go, and send them along with ids and weights."""
        chosen = ids.to(self.index_dtype).contiguous()
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(chosen, self.num_experts)
        tokens, local_ids, local_weights, _, handle, _ = self.buffer.dispatch(
            rows.contiguous(),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=chosen,
            topk_weights=weights.contiguous(),
        )
        is_elsewhere = local_ids < 0
        return HandleTicket(
            num_tokens=len(ids),
            sent_rows=None,
            received_rows=len(tokens),
            handle=handle,
            local_ids=local_ids.to(torch.int64).masked_fill(is_elsewhere, self.experts_per_rank),
            local_weights=local_weights.masked_fill(is_elsewhere, 0.0),
            arrived=tokens,
        )

    def _again(self, rows: Tensor, ticket: HandleTicket) -> Tensor:
        """Return rows [T, H] sent along the ways of a ticket, [N, H]: nothing is counted and nobody waits."""
        tokens: Tensor = self.buffer.dispatch(rows.contiguous(), handle=ticket.handle)[0]
        return tokens

    def _summed(self, rows: Tensor, ticket: HandleTicket) -> Tensor:
        """Return rows [N, H] sent back and added up per token, [T, H]."""
        combined: Tensor = self.buffer.combine(rows.contiguous(), ticket.handle)[0]
        return combined


def sent_width(hidden_size: int) -> int:
    """Return the number of elements of a row on its way."""
    return -(-hidden_size // WIDTH_STEP) * WIDTH_STEP


def open_buffer(module: Any, group: dist.ProcessGroup, hidden_size: int) -> Any:
    """Return a buffer of DeepEP for rows of this hidden size; a collective of the group. module: `deep_ep`."""
    ways = (module.Buffer.get_dispatch_config(group.size()), module.Buffer.get_combine_config(group.size()))
    row_bytes = sent_width(hidden_size) * torch.bfloat16.itemsize
    size = max(way.get_nvl_buffer_size_hint(row_bytes, group.size()) for way in ways)
    # Freed by `close` alone: all processes must do it together, and nobody knows when a destructor runs.
    return module.Buffer(group, size, 0, explicitly_destroy=True)


def dtype_problem(dtype: torch.dtype) -> Problem:
    """Return what is said where tokens have another dtype than DeepEP carries."""
    return Problem(
        key="ep_dispatcher",
        value="deepep",
        why=f"DeepEP carries tokens in bfloat16, and this run computes in {str(dtype).removeprefix('torch.')}",
        remedy="dtype: bfloat16, or ep_dispatcher: all_to_all",
    )


class _Dispatch(torch.autograd.Function):
    """Rows there; in backward a token's gradients come back added up, and each slot's weight gets its own."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, ticket: HandleTicket, by: DeepEp
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens [N, H], local_ids [N, K], local_weights [N, K]; rows [T, H], weights [T, K]."""
        ctx.ticket, ctx.by = ticket, by
        if ticket.arrived is not None:  # just sent
            tokens, ticket.arrived = ticket.arrived, None
            if by.recomputation == "keep":
                ticket.kept = tokens.detach()
        elif ticket.kept is not None:
            tokens, ticket.kept = ticket.kept, None
        else:
            tokens = by._again(rows, ticket)
        # Aliases: a result is tied to this node, which holds the ticket, and the ticket outlives both passes.
        local_ids, local_weights = ticket.local_ids.detach(), ticket.local_weights.detach()
        ctx.mark_non_differentiable(local_ids)
        return tokens, local_ids, local_weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients of `rows` and `weights`."""
        ticket, by = ctx.ticket, ctx.by
        # A slot is added up over all rows of its token, and only the row on its expert's process has a say.
        of_slots = gradients[2].masked_fill(ticket.local_ids == by.experts_per_rank, 0.0)
        of_rows, of_weights, _ = by.buffer.combine(
            gradients[0].contiguous(), ticket.handle, topk_weights=of_slots.contiguous()
        )
        return of_rows, of_weights, None, None


class _Combine(torch.autograd.Function):
    """Rows back, added up; in backward every row gets its token's gradient."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, ticket: HandleTicket, by: DeepEp) -> Tensor:
        """Return [T, H] of partial [N, H]."""
        ctx.ticket, ctx.by = ticket, by
        return by._summed(partial, ticket)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of `partial`."""
        return ctx.by._again(gradients[0], ctx.ticket), None, None
