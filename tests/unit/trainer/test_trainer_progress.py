"""What people see: a bar on a terminal, lines elsewhere. Not for numbers that tools read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from halo_core.trainer import progress


def shown(small: Any, folder: Path, *, terminal: bool, **changes: Any) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=100)
    small.run(folder, raises=True, evaluation=small.rows(2, seed=3), eval_strategy="epoch",
              reporters=(progress.choose(console, changes.get("logging_steps", 1)),), **changes)
    return text.getvalue()


def test_lines_come_every_logging_steps_and_at_the_end(small: Any, tmp_path: Path) -> None:
    lines = shown(small, tmp_path, terminal=False, logging_steps=4).splitlines()
    steps = [line for line in lines if line.startswith("step") and "/" in line.split("  ")[0]]
    assert [line.split("  ")[0] for line in steps] == ["step 4/9", "step 8/9", "step 9/9"]
    for word in ("epoch", "loss", "grad_norm", "learning_rate", "tokens/s", "left 0:00:0"):
        assert word in steps[0]
    assert sum("eval_loss" in line for line in lines) == 3
    assert "\x1b" not in "".join(lines)


def test_terminal_shows_a_bar_with_loss_rate_and_time_left(small: Any, tmp_path: Path) -> None:
    text = shown(small, tmp_path, terminal=True)
    assert "9/9" in text and "tokens/s" in text and "left" in text and "eval_loss" in text


def test_notes_of_a_resume_are_shown(small: Any, tmp_path: Path) -> None:
    shown(small, tmp_path, terminal=False, save_strategy="steps", save_steps=4)
    text = shown(small, tmp_path, terminal=False, save_strategy="steps", save_steps=4,
                 resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert f"going on from {tmp_path / 'checkpoint-4'} after step 4" in text
    assert "a later checkpoint was set aside as checkpoint-8.set-aside" in text
