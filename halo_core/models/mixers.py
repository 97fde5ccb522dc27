"""Keeps documents apart in layers that mix tokens otherwise than by attention, on the instances of this one model.

Not for the mathematics (`halo_core.kernels`). Such a layer's own forward is kept, code and all, and runs with the
core's kernels in place of the functions it calls by name: whatever else it computes stays transformers', and a forward
that no longer calls those functions is refused instead of being bypassed. Neither classes nor module globals change.

Documents come to a bound layer as one argument of its call: so they are right when it is computed again in backward,
whatever batches came in between. Without them, as for rows of one document each, its own forward runs untouched.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from halo_core.errors import Problem, Refused
from halo_core.family import SequenceMixerSpec
from halo_core.kernels.delta_rule import DeltaRuleKernel, chunked
from halo_core.kernels.documents import KEYWORD, Documents
from halo_core.kernels.short_conv import ShortConvKernel, reference
from halo_core.models.masks import layer_types
from halo_core.registry import Architecture

ATTACHED = "halo_mixers"
"""The attribute of an attached model that holds its `Mixers`."""

KERNELS: Mapping[str, Any] = MappingProxyType(
    {"short_conv": reference.short_conv, "delta_rule": chunked.delta_rule}
)
"""Kernels that run everywhere, by the core's word for what they compute."""


@dataclass(eq=False)
class Mixer:
    """One bound module: its forward for documents apart, and what that forward calls.

    documents: of the pass that is running. called: which functions it has gone through.
    """

    path: str
    own: Callable[..., Any]
    apart: Callable[..., Any]
    functions: tuple[str, ...]
    documents: Documents | None = None
    called: set[str] = field(default_factory=set)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the module's forward, with its documents apart when they came along."""
        documents: Documents | None = named.pop(KEYWORD, None)
        if documents is None:
            return self.own(*arguments, **named)
        self.documents = documents
        self.called.clear()
        try:
            output = self.apart(*arguments, **named)
        finally:
            self.documents = None
        if missed := set(self.functions) - self.called:
            raise RuntimeError(f"{self.path} did not go through {', '.join(sorted(missed))} and mixes documents")
        return output


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixers:
    """What `attach` did to one model.

    layer_types: transformers' names of the layers that it keeps apart. every_batch: whether they want to know the
    documents of every batch, or of those with several in a row only.
    """

    by_path: Mapping[str, Mixer]
    modules: tuple[nn.Module, ...]
    layer_types: frozenset[str]
    every_batch: bool


def attach(
    model: PreTrainedModel,
    architecture: Architecture,
    kernels: Mapping[str, Any] = KERNELS,
    *,
    every_batch: bool = False,
) -> None:
    """Bind every mixer of `model` that the facts of its architecture name; most architectures have none.

    kernels: the kernel of each kind, as `halo_core.kernels` specifies them. every_batch: use them for every batch,
    else for rows of several documents only.

    Raises:
        Refused: the facts do not describe this model, or name a function that a mixer's forward does not call.
    """
    if hasattr(model, ATTACHED):
        raise ValueError("this model's mixers are attached already; detach them first")
    by_path: dict[str, Mixer] = {}
    modules = []
    for spec in architecture.mixers:
        found = [(path, m) for path, m in model.named_modules() if type(m).__name__ == spec.mixer_class]
        wanted = layer_types(model.config).count(spec.layer_type)
        if len(found) != wanted:
            why = f"it has {wanted} layers of type {spec.layer_type} and {len(found)} modules {spec.mixer_class}"
            raise _refused(architecture, why)
        for path, module in found:
            by_path[path] = module.forward = _mixer(path, module, spec, architecture, kernels)
            modules.append(module)
    bound = frozenset(spec.layer_type for spec in architecture.mixers)
    done = Mixers(
        by_path=MappingProxyType(by_path), modules=tuple(modules), layer_types=bound,
        every_batch=every_batch and bool(bound),
    )  # fmt: skip
    setattr(model, ATTACHED, done)


def detach(model: PreTrainedModel) -> None:
    """Give every mixer of `model` its own forward back."""
    mixers = of(model)
    assert mixers is not None, "this model's mixers are not attached"
    for module in mixers.modules:
        del module.forward
    delattr(model, ATTACHED)


def of(model: nn.Module) -> Mixers | None:
    """Return what was attached to a model, or None."""
    found: Mixers | None = vars(model).get(ATTACHED)
    return found


def _mixer(
    path: str, module: nn.Module, spec: SequenceMixerSpec, architecture: Architecture, kernels: Mapping[str, Any]
) -> Mixer:
    plain = inspect.unwrap(type(module).forward)
    if not isinstance(plain, types.FunctionType):
        raise _refused(architecture, f"the forward of {spec.mixer_class} is no plain function")
    missing = [name for name in spec.functions if name not in plain.__code__.co_names or name not in plain.__globals__]
    if missing or not spec.functions:
        raise _refused(architecture, f"the forward of {spec.mixer_class} does not call {', '.join(missing) or 'any'}")
    inside = dict(plain.__globals__)
    apart = types.FunctionType(plain.__code__, inside, plain.__name__, plain.__defaults__, plain.__closure__)
    apart.__kwdefaults__ = plain.__kwdefaults__
    mixer = Mixer(
        path=path, own=module.forward, apart=types.MethodType(apart, module), functions=tuple(spec.functions)
    )
    for name, kind in spec.functions.items():
        if kind not in CALLED_AS or kind not in kernels:
            raise _refused(architecture, f"the core has no kernel of kind {kind!r} for {name}")
        inside[name] = CALLED_AS[kind](mixer, name, kernels[kind])
    return mixer


def _as_short_conv(mixer: Mixer, name: str, kernel: ShortConvKernel) -> Callable[..., Tensor]:
    """Return the kernel with the call of transformers' `causal_conv1d_fn`."""

    def convolve(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        mixer.called.add(name)
        assert mixer.documents is not None
        return kernel(hidden_states, weight, bias, activation, mixer.documents)

    return convolve


def _as_delta_rule(mixer: Mixer, name: str, kernel: DeltaRuleKernel) -> Callable[..., tuple[Tensor, None]]:
    """Return the kernel with the call of transformers' `torch_chunk_gated_delta_rule`."""

    def scan(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, use_qk_l2norm_in_kernel: bool = False,
        initial_state: Tensor | None = None, output_final_state: bool = False, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        mixer.called.add(name)
        if not use_qk_l2norm_in_kernel or initial_state is not None or output_final_state:
            raise NotImplementedError(f"{mixer.path} asks for a delta rule that the core's kernel does not compute")
        assert mixer.documents is not None
        return kernel(query, key, value, g, beta, mixer.documents), None

    return scan


CALLED_AS: Mapping[str, Callable[[Mixer, str, Any], Callable[..., Any]]] = MappingProxyType(
    {"short_conv": _as_short_conv, "delta_rule": _as_delta_rule}
)
"""How transformers calls a function of each kind."""


def _refused(architecture: Architecture, why: str) -> Refused:
    return Refused(
        Problem(
            key="model_name_or_path",
            value=architecture.name,
            why=why,
            remedy="the release of transformers that this version is tested with, or correct the plugin's mixers",
            by=architecture.plugin,
        )
    )
