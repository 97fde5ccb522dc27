"""Cuts a model over the processes of a run, on the meta device, before its weights are read.

Not for reading weights: what is read afterwards is this process's slice of each tensor. Every gradient is a plain sum
over processes, never a mean: losses are divided by the global count before backward.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard, distribute_tensor

from halo_core.errors import Problem, Refused
from halo_core.registry import Architecture
from halo_core.sharding.entrance import ENTRANCE
from halo_core.sharding.owners import owners
from halo_core.sharding.sharded import Sharded
from halo_core.topology import Meshes, Topology


def shard(
    model: Any,
    architecture: Architecture,
    topology: Topology,
    meshes: Meshes,
    *,
    experts: Mapping[str, nn.Module],
    reshard_after_forward: bool = False,
    reshard_after_backward: bool = True,
    defer_grad_sync: bool = False,
    reduce_dtype: torch.dtype | None = None,
) -> Sharded:
    """Cut `model` in place and return what a training step asks of it.

    model: a transformers model on the meta device, its sockets attached. experts: path -> module of the routed experts
    of each layer (`sockets.experts_modules`). reshard_after_forward: whether a layer's weights are gathered again for
    backward (ZeRO-3), or kept until then. reshard_after_backward: whether they are let go between the micro-batches of
    a step. defer_grad_sync: sum gradients over processes once per step, in backward of its last micro-batch.
    reduce_dtype: in which gradients are summed over processes and, when deferred, over micro-batches; None for their
    own. The sum is then rounded once to the parameter's dtype: torch has no other for a gradient it hands out.

    The units that are gathered and summed as one are: decoder layers; experts that are spread over processes; modules
    of another dtype than their layer; an embedding that the head does not share; and everything else together.

    Raises:
        Refused: experts cannot be cut over so many processes.
        RuntimeError: a parameter would be summed by nobody, or experts are not stored one after the other.
    """
    assert topology.world > 1, "one process has nothing to cut"
    if topology.size("etp") > 1 or topology.size("cp") > 1:
        raise NotImplementedError("slices of experts and of sequences are cut elsewhere")
    placement = _Placement(meshes)
    ignored: set[nn.Parameter] = set()
    units: list[FSDPModule] = []

    def unit(module: nn.Module, mesh: Any, again: bool) -> None:
        plain = type(module)
        fully_shard(module, mesh=mesh, reshard_after_forward=again, mp_policy=_policy(module, reduce_dtype),
                    shard_placement_fn=placement, ignored_params=ignored)  # fmt: skip
        assert isinstance(module, FSDPModule)
        # Others look for modules by the name of their class: transformers for conversions, families for layers.
        type(module).__name__, type(module).__qualname__ = plain.__name__, plain.__qualname__
        units.append(module)

    if topology.size("ep") > 1:
        for path, module in experts.items():
            spread = _spread(path, module, architecture, meshes)
            if meshes.experts.size() > 1:
                placement.experts.update(spread)
                unit(module, meshes.experts, reshard_after_forward)
            else:
                ignored.update(spread)
    else:
        placement.experts.update(parameter for module in experts.values() for parameter in module.parameters())
    layers = [m for m in model.modules() if type(m).__name__ == architecture.spec.decoder_layer]
    for layer in layers:
        for odd in _of_another_dtype(layer, ignored):
            unit(odd, meshes.dense, reshard_after_forward)
        unit(layer, meshes.dense, reshard_after_forward)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        unit(embedding, meshes.dense, reshard_after_forward)
    # The outermost unit stays gathered from forward to backward: the head's weight is used between the two.
    unit(model, meshes.dense, False)
    for module in units:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    setattr(model, ENTRANCE, types.MethodType(_decode, model))
    register_fsdp_forward_method(model, ENTRANCE)
    owners(model, meshes)
    return Sharded(
        model=model, meshes=meshes, reshard_after_backward=reshard_after_backward, defer_grad_sync=defer_grad_sync
    )


def _policy(module: nn.Module, reduce_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return the policy that sums in `reduce_dtype`, or in the parameters' own dtype where that is as wide."""
    wide = all(parameter.dtype.itemsize >= torch.float32.itemsize for parameter in module.parameters())
    return MixedPrecisionPolicy(reduce_dtype=None if wide else reduce_dtype)


