"""The experts of one layer as a loop over experts: the specification of the experts kernel, in plain torch.

Not for speed: it synchronises with the device once per expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halo_core.kernels.experts.weights import ExpertWeights, summing_dtype


def reference(weights: ExpertWeights, hidden: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    """Return, for each token, the sum over its K slots of routing weight times expert output.

    hidden [T, H]; ids [T, K] int64 (`num_experts` skips the slot); routing [T, K]. Returns [T, H], dtype of `hidden`.
    """
    total = torch.zeros(hidden.shape, dtype=summing_dtype(hidden, routing), device=hidden.device)
    # unbind, not weights[e]: one stacked gradient in place of a full [E, ...] one per expert. Experts without tokens
    # take part too, with zero rows, so that their gradient is zero and not absent.
    gate_ups, downs = weights.gate_up.unbind(0), weights.down.unbind(0)
    gate_up_biases = weights.gate_up_bias.unbind(0) if weights.gate_up_bias is not None else [None] * len(downs)
    down_biases = weights.down_bias.unbind(0) if weights.down_bias is not None else [None] * len(downs)
    for expert, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):
        tokens, slots = torch.where(ids == expert)
        inner = _linear(hidden[tokens], gate_up, gate_up_biases[expert], weights.is_transposed)
        outer = _linear(weights.activation(inner), down, down_biases[expert], weights.is_transposed)
        weighted = outer.to(total.dtype) * routing[tokens, slots, None].to(total.dtype)
        total = total.index_add(0, tokens, weighted)
    return total.to(hidden.dtype)


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
    product = rows @ (weight if is_transposed else weight.T)
    return product if bias is None else product + bias
