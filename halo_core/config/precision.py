"""What `dtype`, `bf16` and `optim` mean together: the dtype of the weights, and the rule that steps them.

Not for the rules themselves (`halo_core.optim`), nor for the device. No torch here: a plan is checked before it is
imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, TypeAlias

from halo_core.config.keys import RunConfig
from halo_core.errors import Problem

Rule: TypeAlias = Literal["torch", "stochastic", "masters"]
"""Who steps a parameter. `torch`: torch's optimizer of that name, rounding to the nearest value of the weight's dtype.
`stochastic`: AdamW with bf16 moments, rounded by chance, exact where a parameter is fp32. `masters`: AdamW with an fp32
copy and fp32 moments beside each bf16 parameter."""

TORCH_ADAMW = ("adamw_torch", "adamw_torch_fused")
MASTERS = "adamw_fp32"


def rule_of(optim: str, bf16: bool) -> Rule:
    """Return the rule of a sound configuration."""
    if optim == MASTERS:
        return "masters"
    return "stochastic" if bf16 else "torch"


def decided(config: RunConfig) -> RunConfig:
    """Return the configuration with the dtype that `bf16: true` stands for."""
    return dataclasses.replace(config, dtype="bfloat16") if config.bf16 else config


def conflicts(config: RunConfig, given: frozenset[str]) -> Iterator[Problem]:
    """Yield what cannot hold at the same time, whatever the model is."""
    if config.bf16 and config.dtype == "float32" and "dtype" in given:
        yield Problem(
            key="dtype",
            value=config.dtype,
            why="bf16: true keeps the weights in bf16",
            remedy=f"remove this line; or remove it and set optim: {MASTERS}, which keeps fp32 masters beside bf16 "
            "weights; or set bf16: false to train in fp32",
        )
    if config.bf16 and config.optim == "sgd":
        yield Problem(
            key="optim",
            value=config.optim,
            why="bf16: true is AdamW with stochastic rounding; sgd would round every step to the nearest bf16 value",
            remedy=f"set optim: {TORCH_ADAMW[-1]}, or bf16: false with dtype: bfloat16 for torch's own SGD",
        )
    if config.optim == MASTERS and config.dtype == "float32" and not config.bf16:
        yield fp32_masters_of_fp32("dtype: float32")


def conflicts_with_source(config: RunConfig, stored: str) -> Iterator[Problem]:
    """Yield what cannot hold for a source stored in the dtype `stored`, which `dtype: auto` takes."""
    if config.dtype == "auto" and not config.bf16 and config.optim == MASTERS and stored == "float32":
        yield fp32_masters_of_fp32("dtype: auto, and the model is stored in fp32")


def fp32_masters_of_fp32(because: str) -> Problem:
    """Return the refusal of fp32 masters beside fp32 weights."""
    return Problem(
        key="optim",
        value=MASTERS,
        why=f"the weights are fp32 ({because}), and so their own masters: this would be {TORCH_ADAMW[0]}",
        remedy=f"set optim: {TORCH_ADAMW[-1]}, or bf16: true for bf16 weights beside fp32 masters",
    )


def remarks_on_weights(config: RunConfig, given: frozenset[str], dtype: str) -> Iterator[str]:
    """Yield what a person should know about a run whose weights are of this dtype."""
    if dtype == "bfloat16" and rule_of(config.optim, config.bf16) == "torch":
        yield (
            f"dtype: bfloat16 with optim: {config.optim} rounds to the nearest bf16 value, which loses every step "
            "smaller than half a bf16 step (1/256 to 1/512 of the weight): 1.0 less 0.0001 stays 1.0 however often. "
            f"bf16: true rounds by chance and keeps them in the mean, optim: {MASTERS} keeps them exactly"
        )
    if dtype == "float32":
        if config.fp32_router:
            yield "fp32_router: true changes nothing, because all weights are fp32"
        if config.fp32_grad_reduce:
            yield "fp32_grad_reduce: true changes nothing, because gradients of fp32 weights are fp32"
        if "grad_accumulation_dtype" in given and config.grad_accumulation_dtype == "bfloat16":
            yield "grad_accumulation_dtype: bfloat16 changes nothing, because gradients of fp32 weights are fp32"
