"""Resolves a checked plan on this machine, once, before weights: device, dtype, attention and kernels, with reasons.

Not for deciding what a run does (`plan.py`): the same plan resolved on a GPU and on a CPU trains the same model. This
is the first module of a run that imports torch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch

from halo_core.config import RunConfig
from halo_core.errors import Problem, Refused
from halo_core.kernels.attention import AttentionKernel
from halo_core.kernels.attention import choice as attention_choice
from halo_core.kernels.delta_rule import choice as delta_rule_choice
from halo_core.kernels.experts import choice
from halo_core.kernels.experts.weights import ExpertsKernel
from halo_core.kernels.head import HeadKernel, chunked, reference
from halo_core.kernels.short_conv import choice as short_conv_choice
from halo_core.plan import Checked
from halo_core.registry import Architecture, size, source_dtype, text_config

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16})
TRANSFORMERS_ATTENTION = ("eager", "sdpa", "flex_attention")
"""The implementations of attention that are transformers' own; every other name asks for flash attention."""

FUSED = "fused"
EVERYWHERE: Mapping[str, str] = MappingProxyType({"short_conv": "reference", "delta_rule": "chunked"})
"""The kernel of each kind of mixer that runs on every device."""
_MIXERS: Mapping[str, Any] = MappingProxyType({"short_conv": short_conv_choice, "delta_rule": delta_rule_choice})

VERSIONED = ("halo-moe", "torch", "transformers", "safetensors", "datasets", "huggingface_hub")


@dataclass(frozen=True, kw_only=True)
class ResolvedPlan:
    """What this process runs on and with.

    device, dtype: where and in what weights and compute are. attention: the implementation, by the name it was asked
    for or transformers'. attention_by: the core's kernel that computes it, `flash` or `reference`; None where
    transformers does. experts: `grouped`, `reference`, or `none` for a model without experts; `experts_reason` says why
    that one. mixers: kernel of each kind of layer that mixes tokens otherwise, by kind. head: the head kernel.
    versions: distribution -> version. notes: lines for the log, said once.
    """

    device: torch.device
    device_name: str
    dtype: torch.dtype
    attention: str
    experts: str
    experts_reason: str
    head: str
    versions: Mapping[str, str]
    attention_by: str | None = None
    mixers: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def experts_kernel(self) -> ExpertsKernel | None:
        """Return the experts kernel, or None for a model without experts."""
        # Without dispatch to other ranks every id names an expert of this one.
        return None if self.experts == "none" else choice.kernel(self.experts, may_skip=False)

    @property
    def attention_kernel(self) -> Callable[[int], AttentionKernel] | None:
        """Return the attention kernel for heads of a size in elements, or None where transformers computes it."""
        return None if self.attention_by is None else partial(attention_choice.kernel, self.attention_by)

    @property
    def mixer_kernels(self) -> Mapping[str, Any] | None:
        """Return the kernel of each kind of mixer for every batch, or None where transformers' own serve as well."""
        if self.mixers == {kind: EVERYWHERE[kind] for kind in self.mixers}:
            return None
        return {kind: _MIXERS[kind].kernel(name) for kind, name in self.mixers.items()}

    @property
    def head_kernel(self) -> HeadKernel:
        """Return the head kernel."""
        return {"chunked": chunked.log_probabilities, "reference": reference.log_probabilities}[self.head]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            "device": str(self.device),
            "device_name": self.device_name,
            "dtype": dtype_name(self.dtype),
            "attention": self.attention,
            "kernels": {
                "experts": self.experts,
                "head": self.head,
                **({} if self.attention_by is None else {"attention": self.attention_by}),
                **self.mixers,
            },
            "experts_reason": self.experts_reason,
            "versions": dict(self.versions),
        }

    def digest(self) -> str:
        """Return 16 hexadecimal digits that are equal exactly when two processes resolved to the same.

        The device's index is left out: ranks of one machine differ in it.
        """
        decided = self.as_dict() | {"device": self.device.type}
        return hashlib.blake2b(json.dumps(decided, sort_keys=True).encode(), digest_size=8).hexdigest()


def resolve(checked: Checked, model_config: Mapping[str, Any] | None = None) -> ResolvedPlan:
    """Return the plan of this process.

    model_config: config.json of the source folder, where the plan was made before the folder existed.

    Raises:
        Refused: the dtype that `dtype: auto` finds in the source cannot be trained in, or flash attention cannot run.
    """
    plan, config, architecture = checked.plan, checked.config, checked.architecture
    source = checked.model_config if model_config is None else model_config
    device = _device()
    dtype = dtype_of(config.dtype, source, architecture)
    experts, reason, notes = _experts(plan.experts_kernel, architecture, source, dtype, device)
    asked = config.kernels or {}
    attention_by, about_attention = _attention(config, plan.attention, architecture, source, dtype, device)
    mixers, about_mixers = _mixers(asked, architecture, dtype, device)
    return ResolvedPlan(
        device=device,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        dtype=dtype,
        attention=plan.attention,
        experts=experts,
        experts_reason=reason,
        head=plan.head_kernel,
        versions=MappingProxyType({name: found for name in VERSIONED if (found := _version(name))}),
        attention_by=attention_by,
        mixers=mixers,
        notes=(*notes, *about_attention, *about_mixers),
    )


