"""Puts the core's experts function into a model's experts sockets, on the instances of this one model.

Not for kernels: what is put in is given by the caller. Nothing global changes but one entry in transformers' register
of experts functions, which acts only on modules that were attached.

For authors of a plugin whose MoE block has no such socket: `MoEBlockSpec.wrapper` is "module:bind", `experts` the path
of the block below its decoder layer, `experts_class` the block's class, and the plugin has

    def bind(block, experts):
        # `block` is the block of one decoder layer, on the meta device; called once per layer that has one.
        # `experts(weights, hidden, ids, routing)` is the core's function: an ExpertWeights view, hidden [T, H],
        # expert ids [T, K], routing weights [T, K]; it returns [T, H].
        def forward(hidden):
            ids, routing = block.route(hidden)
            weights = ExpertWeights(gate_up=block.gate_up, ...)  # built at each call: weights get replaced
            return experts(weights, hidden, ids, routing)
        block.forward = forward

`bind` sets attributes on this block only, neither on classes nor on module globals, moves and adds no parameter, and
calls `experts` exactly once per forward. What it sets is taken off again by `detach`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from halo_core.errors import Problem, Refused
from halo_core.family import MoEBlockSpec
from halo_core.kernels.experts.weights import ExpertsKernel, ExpertWeights
from halo_core.registry import Architecture

IMPLEMENTATION = "halo"
"""The name of the one function registered with transformers."""

ATTACHED = "halo_sockets"
"""The attribute of an attached model that holds its `Sockets`."""


@dataclass(eq=False)
class Socket:
    """One layer's door to the experts function, which counts how often it was opened.

    listener: called with the expert ids [T, K] of each pass, before anything is sent or computed.
    """

    path: str
    experts: ExpertsKernel
    calls: int = 0
    listener: Callable[[Tensor], None] | None = None

    def __call__(self, weights: ExpertWeights, hidden: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        """Return the routed output [T, H] of this layer."""
        self.calls += 1
        if self.listener is not None:
            self.listener(ids)
        return self.experts(weights, hidden, ids, routing)


@dataclass(frozen=True, kw_only=True)
class Change:
    """The attributes that attaching added to a module, and those it replaced with what they were."""

    module: nn.Module
    added: tuple[str, ...]
    replaced: dict[str, Any]


@dataclass(eq=False)
class Sockets:
    """What `attach` did to one model, so that it can be checked and undone."""

    by_path: dict[str, Socket] = field(default_factory=dict)
    implementation_before: dict[str, str | None] | None = None
    changes: list[Change] = field(default_factory=list)


def attach(model: PreTrainedModel, architecture: Architecture, experts: ExpertsKernel) -> None:
    """Let every MoE layer of `model` compute its experts by `experts`. A dense architecture has nothing to attach.

    Raises:
        Refused: when no decoder layer of an MoE architecture holds the experts its facts name, or when modules of
            that class exist which the facts do not reach: either way the facts do not describe this model.
    """
    if hasattr(model, ATTACHED):
        raise ValueError("this model has its sockets attached already; detach it first")
    sockets = Sockets()
    block = architecture.moe_block
    if block is not None:
        found = dict(experts_modules(model, architecture))
        _refuse_what_was_missed(model, architecture, block, found)
        for path, module in found.items():
            socket = Socket(path=path, experts=experts)
            sockets.by_path[path] = socket
            before = dict(vars(module))
            if block.wrapper == "halo":
                module.halo_experts = socket
            else:
                target, _, name = block.wrapper.partition(":")
                getattr(import_module(target), name)(module, socket)
            sockets.changes.append(_change(module, before))
        if block.wrapper == "halo":
            _register()
            sockets.implementation_before = model.get_experts_implementation()
            model.set_experts_implementation(IMPLEMENTATION)
    setattr(model, ATTACHED, sockets)


def detach(model: PreTrainedModel) -> None:
    """Give `model` back as transformers made it; its weights stay what they are."""
    sockets = of(model)
    for change in sockets.changes:
        held = vars(change.module)
        for name in change.added:
            held.pop(name, None)
        held.update(change.replaced)
    if sockets.implementation_before is not None:
        model.set_experts_implementation(sockets.implementation_before)
    delattr(model, ATTACHED)


def check_called(model: PreTrainedModel, *, recomputed: bool = False) -> None:
    """Check, after the first forward, that every MoE layer went through its socket; then start counting afresh.

    recomputed: whether layers are computed again in the backward pass (activation checkpointing). More than one call
        per layer is then right.

    Raises:
        RuntimeError: naming the layers that were not called, or called more than once.
    """
    sockets = of(model).by_path.values()
    wrong = [f"{s.path} ({s.calls} calls)" for s in sockets if s.calls < 1 or (s.calls > 1 and not recomputed)]
    for socket in sockets:
        socket.calls = 0
    if wrong:
        raise RuntimeError(
            "the experts of these layers did not go through the core's function once in a forward pass: "
            + ", ".join(wrong)
        )


def experts_modules(model: nn.Module, architecture: Architecture) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path in the model, module) of the routed experts, or of the block that a wrapper binds, layer by layer."""
    block = architecture.moe_block
    if block is None:
        return
    for path, layer in model.named_modules():
        if type(layer).__name__ != architecture.spec.decoder_layer:
            continue
        module = _at(layer, block.experts)
        if module is not None and type(module).__name__ == block.experts_class:
            yield f"{path}.{block.experts}", module


