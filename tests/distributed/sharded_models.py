"""Small real models cut over processes, every element of every tensor with a value that tells where it belongs.

Not for training steps: see `parity.py`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halo_core import process_group
from halo_core.arithmetic import Degrees
from halo_core.checkpoint.pieces import local, piece_of, whole
from halo_core.checkpoint.save import stored_weights
from halo_core.expert_parallel.all_to_all import AllToAll
from halo_core.expert_parallel.experts import ParallelExperts
from halo_core.kernels.experts.reference import reference
from halo_core.models import sockets
from halo_core.models.build import build_meta
from halo_core.models.load import load_weights
from halo_core.registry import Architecture
from halo_core.sharding.shard import shard
from halo_core.topology import AXES, Topology, build_meshes

EXPERTS = 8
ALONE: Mapping[str, int] = {}


def degrees(sizes: Mapping[str, int]) -> Degrees:
    return Degrees(**{axis: sizes.get(axis, 1) for axis in AXES})


def built(
    architecture: Architecture,
    folder: Path,
    sizes: Mapping[str, int],
    load: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, Any]:
    """Return the folder's model cut by `sizes`, and what a training step asks of it (None for one process)."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kernel: Any = reference
    sharded = None
    if process_group.world() == 1:
        model = build_meta(architecture, config, dtype=dtype, experts=kernel)
    else:
        topology = Topology(degrees=degrees(sizes), rank=dist.get_rank())
        meshes = build_meshes(topology, "cpu")
        if topology.size("ep") > 1:
            kernel = ParallelExperts(
                dispatcher=AllToAll(group=meshes.ep.get_group(), num_experts=EXPERTS), compute=reference
            )
        model = build_meta(architecture, config, dtype=dtype, experts=kernel)
        modules = dict(sockets.experts_modules(model, architecture))
        sharded = shard(model, architecture, topology, meshes, experts=modules)
    if load:
        load_weights(model, folder, architecture)
    return model, sharded


def value_of(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the one value that the whole tensor of this name has in these tests; not the same twice anywhere."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator).to(dtype)


def fill(name: str, tensor: Tensor) -> None:
    """Give this process's part of a tensor its value."""
    full = value_of(name, tuple(tensor.shape), tensor.dtype)
    local(tensor).copy_(full[piece_of(tensor).within(whole(tensor.shape))])


def wrong(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors whose part here is not the value's, bit for bit."""
    found = []
    for name, tensor in tensors.items():
        full = value_of(name, tuple(tensor.shape), tensor.dtype)
        if not torch.equal(local(tensor), full[piece_of(tensor).within(whole(tensor.shape))]):
            found.append(name)
    return found


def marked(architecture: Architecture, folder: Path, sizes: Mapping[str, int]) -> Any:
    """Return a cut model whose tensors all have their value."""
    model, _ = built(architecture, folder, sizes)
    for name, tensor in stored_weights(model).items():
        fill(name, tensor)
    return model


def marked_optimizer(model: Any) -> torch.optim.Optimizer:
    """Return AdamW in the state that it has after one step, but that its moments have their value."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        state = {kind: torch.empty_like(parameter, requires_grad=False) for kind in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **state}
    for name, tensor in moments(model, optimizer).items():
        fill(name, tensor)
    return optimizer


def moments(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors of a parameter's shape, by kind and name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {f"{kind}/{names[parameter]}": value for parameter, state in optimizer.state.items()
            for kind, value in state.items() if value.shape == parameter.shape and kind != "step"}
