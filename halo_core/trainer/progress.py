"""Progress for people: a bar on a terminal, plain lines anywhere else.

Not for numbers that tools read: those are in metrics.jsonl, unrounded.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from halo_core.trainer.report import EvaluationReport, Interval, Reporter, RunStart, StepReport


def choose(console: Console, logging_steps: int) -> Reporter:
    """Return the bar when `console` is a terminal, otherwise lines every `logging_steps` steps."""
    if console.is_terminal:
        return Bar(console)
    return Lines(lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True), logging_steps)


class Bar:
    """One moving line: steps, loss, tokens per second, time left."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[numbers]}"),
            TextColumn("left"), TimeRemainingColumn(), console=console,
        )

    def started(self, start: RunStart) -> None:
        """Show the bar."""
        self._task = self._progress.add_task("", total=start.total_steps, completed=start.step, numbers="")
        self._progress.start()

    def stepped(self, report: StepReport) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=report.step,
                              numbers=f"loss {report.loss:.4f}  {_rate(report)} tokens/s")

    def evaluated(self, report: EvaluationReport) -> None:
        """Print the evaluation above the bar."""
        self.noted(evaluation_line(report))

    def noted(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, highlight=False, markup=False)

    def ended(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


class Lines:
    """A line every `logging_steps` steps, through `say`."""

    def __init__(self, say: Callable[[str], None], logging_steps: int) -> None:
        self._say = say
        self._interval = Interval(logging_steps, lambda report, steps: say(step_line(report, self._start, steps)))

    def started(self, start: RunStart) -> None:
        """Remember how long the run is."""
        self._start = start

    def stepped(self, report: StepReport) -> None:
        """Print a line when one is due."""
        self._interval.add(report)

    def evaluated(self, report: EvaluationReport) -> None:
        """Print a line."""
        self._say(evaluation_line(report))

    def noted(self, text: str) -> None:
        """Print the text."""
        self._say(text)

    def ended(self) -> None:
        """Print what is pending."""
        self._interval.flush()


def step_line(report: StepReport, start: RunStart, steps: int) -> str:
    """Return one line about `steps` steps summed up in `report`, with the time left at their pace."""
    left = timedelta(seconds=round(report.seconds / steps * (start.total_steps - report.step)))
    return (f"step {report.step}/{start.total_steps}  epoch {report.epoch:.2f}  loss {report.loss:.4f}  "
            f"grad_norm {report.grad_norm:.3f}  learning_rate {report.learning_rate:.2e}  "
            f"{_rate(report)} tokens/s  left {left}")


def evaluation_line(report: EvaluationReport) -> str:
    """Return one line about an evaluation."""
    return (f"step {report.step}  eval_loss {report.eval_loss:.4f}  over {report.eval_rows} rows, "
            f"{report.eval_supervised_tokens} supervised tokens, {report.eval_seconds:.1f} s")


def _rate(report: StepReport) -> str:
    return f"{report.tokens / max(report.seconds, 1e-9):,.0f}"
