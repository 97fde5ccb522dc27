"""Puts the balancing that a plan names between a model's experts sockets and the loop.

Not for how a mode balances: see `halo_core.balancing`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from halo_core.balancing.bias_update import BiasUpdate
from halo_core.errors import Problem, Refused
from halo_core.models import sockets
from halo_core.models.hidden import TokenBatch
from halo_core.plan import RunPlan
from halo_core.registry import Architecture

BIAS_UPDATE = "balancing:bias_update"


def bias_update(
    model: PreTrainedModel,
    architecture: Architecture,
    plan: RunPlan,
    rate: float,
    total: Callable[[Tensor], Tensor] = lambda counts: counts,
) -> BiasUpdate | None:
    """Return the bias update of a model with attached sockets, listening to them; None when the run asks for none.

    rate: the size of a step. total: sums integer counts over the ranks that see other rows.

    Raises:
        Refused: the model has no such bias, so nothing would balance it.
    """
    if plan.balancing != "bias_update":
        return None
    assert architecture.moe_block is not None, "the plan refuses a bias update without experts"
    name = str(architecture.answers[BIAS_UPDATE][0].facts["bias"])
    found = sockets.of(model)
    buffers = dict(model.named_buffers())
    biases = {}
    for path in found.by_path:
        place = f"{path.removesuffix(architecture.moe_block.experts)}{name}"
        if place not in buffers:
            raise Refused(
                Problem(
                    key="moe_balancing",
                    value="bias_update",
                    why=f"the model has no {place} to move",
                    remedy="set moe_balancing: none, or start from a model whose router has a selection bias",
                )
            )
        biases[path] = buffers[place]
    balancing = BiasUpdate(biases, rate, total)
    for path, socket in found.by_path.items():
        socket.listener = balancing.listener(path)
    return balancing


def counted(
    forward: Callable[[PreTrainedModel, TokenBatch], Tensor], balancing: BiasUpdate | None
) -> Callable[[PreTrainedModel, TokenBatch], Tensor]:
    """Return `forward` with the choices of training passes counted; evaluations run without gradients and are not."""
    if balancing is None:
        return forward

    def counting(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(model, batch)
        with balancing.counting(batch.segment_ids != 0):
            return forward(model, batch)

    return counting
