"""Signals: a flag once per step, a checkpoint, the way on; a second one ends at once. Real signals to this process."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from halo_core.checkpoint import atomic
from halo_core.trainer.interrupts import Interrupts
from halo_core.trainer.stopped import Interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_after_the_step_and_the_resumed_run_is_bit_equal(
    small: Any, tmp_path: Path, number: signal.Signals
) -> None:
    whole = small.run(tmp_path / "whole", raises=True, dropout=0.2)
    said: list[str] = []
    before = signal.getsignal(number)
    first = small.run(tmp_path / "parts", dropout=0.2, interrupts=Interrupts(said.append),
                      on_step=lambda report: os.kill(os.getpid(), number) if report.step == 4 else None)
    assert isinstance(first.error, Interrupted) and first.error.exit_code == 130
    assert first.error.step == 4 and first.error.checkpoint == tmp_path / "parts" / "checkpoint-4"
    assert f"output_dir={tmp_path / 'parts'} resume_from_checkpoint=true" in str(first.error)
    assert said == [f"{number.name}: finishing this step, then saving a checkpoint; a second signal ends at once"]
    assert signal.getsignal(number) is before
    second = small.run(tmp_path / "parts", dropout=0.2, resume_from_checkpoint=True, raises=True)
    assert small.same(whole.weights(), second.weights()) and whole.metric_rows() == second.metric_rows()


def test_second_signal_ends_at_once_without_a_checkpoint(small: Any, tmp_path: Path) -> None:
    def twice(report: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second signal should have ended the run")

    with pytest.raises(KeyboardInterrupt, match="second signal"):
        small.run(tmp_path, on_step=twice, raises=True)
    assert atomic.checkpoints(tmp_path) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_signal_during_the_save_leaves_no_half_checkpoint(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = atomic.Writer.file

    def interrupted(self: Any, name: str, chunks: Any) -> None:
        if "checkpoint-2" in str(self.folder):
            os.kill(os.getpid(), signal.SIGINT)
        write(self, name, chunks)

    monkeypatch.setattr(atomic.Writer, "file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small.run(tmp_path, save_strategy="steps", save_steps=1, raises=True,
                  on_step=lambda report: os.kill(os.getpid(), signal.SIGINT) if report.step == 2 else None)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1"]


def test_outside_the_main_thread_no_handler_is_set_and_request_still_works() -> None:
    found: list[Any] = []
    before = signal.getsignal(signal.SIGINT)

    def act() -> None:
        with Interrupts() as interrupts:
            interrupts.request("SIGTERM")
            found.append((signal.getsignal(signal.SIGINT), interrupts.requested))

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert found == [(before, "SIGTERM")]