def _decode(model: Any, *arguments: Any, **named: Any) -> Any:
    return model.get_decoder()(*arguments, **named)


def _spread(path: str, module: nn.Module, architecture: Architecture, meshes: Meshes) -> list[nn.Parameter]:
    """Give each process of an ep group its part of one layer's experts; return the new parameters."""
    block = architecture.moe_block
    assert block is not None
    own = dict(module.named_parameters(recurse=False))
    counts = {parameter.shape[0] for parameter in own.values()}
    if block.wrapper != "halo" or len(counts) != 1 or len(own) != len(list(module.parameters())):
        raise RuntimeError(f"{path} does not hold its experts as tensors over all experts, so they cannot be spread")
    (count,) = counts
    if count % meshes.ep.size():
        raise RuntimeError(f"{path} has {count} experts, which {meshes.ep.size()} processes cannot share evenly")
    spread = []
    for name, parameter in own.items():
        part = distribute_tensor(parameter.data, meshes.ep, [Shard(0)], src_data_rank=None)
        replaced = nn.Parameter(part, requires_grad=parameter.requires_grad)
        setattr(module, name, replaced)
        spread.append(replaced)
    return spread


def _of_another_dtype(layer: nn.Module, ignored: set[nn.Parameter]) -> Iterable[nn.Module]:
    """Yield the modules of a layer whose parameters differ in dtype from most: a unit sums one dtype only.

    Raises:
        NotImplementedError: when a module itself holds parameters of several dtypes, or has others below it.
    """
    held = {name: p for name, p in layer.named_parameters() if p.requires_grad and p not in ignored}
    elements: dict[torch.dtype, int] = {}
    for parameter in held.values():
        elements[parameter.dtype] = elements.get(parameter.dtype, 0) + parameter.numel()
    if len(elements) < 2:
        return
    usual = max(elements, key=lambda dtype: elements[dtype])
    paths = dict.fromkeys(name.rpartition(".")[0] for name, p in held.items() if p.dtype != usual)
    for path in paths:
        if any(path.startswith(f"{above}.") for above in paths):
            continue  # within a module that is a unit itself
        module = layer.get_submodule(path)
        if module is layer or len({p.dtype for p in module.parameters()}) > 1:
            raise NotImplementedError(f"{type(module).__name__} holds parameters of several dtypes")
        yield module


class _Placement:
    """Along which dimension a parameter is cut: the first, but for experts whose number does not divide evenly.

    Of those the last dimension is cut where it divides: the first would leave some processes with one expert more, or
    others with none, and those between are put together of stored tensors, whose slices are not a slice of the whole.
    """

    def __init__(self, meshes: Meshes) -> None:
        self.experts: set[nn.Parameter] = set()
        self._pieces = meshes.experts.shape[-1] if meshes.ep.size() > 1 else meshes.dense.shape[-1]
        self._ranks = meshes.ep.size()

    def __call__(self, parameter: nn.Parameter) -> Shard | None:
        if parameter not in self.experts or parameter.shape[0] // self._ranks % self._pieces == 0:
            return None
        last, count = parameter.ndim - 1, parameter.shape[0] // self._ranks
        if parameter.shape[last] % self._pieces == 0:
            return Shard(last)
        most = -(-count // self._pieces)
        if most * (self._pieces - 1) >= count:
            raise Refused(
                Problem(
                    key="--nproc",
                    value=self._pieces * self._ranks,
                    why=f"{count} experts of {list(parameter.shape[1:])} cannot be cut over {self._pieces} processes: "
                    "one of them would get nothing",
                    remedy="a number of processes that divides the experts, or their width and hidden size",
                )
            )
        return None
