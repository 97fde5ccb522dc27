"""The ways a run ends before its last step.

Not for mistakes in a configuration: those are `halo_core.errors.Refused`, raised before the first step.
"""

from __future__ import annotations

from pathlib import Path

from halo_core.errors import EXIT_BUG, EXIT_INTERRUPTED


class StepFault(Exception):
    """What went wrong inside one step, before the loop knows where it stands; the optimizer was not stepped."""

    def __init__(self, *, what: str, remedy: str) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy


class TrainingStopped(Exception):
    """The run cannot go on. A command prints the text, without a traceback, and exits with code 1."""

    exit_code = EXIT_BUG

    def __init__(self, *, step: int, what: str, remedy: str, checkpoint: Path | None) -> None:
        self.step = step
        self.what = what
        self.remedy = remedy
        self.checkpoint = checkpoint
        kept = f"the last complete checkpoint is {checkpoint}" if checkpoint else "no checkpoint was saved yet"
        super().__init__(f"stopped at step {step}: {what}\n    kept: {kept}\n    do:   {remedy}")


class Interrupted(Exception):
    """A signal ended the run after a step, with a checkpoint. A command prints the text and exits with code 130."""

    exit_code = EXIT_INTERRUPTED

    def __init__(self, *, signal_name: str, step: int, checkpoint: Path) -> None:
        self.signal_name = signal_name
        self.step = step
        self.checkpoint = checkpoint
        super().__init__(
            f"interrupted by {signal_name} after step {step}; saved {checkpoint}\n"
            f"    to go on: the same command with output_dir={checkpoint.parent} resume_from_checkpoint=true"
        )