def view(module: nn.Module) -> ExpertWeights:
    """Return the weights that an experts module with transformers' socket holds at this moment."""
    gate_up, activation = ("gate_up_proj", "_apply_gate") if module.has_gate else ("up_proj", "act_fn")
    return ExpertWeights(
        gate_up=getattr(module, gate_up),
        down=module.down_proj,
        activation=getattr(module, activation),
        is_transposed=module.is_transposed,
        is_concatenated=module.is_concatenated,
        has_bias=module.has_bias,
        has_gate=module.has_gate,
        gate_up_bias=getattr(module, f"{gate_up}_bias") if module.has_bias else None,
        down_bias=module.down_proj_bias if module.has_bias else None,
    )


def _halo(module: nn.Module, hidden: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    """Compute one layer's experts: the function that transformers calls for every attached module."""
    socket = vars(module).get("halo_experts")
    if socket is None:
        raise RuntimeError(
            f"a {type(module).__name__} without the core's sockets was asked to use them: its model shares a "
            "configuration object with an attached model; give it one of its own"
        )
    return socket(view(module), hidden, ids, routing)


def _register() -> None:
    if IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _halo)


def _refuse_what_was_missed(
    model: nn.Module, architecture: Architecture, block: MoEBlockSpec, found: dict[str, nn.Module]
) -> None:
    reached = {id(module) for module in found.values()}
    missed = [
        path for path, module in model.named_modules()
        if type(module).__name__ == block.experts_class and id(module) not in reached
    ]
    normed = [path for path, module in found.items() if getattr(module, "has_post_expert_norm", False)]
    if found and not missed and not normed:
        return
    if missed:
        why = f"{block.experts_class} also stands at {', '.join(missed[:3])}, which the facts do not reach"
    elif normed:
        why = f"{block.experts_class} normalises each expert's output, which the core's experts kernel does not do"
    else:
        why = f"no {architecture.spec.decoder_layer} of this model holds a {block.experts_class} at {block.experts}"
    raise Refused(
        Problem(
            key="model_name_or_path",
            value=architecture.name,
            why=why,
            remedy="train a model of this architecture that has routed experts, or correct the plugin's MoE block",
            by=architecture.plugin,
        )
    )


def _change(module: nn.Module, before: dict[str, Any]) -> Change:
    now = vars(module)
    return Change(
        module=module,
        added=tuple(name for name in now if name not in before),
        replaced={name: value for name, value in before.items() if now.get(name) is not value},
    )


def of(model: PreTrainedModel) -> Sockets:
    """Return the sockets of an attached model.

    Raises:
        ValueError: it has none attached.
    """
    if not hasattr(model, ATTACHED):
        raise ValueError("this model has no sockets attached")
    sockets: Sockets = getattr(model, ATTACHED)
    return sockets


def _at(layer: nn.Module, path: str) -> nn.Module | None:
    try:
        return layer.get_submodule(path)
    except AttributeError:
        return None
