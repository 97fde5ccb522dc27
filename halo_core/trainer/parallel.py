"""The parts of a run that know about other processes: places, meshes, token exchange, cutting the model.

Not for starting processes (`process_group.py`) nor for how anything is cut or sent: see `sharding`, `expert_parallel`.
With one process every part is the identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from halo_core import process_group
from halo_core.config import RunConfig
from halo_core.expert_parallel.choose import Choice, neighbours, open_dispatcher
from halo_core.expert_parallel.dispatcher import Dispatcher, Exchange
from halo_core.expert_parallel.experts import ParallelExperts
from halo_core.kernels.experts import choice
from halo_core.kernels.experts.weights import ExpertsKernel
from halo_core.models import sockets
from halo_core.models.build import text_model_config
from halo_core.plan import Degrees
from halo_core.registry import Architecture, size
from halo_core.runtime import ResolvedPlan
from halo_core.sharding.shard import shard
from halo_core.sharding.sharded import Sharded
from halo_core.topology import Meshes, Topology, build_meshes


@dataclass(frozen=True, kw_only=True, eq=False)
class Parallel:
    """This process's place, and what it shares with the others; `meshes` and `dispatcher` only where there are any.

    choice: the dispatcher's name and why it is that one.
    """

    topology: Topology
    meshes: Meshes | None = None
    dispatcher: Dispatcher | None = None
    choice: Choice | None = None

    @property
    def words(self) -> str:
        """Return in a few words how the processes work together; nothing for one process."""
        if self.meshes is None:
            return ""
        degrees = self.topology.degrees
        sent = f", tokens by {self.choice.name} ({self.choice.why})" if self.choice is not None else ""
        return (
            f", {degrees.world} processes (ep {degrees.ep}, shard {degrees.shard}, replicate {degrees.replicate}){sent}"
        )

    def experts(self, resolved: ResolvedPlan) -> ExpertsKernel | None:
        """Return what the experts sockets get: this process's kernel, behind an exchange of tokens if there is one."""
        if self.dispatcher is None:
            return resolved.experts_kernel
        return ParallelExperts(dispatcher=self.dispatcher, compute=choice.kernel(resolved.experts, may_skip=True))

    def cut(self, model: PreTrainedModel, architecture: Architecture, config: RunConfig) -> Sharded | None:
        """Cut a model on the meta device over the processes; None where there is one process."""
        if self.meshes is None:
            return None
        return shard(
            model,
            architecture,
            self.topology,
            self.meshes,
            experts=dict(sockets.experts_modules(model, architecture)),
            reshard_after_forward=config.fsdp_reshard_after_forward,
            reshard_after_backward=config.fsdp_reshard_after_backward,
            defer_grad_sync=config.fsdp_defer_grad_sync,
            reduce_dtype=torch.float32 if _sums_in_fp32(config) else None,
        )

    def total(self, counts: Tensor) -> Tensor:
        """Return integer counts summed over the processes that see different rows."""
        if self.meshes is not None:
            dist.all_reduce(counts, group=self.meshes.data)
        return counts

    def close(self) -> None:
        """Give back what the exchange of tokens holds; a collective."""
        if self.dispatcher is not None:
            self.dispatcher.close()


def _sums_in_fp32(config: RunConfig) -> bool:
    """Return whether gradients are summed over processes in fp32.

    Deferred sums over micro-batches are kept by torch in the dtype of the sum over processes, so that fp32 for the one
    is fp32 for both.
    """
    defers = config.fsdp_defer_grad_sync and config.gradient_accumulation_steps > 1
    return config.fp32_grad_reduce or (defers and config.grad_accumulation_dtype == "float32")


def build_parallel(
    degrees: Degrees,
    architecture: Architecture,
    model_config: Mapping[str, Any],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    ep_dispatcher: str = "auto",
    timeout: float | None = None,
) -> Parallel:
    """Return the parts for these degrees; a collective of all processes that have joined.

    model_config: config.json of the model, for the sizes of its layers. dtype: of hidden states. ep_dispatcher: as
    configured. timeout: seconds that a collective may take; None for the backend's own.

    Raises:
        Refused: tokens cannot travel as asked for, or do not arrive.
    """
    topology = Topology(degrees=degrees, rank=process_group.rank())
    if topology.world == 1:
        return Parallel(topology=topology)
    meshes = build_meshes(topology, device.type, None if timeout is None else timedelta(seconds=timeout))
    if topology.size("ep") == 1:
        return Parallel(topology=topology, meshes=meshes)
    exchange = _exchange(topology, architecture, model_config, device, dtype)
    dispatcher, choice = open_dispatcher(ep_dispatcher, exchange, meshes.ep.get_group())
    return Parallel(topology=topology, meshes=meshes, dispatcher=dispatcher, choice=choice)


def _exchange(
    topology: Topology,
    architecture: Architecture,
    model_config: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> Exchange:
    whole = text_model_config(architecture, model_config).to_dict()
    names = architecture.spec.names
    found = [size(choices, whole) for choices in (names.num_experts, names.experts_per_token, names.hidden_size)]
    num_experts, num_slots, hidden_size = found
    assert num_experts is not None, f"{names.num_experts} is not in the configuration"
    assert num_slots is not None, f"{names.experts_per_token} is not in the configuration"
    assert hidden_size is not None, f"{names.hidden_size} is not in the configuration"
    return Exchange(
        ep=topology.size("ep"),
        per_machine=neighbours(),
        num_experts=num_experts,
        num_slots=num_slots,
        hidden_size=hidden_size,
        dtype=dtype,
        device=device,
    )
