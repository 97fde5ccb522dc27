"""What a step and an evaluation report, and who can listen.

Not for where reports go: metrics.jsonl, the terminal and trackers are listeners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One optimizer step.

    step: counted from 1. epoch: passes over the data after this step. loss: mean over every supervised token of the
    global batch. grad_norm: global norm before clipping. learning_rate: the rate this step used. tokens,
    supervised_tokens: counts of the global batch. documents: rows in it, or pieces of rows that packing has cut.
    padding_tokens: positions that were computed and only fill. seconds: duration of the step. row_ids: the rows it
    trained on, in order; not written to metrics.jsonl.
    """

    step: int
    epoch: float
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    supervised_tokens: int
    seconds: float
    documents: int = 0
    padding_tokens: int = 0
    row_ids: tuple[int, ...] = ()

    def row(self) -> dict[str, float]:
        """Return the report as a row of metrics.jsonl."""
        return {name: value for name, value in vars(self).items() if name != "row_ids"}


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """One pass over the evaluation rows; `eval_loss` is the mean over all their supervised tokens.

    eval_rows: rows of the data, also where they were packed.
    """

    step: int
    epoch: float
    eval_loss: float
    eval_rows: int
    eval_tokens: int
    eval_supervised_tokens: int
    eval_seconds: float

    def row(self) -> dict[str, float]:
        """Return the report as a row of metrics.jsonl."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """What is known when the loop begins: steps done before (after a resume), and steps in total."""

    step: int
    total_steps: int
    steps_per_epoch: int


class Reporter(Protocol):
    """A listener. It is called between steps and must not change what is trained."""

    def started(self, start: RunStart) -> None:
        """Hear that the loop begins."""

    def stepped(self, report: StepReport) -> None:
        """Hear of one optimizer step."""

    def evaluated(self, report: EvaluationReport) -> None:
        """Hear of one evaluation."""

    def noted(self, text: str) -> None:
        """Hear something a person should read."""

    def ended(self) -> None:
        """Hear that the loop ends, whether well or not."""


class Interval:
    """Gathers steps and hands one summary, with the number of steps in it, to `emit` every `size` steps.

    The summary carries the mean loss and the summed tokens and seconds since the last one, and the last step's
    gradient norm and rate, as transformers logs them.
    """

    def __init__(self, size: int, emit: Callable[[StepReport, int], None]) -> None:
        self.size = size
        self.emit = emit
        self.pending: list[StepReport] = []

    def add(self, report: StepReport) -> None:
        """Take one step; emits when the interval is full."""
        self.pending.append(report)
        if report.step % self.size == 0:
            self.flush()

    def flush(self) -> None:
        """Emit what is pending, if anything."""
        if self.pending:
            self.emit(summarised(self.pending), len(self.pending))
            self.pending = []


def summarised(reports: Sequence[StepReport]) -> StepReport:
    """Return several steps as one: mean loss, summed counts and seconds, everything else from the last."""
    return replace(
        reports[-1],
        loss=sum(report.loss for report in reports) / len(reports),
        tokens=sum(report.tokens for report in reports),
        supervised_tokens=sum(report.supervised_tokens for report in reports),
        documents=sum(report.documents for report in reports),
        padding_tokens=sum(report.padding_tokens for report in reports),
        seconds=sum(report.seconds for report in reports),
        row_ids=(),
    )
