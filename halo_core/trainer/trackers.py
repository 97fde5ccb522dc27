"""Experiment trackers: TensorBoard, Weights & Biases, trackio, and those that plugins bring.

Not for metrics.jsonl. A tracker's package is imported only when it is asked for; without it the run is refused
before weights are read. No torch is imported by `check`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from halo_core.errors import Problem
from halo_core.trainer.report import EvaluationReport, Interval, RunStart, StepReport

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""Built-in tracker -> the module its package brings."""
PROJECT = "huggingface"
"""Project of wandb and trackio when WANDB_PROJECT or TRACKIO_PROJECT is not set, as transformers names it."""


class Tracker(Protocol):
    """What a tracker does. A plugin's target is a callable (name, config, folder, step) -> Tracker."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record values of one step."""

    def finish(self) -> None:
        """Flush and close."""


def check(report_to: Sequence[str], targets: Mapping[str, str]) -> tuple[Problem, ...]:
    """Return what stands in the way of the trackers asked for.

    targets: name -> "module:attribute" of the trackers that plugins bring.
    """
    problems = []
    for name in report_to:
        if name in targets:
            continue
        if name not in PACKAGES:
            problems.append(Problem(key="report_to", value=name, why="no such tracker is installed",
                                    remedy=f"use one of {', '.join(['none', *PACKAGES, *targets])}"))
        elif importlib.util.find_spec(PACKAGES[name]) is None:
            problems.append(Problem(key="report_to", value=name, why=f"the package {PACKAGES[name]} is not installed",
                                    remedy=f"pip install 'halo-moe[{name}]', or set report_to: none"))
    return tuple(problems)


def open_trackers(
    report_to: Sequence[str],
    targets: Mapping[str, str],
    *,
    run_name: str,
    config: Mapping[str, Any],
    folder: Path,
    logging_steps: int,
    say: Callable[[str], None],
    step: int = 0,
) -> list[TrackerReporter]:
    """Start every tracker asked for and return each as a reporter.

    config: the run's configuration in plain values. folder: the run's folder. step: the step resumed from.
    """
    opened = []
    for name in report_to:
        start = _attribute(targets[name]) if name in targets else _STARTS[name]
        opened.append(TrackerReporter(name, start(run_name, config, folder, step), logging_steps, say))
    return opened


class TrackerReporter:
    """Hands a tracker a summary every `logging_steps` steps and each evaluation.

    A tracker that fails is reported once and left out from then on: training does not end for it.
    """

    def __init__(self, name: str, tracker: Tracker, logging_steps: int, say: Callable[[str], None]) -> None:
        self._name = name
        self._tracker: Tracker | None = tracker
        self._say = say
        self._interval = Interval(logging_steps, lambda report, steps: self._log(_values("train", report), report.step))

    def started(self, start: RunStart) -> None:
        """Hear nothing new: the tracker was started with the run's configuration."""

    def stepped(self, report: StepReport) -> None:
        """Log a summary when one is due."""
        self._interval.add(report)

    def evaluated(self, report: EvaluationReport) -> None:
        """Log an evaluation."""
        self._log(_values("eval", report), report.step)

    def noted(self, text: str) -> None:
        """Log nothing: trackers take numbers."""

    def ended(self) -> None:
        """Log what is pending and close the tracker."""
        self._interval.flush()
        self._guarded(lambda tracker: tracker.finish())
        self._tracker = None

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._guarded(lambda tracker: tracker.log(values, step))

    def _guarded(self, act: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            act(self._tracker)
        except Exception as error:  # a tracker's package may raise anything, and the run must survive it
            self._tracker = None
            self._say(f"the tracker {self._name} failed and is left out from now on: {type(error).__name__}: {error}")


def _values(group: str, report: StepReport | EvaluationReport) -> dict[str, float]:
    """Return the report under the names that transformers' trackers use: train/loss, eval/loss, ..."""
    return {f"{group}/{name.removeprefix('eval_')}": value for name, value in report.row().items() if name != "step"}


class _TensorBoard:
    def __init__(self, run_name: str, config: Mapping[str, Any], folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "runs"), purge_step=step + 1 if step else None)
        self._writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, run_name: str, config: Mapping[str, Any], folder: Path, step: int) -> None:
        import wandb

        self._run = wandb.init(project=os.environ.get("WANDB_PROJECT", PROJECT), name=run_name, config=dict(config),
                               dir=str(folder))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, run_name: str, config: Mapping[str, Any], folder: Path, step: int) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(project=os.environ.get("TRACKIO_PROJECT", PROJECT), name=run_name, config=dict(config),
                     resume="allow")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(values), step=step)

    def finish(self) -> None:
        self._trackio.finish()


def _attribute(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


_STARTS: dict[str, Callable[[str, Mapping[str, Any], Path, int], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "trackio": _Trackio,
}
