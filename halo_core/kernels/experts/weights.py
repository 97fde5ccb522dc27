"""The view of one layer's expert weights that every form of the experts kernel reads.

Not for finding the weights in a model: a socket builds the view from the module at each call, so that what it shows
is what the module holds at that moment (gathered, cast or replaced by whoever owns the module).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """E experts of width M over hidden size H; the first projection yields P = 2M columns with a gate, else M.

    gate_up: [E, P, H], or [E, H, P] when `is_transposed`. down: [E, H, M], or [E, M, H] when `is_transposed`.
    gate_up_bias [E, P] and down_bias [E, H]: both present exactly when `has_bias`.
    is_concatenated: gate and up lie one after the other and not interleaved. Only `activation` cares.
    activation: takes [N, P] and returns [N, M], row by row, so that garbage in one row never reaches another.
    """

    gate_up: Tensor
    down: Tensor
    activation: Callable[[Tensor], Tensor]
    is_transposed: bool
    is_concatenated: bool
    has_bias: bool
    has_gate: bool
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """Return E."""
        return self.gate_up.shape[0]


class ExpertsKernel(Protocol):
    """What every form of the kernel is: routed tokens in, the weighted sum of their experts' outputs out.

    hidden [T, H]; ids [T, K] int64, where `num_experts` marks a slot to skip; routing [T, K], any float dtype.
    Returns [T, H] in the dtype of `hidden`. T may be 0; an expert may see no token, its gradient is then zero.
    """

    def __call__(self, weights: ExpertWeights, hidden: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        """Return the layer's routed output [T, H]."""
        ...


def summing_dtype(hidden: Tensor, routing: Tensor) -> torch.dtype:
    """Return the dtype in which a token's K expert outputs are weighted and added: never below fp32."""
    return torch.promote_types(torch.promote_types(hidden.dtype, routing.dtype), torch.float32)
