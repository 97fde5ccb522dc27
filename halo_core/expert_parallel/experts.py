"""The experts kernel of a process that holds only some of the experts: dispatch, its own kernel, combine.

Not for the mathematics of an expert. Shapes: T tokens, K experts per token, H hidden, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from halo_core.expert_parallel.dispatcher import Dispatcher
from halo_core.kernels.experts.weights import ExpertsKernel, ExpertWeights


@dataclass(frozen=True, kw_only=True)
class ParallelExperts:
    """An `ExpertsKernel` over experts that are spread over processes.

    compute: the kernel for the experts of this process; it must honour skipped slots (`may_skip`).
    """

    dispatcher: Dispatcher
    compute: ExpertsKernel

    def __call__(self, weights: ExpertWeights, hidden: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        """Return the layer's routed output [T, H]. weights: this process's part is taken; ids: of all experts."""
        own = local_part(weights)
        tokens, local_ids, local_weights, ticket = self.dispatcher.dispatch(hidden, ids, routing)
        if not len(tokens):
            partial = self._without_rows(own, tokens, local_ids, local_weights)
        else:
            partial = self.compute(own, tokens, local_ids, local_weights)
        return self.dispatcher.combine(partial, ticket)

    def _without_rows(self, weights: ExpertWeights, tokens: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        """Compute one row that every expert skips: backward is then the same as anywhere else, its results zero.

        torch's grouped_mm on CUDA is made for at least one row.
        """
        row = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
        slots = ids.new_full((1, ids.shape[1]), weights.num_experts)
        nothing = torch.cat([routing, routing.new_zeros(1, routing.shape[1])])
        return self.compute(weights, row, slots, nothing)[:0]


def local_part(weights: ExpertWeights) -> ExpertWeights:
    """Return the view with each distributed tensor replaced by this process's part of it.

    The part's gradient returns to the distributed tensor with the placement that the tensor has: it is complete,
    because every row that an expert sees has come here.
    """
    parts = {
        name: value.to_local()
        for name in ("gate_up", "down", "gate_up_bias", "down_bias")
        if isinstance(value := getattr(weights, name), DTensor)
    }
    return replace(weights, **parts)
