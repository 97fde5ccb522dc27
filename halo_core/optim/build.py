"""The optimizer a configuration names, over named groups: torch's own, or AdamW in bf16 or with fp32 masters.

Not for the learning rate of a step: see `schedule.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from halo_core.config.precision import rule_of
from halo_core.errors import Problem, Refused
from halo_core.optim.adamw_bf16 import AdamWBF16, AdamWFP32, NamedAdamW
from halo_core.optim.roles import DECAYED, roles


class OptimizerSettings(Protocol):
    """The configuration keys read here."""

    @property
    def optim(self) -> str: ...
    @property
    def bf16(self) -> bool: ...
    @property
    def seed(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def adam_beta1(self) -> float: ...
    @property
    def adam_beta2(self) -> float: ...
    @property
    def adam_epsilon(self) -> float: ...


def build_optimizer(model: nn.Module, config: OptimizerSettings) -> torch.optim.Optimizer:
    """Return the optimizer that `optim` names, over the parameters that require a gradient.

    With `bf16: true` both names of torch's AdamW mean AdamW with bf16 moments and stochastic rounding.
    The groups are "decayed" and "plain" (see `roles.DECAYED`); each keeps its parameters' names.

    Raises:
        Refused: `optim` is unknown, or nothing is trainable.
    """
    build = OPTIMIZERS.get(config.optim)
    if build is None:
        raise Refused(Problem(key="optim", value=config.optim, why="this optimizer is not known",
                              remedy=f"use one of {', '.join(OPTIMIZERS)}"))
    if rule_of(config.optim, config.bf16) == "stochastic":
        build = partial(_named, kind=AdamWBF16)
    groups = parameter_groups(model, config.weight_decay)
    if not groups:
        raise Refused(Problem(why="no parameter of the model requires a gradient",
                              remedy="leave at least one parameter trainable"))
    return build(groups, config)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the non-empty groups of named trainable parameters, in the order of the model."""
    role = roles(model)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decayed = [pair for pair in trainable if role[pair[0]] in DECAYED]
    plain = [pair for pair in trainable if role[pair[0]] not in DECAYED]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _sgd(groups: list[dict[str, Any]], config: OptimizerSettings) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.learning_rate)


def _adamw(groups: list[dict[str, Any]], config: OptimizerSettings, *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2),
                             eps=config.adam_epsilon, fused=True if fused else None)


def _named(
    groups: list[dict[str, Any]], config: OptimizerSettings, *, kind: type[NamedAdamW]
) -> torch.optim.Optimizer:
    return kind(groups, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2),
                eps=config.adam_epsilon, seed=config.seed)


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], OptimizerSettings], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adamw_torch": lambda groups, config: _adamw(groups, config, fused=False),
    "adamw_torch_fused": lambda groups, config: _adamw(groups, config, fused=True),
    "adamw_fp32": lambda groups, config: _named(groups, config, kind=AdamWFP32),
}
