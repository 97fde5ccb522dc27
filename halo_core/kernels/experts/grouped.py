"""The experts of one layer as two grouped matrix multiplications over tokens sorted by expert.

Not for every device and dtype: `choice.py` says where it runs; it never falls back by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from halo_core.kernels.experts.weights import ExpertWeights, summing_dtype


def grouped(
    weights: ExpertWeights, hidden: Tensor, ids: Tensor, routing: Tensor, *, may_skip: bool = True
) -> Tensor:
    """Return, for each token, the sum over its K slots of routing weight times expert output.

    hidden [T, H]; ids [T, K] int64 (`num_experts` skips the slot); routing [T, K]. Returns [T, H], dtype of `hidden`.
    may_skip: whether skipped slots can occur. False saves the passes that clear their rows; a skipped slot would then
        put uninitialised memory into the result.

    Nothing here waits for the device: shapes do not depend on the routing.
    """
    num_tokens, num_slots = ids.shape
    order = ids.reshape(-1).argsort(stable=True)  # [T*K], skipped slots last
    expert = ids.reshape(-1)[order]
    # One past the last row of each expert. Rows beyond the last expert's end belong to skipped slots.
    ends = torch.searchsorted(
        expert, torch.arange(weights.num_experts, device=ids.device, dtype=expert.dtype), right=True, out_int32=True
    )
    skipped = (expert == weights.num_experts).unsqueeze(-1) if may_skip else None  # [T*K, 1]
    bias_row = expert.clamp(max=weights.num_experts - 1) if may_skip else expert

    # grouped_mm leaves skipped rows uninitialised, in its output and in its input's gradient. Clearing the input clears
    # that gradient (a fill's backward is a fill). Clearing each output, after its bias, keeps the garbage from meeting
    # a zero routing weight (nan * 0 is nan) and from reaching a bias's gradient.
    rows = _cleared(hidden[order // num_slots], skipped)  # [T*K, H]
    inner = grouped_mm(rows, _as_input_by_output(weights.gate_up, weights), offs=ends)  # [T*K, P]
    if weights.gate_up_bias is not None:
        inner = inner + weights.gate_up_bias[bias_row]
    inner = weights.activation(_cleared(inner, skipped))  # [T*K, M]
    outer = grouped_mm(inner, _as_input_by_output(weights.down, weights), offs=ends)  # [T*K, H]
    if weights.down_bias is not None:
        outer = outer + weights.down_bias[bias_row]
    outer = _cleared(outer, skipped)

    unsorted = torch.empty_like(order)
    unsorted[order] = torch.arange(order.numel(), device=order.device)
    total_dtype = summing_dtype(hidden, routing)
    by_slot = outer[unsorted].view(num_tokens, num_slots, hidden.shape[-1])
    # The product also gives the second multiplication a gradient of its own memory: grouped_mm refuses expanded ones.
    return (by_slot.to(total_dtype) * routing.unsqueeze(-1).to(total_dtype)).sum(dim=1).to(hidden.dtype)


def _as_input_by_output(weight: Tensor, weights: ExpertWeights) -> Tensor:
    return weight if weights.is_transposed else weight.transpose(-2, -1)


def _cleared(rows: Tensor, skipped: Tensor | None) -> Tensor:
    return rows if skipped is None else rows.masked_fill(skipped, 0.0)
