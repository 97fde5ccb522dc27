"""Builds what a plan trains, in the order of a run: meta device, sockets, cut over processes, weights, recomputation.

Not for reading weights: they are random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from halo_core.bench import random_weights
from halo_core.bench.wire import Traffic
from halo_core.expert_parallel.all_to_all import AllToAll
from halo_core.expert_parallel.dispatcher import Dispatcher
from halo_core.expert_parallel.experts import ParallelExperts
from halo_core.kernels.experts import choice
from halo_core.kernels.experts.weights import ExpertsKernel
from halo_core.models import sockets
from halo_core.models.build import build_meta
from halo_core.models.sizes import sizes_of
from halo_core.plan import Checked
from halo_core.registry import size, text_config
from halo_core.runtime import ResolvedPlan
from halo_core.sharding.shard import shard
from halo_core.sharding.sharded import Sharded
from halo_core.topology import Meshes, Topology, build_meshes
from halo_core.trainer.recompute import enable_recompute


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """A model ready to train. sharded: what a step asks where there are several processes.

    dispatcher: what tokens travel by, where they do. total: sums counts over the processes with other rows.
    """

    model: Any
    parameters: int
    sharded: Sharded | None
    dispatcher: Dispatcher | None
    total: Callable[[Tensor], Tensor]

    def wire(self) -> dict[str, Traffic]:
        """Return what left by a dispatcher that sends without torch's collectives."""
        return {}


def assemble(checked: Checked, resolved: ResolvedPlan, topology: Topology) -> Assembled:
    """Return the plan's model with random weights on the plan's device; a collective of all processes."""
    config, architecture = checked.config, checked.architecture
    meshes = build_meshes(topology, resolved.device.type) if topology.world > 1 else None
    experts, dispatcher = _experts(checked, resolved, topology, meshes)
    model = build_meta(
        architecture, checked.model_config, dtype=resolved.dtype, attention=resolved.attention, experts=experts
    )
    parameters = sizes_of(model, optim=config.optim).parameters
    checked.registry.plugins.call("halo_model_ready", family=architecture.family, plan=checked.plan, model=model)
    sharded = None
    if meshes is not None:
        sharded = shard(
            model, architecture, topology, meshes, experts=dict(sockets.experts_modules(model, architecture)),
            reshard_after_forward=config.fsdp_reshard_after_forward,
            reshard_after_backward=config.fsdp_reshard_after_backward, defer_grad_sync=config.fsdp_defer_grad_sync,
        )  # fmt: skip
    random_weights.fill(model, resolved.device, seed=config.seed)
    if config.gradient_checkpointing:
        enable_recompute(model, routes=architecture.spec.is_moe)
    return Assembled(
        model=model, parameters=parameters, sharded=sharded, dispatcher=dispatcher,
        total=_total(meshes) if meshes is not None else lambda counts: counts,
    )  # fmt: skip


def _experts(
    checked: Checked, resolved: ResolvedPlan, topology: Topology, meshes: Meshes | None
) -> tuple[ExpertsKernel | None, Dispatcher | None]:
    if meshes is None or topology.size("ep") == 1 or resolved.experts == "none":
        return resolved.experts_kernel, None
    inner = text_config(checked.architecture.spec, checked.model_config)
    num_experts = size(checked.architecture.spec.names.num_experts, inner)
    assert num_experts is not None, "the plan knows the number of experts"
    dispatcher = AllToAll(group=meshes.ep.get_group(), num_experts=num_experts)
    return ParallelExperts(dispatcher=dispatcher, compute=choice.kernel(resolved.experts, may_skip=True)), dispatcher


def _total(meshes: Meshes) -> Callable[[Tensor], Tensor]:
    def total(counts: Tensor) -> Tensor:
        dist.all_reduce(counts, group=meshes.data)
        return counts

    return total
