"""When a run reports, evaluates and saves, and which metric tells the best checkpoint.

Not for doing any of it. Rules and names follow transformers' Trainer. No torch here: `check` refuses early.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halo_core.errors import Problem

if TYPE_CHECKING:
    from halo_core.config import RunConfig

METRICS = ("eval_loss",)
"""What an evaluation measures."""


@dataclass(frozen=True, kw_only=True)
class Due:
    """What follows a step."""

    evaluate: bool
    save: bool


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The run's intervals with ratios resolved to steps."""

    total_steps: int
    steps_per_epoch: int
    logging_steps: int
    eval_strategy: str
    eval_steps: int
    save_strategy: str
    save_steps: int

    def due(self, step: int) -> Due:
        """Return what follows step `step`; saving on a new best result is decided after the evaluation."""
        last = step == self.total_steps
        epoch_ended = last or step % self.steps_per_epoch == 0
        return Due(
            evaluate=_falls_due(self.eval_strategy, self.eval_steps, step, last, epoch_ended),
            save=_falls_due(self.save_strategy, self.save_steps, step, last, epoch_ended),
        )


def build_policy(config: RunConfig, *, total: int, steps_per_epoch: int) -> Policy:
    """Return the intervals of a run of `total` steps; a number below 1 is a share of the run, rounded up."""

    def steps(value: float) -> int:
        return math.ceil(total * value) if value < 1 else int(value)

    logging_steps = steps(config.logging_steps)
    eval_steps = steps(config.eval_steps) if config.eval_steps else logging_steps
    save_steps = steps(config.save_steps)
    if _saves_where_it_evaluates(config):
        # Two shares, each rounded up by itself, need not stay multiples: 0.1 and 0.3 of 15 steps are 2 and 5.
        save_steps = eval_steps * round(config.save_steps / (config.eval_steps or config.logging_steps))
    return Policy(
        total_steps=total,
        steps_per_epoch=steps_per_epoch,
        logging_steps=logging_steps,
        eval_strategy=str(config.eval_strategy),
        eval_steps=eval_steps,
        save_strategy=str(config.save_strategy),
        save_steps=save_steps,
    )


def best_metric(config: RunConfig) -> tuple[str, bool]:
    """Return the metric that tells the best checkpoint and whether greater is better."""
    name = config.metric_for_best_model or "loss"
    greater = config.greater_is_better
    if greater is None:
        greater = not name.endswith("loss")
    return (name if name.startswith("eval_") else f"eval_{name}"), greater


def tracks_best(config: RunConfig) -> bool:
    """Return whether the run asks for its best checkpoint."""
    return bool(config.load_best_model_at_end) or str(config.save_strategy) == "best"


def _saves_where_it_evaluates(config: RunConfig) -> bool:
    """Return whether each save, by its step, has to fall on an evaluation."""
    return tracks_best(config) and str(config.eval_strategy) == str(config.save_strategy) == "steps"


def check(config: RunConfig) -> tuple[Problem, ...]:
    """Return what stands in the way of choosing the best checkpoint as asked."""
    if not tracks_best(config):
        return ()
    problems = []
    if str(config.eval_strategy) == "no":
        key = "load_best_model_at_end" if config.load_best_model_at_end else "save_strategy"
        problems.append(Problem(key=key, value=getattr(config, key),
                                why="the best checkpoint is told by evaluations, and none are made",
                                remedy="set eval_strategy: steps or epoch"))
    name, _ = best_metric(config)
    if name not in METRICS:
        problems.append(Problem(key="metric_for_best_model", value=config.metric_for_best_model,
                                why="no evaluation measures it", remedy=f"use one of {', '.join(METRICS)}"))
    evaluates, saves = str(config.eval_strategy), str(config.save_strategy)
    if evaluates != "no" and saves not in ("best", evaluates):
        problems.append(Problem(key="save_strategy", value=saves,
                                why="the best checkpoint needs an evaluation at each save, and eval_strategy is "
                                    f"{evaluates}",
                                remedy=f"set save_strategy: {evaluates}, or best"))
    if _saves_where_it_evaluates(config):
        every = config.eval_steps or config.logging_steps
        times = config.save_steps / every
        mixed = (config.save_steps < 1) != (every < 1)
        if mixed or round(times) < 1 or not math.isclose(times, round(times)):
            problems.append(Problem(key="save_steps", value=config.save_steps,
                                    why=f"the best checkpoint needs an evaluation at each save, and one is made every "
                                        f"{every} steps",
                                    remedy="make save_steps a multiple of eval_steps"))
    return tuple(problems)


def _falls_due(strategy: str, interval: int, step: int, last: bool, epoch_ended: bool) -> bool:
    if strategy == "steps":
        return last or step % interval == 0
    return strategy == "epoch" and epoch_ended
