"""The hooks of project "halo": what a plugin can say, and when it is asked.

Declarations take no argument, import no torch and yield frozen data. Behaviour hooks run at start-up or between
steps, never inside forward or backward, and never communicate between ranks. Answers are collected, never raced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

from halo_core.errors import Problem
from halo_core.family import Answer, BackendSpec, FamilySpec, MoEBlockSpec, SequenceMixerSpec

if TYPE_CHECKING:
    from halo_core.plan import RunPlan

PROJECT = "halo"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def halo_families() -> Iterable[FamilySpec]:  # type: ignore[empty-body]
    """Yield the families this plugin owns."""


@hookspec
def halo_moe_blocks() -> Iterable[MoEBlockSpec]:  # type: ignore[empty-body]
    """Yield where routed experts sit, one per MoE architecture."""


@hookspec
def halo_sequence_mixers() -> Iterable[SequenceMixerSpec]:  # type: ignore[empty-body]
    """Yield layers that mix tokens along the sequence and are not attention."""


@hookspec
def halo_balancing_modes() -> Iterable[Answer]:  # type: ignore[empty-body]
    """Yield one answer per `balancing:*` feature and architecture."""


@hookspec
def halo_attention_backends() -> Iterable[Answer]:  # type: ignore[empty-body]
    """Yield one answer per `attention:*` feature and architecture."""


@hookspec
def halo_context_parallel() -> Iterable[Answer]:  # type: ignore[empty-body]
    """Yield one answer per `cp:*` feature and architecture."""


@hookspec
def halo_features() -> Iterable[Answer]:  # type: ignore[empty-body]
    """Yield one answer per remaining feature and architecture."""


@hookspec
def halo_backends() -> Iterable[BackendSpec]:  # type: ignore[empty-body]
    """Yield implementations of core interfaces."""


@hookspec
def halo_check_run(plan: RunPlan, config: Mapping[str, Any]) -> Iterable[Problem]:  # type: ignore[empty-body]
    """Yield what stands in the way of this run; `config` is the model's config.json as a dict. No torch."""


@hookspec
def halo_model_ready(plan: RunPlan, model: Any) -> None:
    """Called once with the model on the meta device, sockets attached, before sharding and loading."""


@hookspec
def halo_step_ended(plan: RunPlan, step: Any) -> None:
    """Called after each optimizer step with the frozen StepReport."""


@hookspec
def halo_add_commands(commands: Any) -> None:
    """Called once with the command line's typer application."""


DECLARATIONS = (
    "halo_families",
    "halo_moe_blocks",
    "halo_sequence_mixers",
    "halo_balancing_modes",
    "halo_attention_backends",
    "halo_context_parallel",
    "halo_features",
    "halo_backends",
)
ANSWER_HOOKS = ("halo_balancing_modes", "halo_attention_backends", "halo_context_parallel", "halo_features")
OWN_FAMILY_HOOKS = ("halo_check_run", "halo_model_ready", "halo_step_ended")
