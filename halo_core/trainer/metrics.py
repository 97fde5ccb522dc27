"""metrics.jsonl: one row per optimizer step and per evaluation, floats unrounded.

Not for people or trackers: those have their own intervals.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from halo_core.trainer.report import EvaluationReport, RunStart, StepReport

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """Appends each report to `path` and flushes it, so that a killed process loses no row."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def started(self, start: RunStart) -> None:
        """Write nothing: rows begin with the first step."""

    def stepped(self, report: StepReport) -> None:
        """Append a step's row."""
        self._append(report.row())

    def evaluated(self, report: EvaluationReport) -> None:
        """Append an evaluation's row; it carries eval_loss and no loss."""
        self._append(report.row())

    def noted(self, text: str) -> None:
        """Write nothing: the file holds numbers only."""

    def ended(self) -> None:
        """Close the file."""
        self._file.close()

    def sync(self) -> None:
        """Force the rows to disk, so that no checkpoint is ever ahead of its rows."""
        os.fsync(self._file.fileno())

    def _append(self, row: dict[str, float]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def rows(path: Path) -> list[dict[str, float]]:
    """Return the complete rows of a metrics file; a half-written last line is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found


def carry_over(source: Path, target: Path, step: int, *, evaluated: bool = True) -> None:
    """Write to `target` the rows of `source` up to and including `step`; the two may be the same file.

    A run that resumes at `step` repeats everything later, so later rows are cut. evaluated: whether the evaluation
    of `step` came before its checkpoint; it is repeated otherwise. Without a source nothing is written.
    """
    if not source.is_file():
        return
    kept = [row for row in rows(source) if row["step"] <= step]
    if not evaluated:
        kept = [row for row in kept if row["step"] < step or "eval_loss" not in row]
    partial = target.with_name(target.name + ".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    partial.replace(target)