def dtype_of(asked: str, model_config: Mapping[str, Any], architecture: Architecture) -> torch.dtype:
    """Return the dtype of a configuration's `dtype`; `auto` is the one config.json names, fp32 where it names none.

    Raises:
        Refused: when the source's own dtype is one that cannot be trained in.
    """
    name = source_dtype(architecture.spec, model_config) if asked == "auto" else asked
    if name not in DTYPES:
        raise Refused(
            Problem(
                key="dtype",
                value=asked,
                why=f"the source is stored in {name}, which training here does not compute in",
                remedy="dtype: bfloat16, or float32",
            )
        )
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that configurations use for a dtype."""
    return str(dtype).removeprefix("torch.")


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())  # of several processes, each has set its own on joining


def _experts(
    asked: str, architecture: Architecture, model_config: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[str, str, tuple[str, ...]]:
    """Return the experts kernel, why it is that one, and what the log should say."""
    if not architecture.spec.is_moe:
        return "none", "the model has no experts", ()
    if asked == "reference":
        return "reference", "the configuration asks for it", ()
    hidden_size, width = _sizes(architecture, model_config)
    why = choice.grouped_obstacle(dtype=dtype, device=device, hidden_size=hidden_size, width=width)
    if why is None:
        return "grouped", "torch's grouped_mm runs here", ()
    return "reference", why, (f"experts kernel: reference, because {why}",)


def _attention(
    config: RunConfig,
    name: str,
    architecture: Architecture,
    model_config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[str | None, tuple[str, ...]]:
    """Return the core's kernel that computes attention, None for transformers' own, and what the log should say.

    Raises:
        Refused: flash attention is asked for and cannot run here.
    """
    asked = (config.kernels or {}).get("attention")
    notes = []
    if name in TRANSFORMERS_ATTENTION:
        if asked is not None:
            notes.append(f"kernels: attention says nothing while attention is {name}, which transformers computes")
        if device.type == "cuda" and (config.packing or config.padding_free):
            notes.append(
                f"attention {name} makes a mask of every pair of tokens in a row; with attn_implementation: "
                "flash_attention_2 borders keep documents apart"
            )
        return None, tuple(notes)
    if asked == "reference":
        return "reference", ("attention kernel: reference, because the configuration asks for it",)
    obstacle = attention_choice.flash_obstacle(dtype=dtype, device=device)
    if obstacle is not None:
        why, remedy = obstacle
        raise Refused(Problem(key="attn_implementation", value=name, why=why, remedy=remedy))
    notes.append(f"attention kernel: the flash kernels that torch {torch.__version__} carries")
    for head in sorted(_head_sizes(architecture, model_config)):
        why_not = attention_choice.head_obstacle(head)
        if why_not is not None:
            notes.append(
                f"attention kernel of layers with heads of {head}: torch's scaled dot product attention, document by "
                f"document, because {why_not}"
            )
    return "flash", tuple(notes)


def _mixers(
    asked: Mapping[str, str], architecture: Architecture, dtype: torch.dtype, device: torch.device
) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Return the kernel of each kind of mixer that the architecture has, and what the log should say."""
    chosen: dict[str, str] = {}
    notes = []
    for kind in dict.fromkeys(kind for spec in architecture.mixers for kind in spec.functions.values()):
        chosen[kind] = asked.get(kind, FUSED)
        why = _MIXERS[kind].fused_obstacle(dtype=dtype, device=device)
        if chosen[kind] != FUSED or why is None:
            continue
        chosen[kind] = EVERYWHERE[kind]
        if device.type == "cuda" or kind in asked:
            notes.append(f"{kind} kernel: {EVERYWHERE[kind]}, because {why}")
    return MappingProxyType(chosen), tuple(notes)


def _head_sizes(architecture: Architecture, model_config: Mapping[str, Any]) -> set[int]:
    """Return the sizes in elements that attention heads have in this model; layers may differ."""
    module, _, name = architecture.spec.config_class.partition(":")
    inner = text_config(architecture.spec, model_config)
    whole = getattr(import_module(module), name).from_dict(dict(inner))
    return {
        getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        for layer in whole.per_layer_config
    }


def _sizes(architecture: Architecture, model_config: Mapping[str, Any]) -> tuple[int, int]:
    """Return hidden size and expert width; what config.json leaves out is the configuration class's default."""
    names = architecture.spec.names
    inner = text_config(architecture.spec, model_config)
    found = [size(choices, inner) for choices in (names.hidden_size, names.expert_width)]
    if None in found:
        module, _, name = architecture.spec.config_class.partition(":")
        whole = getattr(import_module(module), name).from_dict(dict(inner)).to_dict()
        found = [size(choices, whole) for choices in (names.hidden_size, names.expert_width)]
    hidden_size, width = found
    assert hidden_size is not None, f"{names.hidden_size} is not in the configuration"
    assert width is not None, f"{names.expert_width} is not in the configuration"
    return hidden_size, width


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
