"""The learning rate as a pure function of the step, from transformers' schedules.

Not for schedules that react to an evaluation: those are refused, because a resumed run could not repeat them from
its step alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import SchedulerType, get_scheduler

from halo_core.errors import Problem, Refused

REACTIVE = ("reduce_lr_on_plateau", "greedy")
"""transformers' schedules that need a metric at every step."""
NAMES = tuple(kind.value for kind in SchedulerType if kind.value not in REACTIVE)


class ScheduleSettings(Protocol):
    """The configuration keys read here."""

    @property
    def lr_scheduler_type(self) -> str: ...
    @property
    def lr_scheduler_kwargs(self) -> Any: ...
    @property
    def warmup_steps(self) -> float: ...
    @property
    def learning_rate(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The factor on each group's first learning rate, by step."""

    shape: torch.optim.lr_scheduler.LambdaLR

    def factor(self, step: int) -> float:
        """Return the factor of optimizer step `step`, counted from 1."""
        return float(self.shape.lr_lambdas[0](step - 1))

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Set every group's rate for `step` and return the first group's."""
        factor = self.factor(step)
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
        return float(optimizer.param_groups[0]["lr"])


def warmup_count(warmup_steps: float, total_steps: int) -> int:
    """Return the number of warm-up steps: a count from 1 on, below 1 a share of the run, rounded up.

    Source: `TrainingArguments.get_warmup_steps` of transformers.
    """
    return int(warmup_steps) if warmup_steps >= 1 else math.ceil(total_steps * warmup_steps)


def build_schedule(config: ScheduleSettings, total_steps: int) -> Schedule:
    """Return the schedule that `lr_scheduler_type` names over `total_steps` optimizer steps.

    Raises:
        Refused: the name is unknown or reactive, or `lr_scheduler_kwargs` does not fit it.
    """
    name = str(config.lr_scheduler_type)
    if name in REACTIVE:
        raise Refused(Problem(key="lr_scheduler_type", value=name,
                              why="it follows evaluation results, so a resumed run could not repeat it",
                              remedy=f"use one of {', '.join(NAMES)}"))
    if name not in NAMES:
        raise Refused(Problem(key="lr_scheduler_type", value=name, why="transformers has no such schedule",
                              remedy=f"use one of {', '.join(NAMES)}"))
    arguments: Mapping[str, Any] = config.lr_scheduler_kwargs or {}
    if name == "constant" and config.warmup_steps:
        raise Refused(Problem(key="warmup_steps", value=config.warmup_steps, why="the schedule constant has no warm-up",
                              remedy="set lr_scheduler_type: constant_with_warmup, or warmup_steps: 0"))
    if name.startswith("constant") and arguments:
        raise Refused(Problem(key="lr_scheduler_kwargs", value=dict(arguments),
                              why=f"the schedule {name} takes no arguments", remedy="remove lr_scheduler_kwargs"))
    # Some shapes divide by the rate of the optimizer they are built for; at rate 0 every factor gives 0.
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate or 1.0)
    try:
        shape = get_scheduler(name, stand_in, num_warmup_steps=warmup_count(config.warmup_steps, total_steps),
                              num_training_steps=total_steps, scheduler_specific_kwargs=dict(arguments))
    except (TypeError, ValueError) as error:
        raise Refused(Problem(key="lr_scheduler_kwargs", value=dict(arguments),
                              why=f"the schedule {name} does not take this ({error})",
                              remedy="give the arguments of transformers' schedule of that name")) from error
    return Schedule(shape=shape)
