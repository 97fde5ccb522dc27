"""Saving beside training: the same files, nothing of later steps in them, and every end of a run waits for them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from halo_core.checkpoint import atomic, find, resume
from halo_core.checkpoint.host_memory import HostMemory
from halo_core.checkpoint.identity import Identity
from halo_core.checkpoint.save import capture, save
from halo_core.checkpoint.saver import Saver
from halo_core.trainer.interrupts import Interrupts
from halo_core.trainer.stopped import Interrupted, TrainingStopped

BESIDE = {"save_async": True, "save_strategy": "steps", "save_steps": 1}


class Gate:
    """Holds back every thread of a saver before it writes its first file, until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    held = Gate()
    straight = atomic.Writer.file

    def waiting(self: Any, name: str, chunks: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            held.reached.set()
            assert held.opened.wait(60)
        straight(self, name, chunks)

    monkeypatch.setattr(atomic.Writer, "file", waiting)
    yield held
    held.opened.set()


def trained(small: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = small.model()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def common(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"step": 1, "model": model, "optimizer": optimizer, "progress": {},
            "identity": Identity(config={}, plan={}, data={}, environment={})}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_trained_meanwhile_does_not_leak_into_the_file(small: Any, tmp_path: Path, gate: Gate) -> None:
    model, optimizer = trained(small)
    gate.opened.set()
    save(tmp_path / "at-once", **common(model, optimizer))
    gate.opened.clear()
    with Saver(beside=True, timeout=60.0) as saver:
        for number in range(2):  # the second copy goes to the same memory
            gate.opened.clear()
            gate.reached.clear()
            captured = capture(tmp_path / str(number), **common(model, optimizer))
            saver.begin(captured, lambda path, group: None)
            assert gate.reached.wait(60) and not saver.has_ended()
            assert not (tmp_path / str(number) / "checkpoint-1").exists()
            step(model, optimizer)
            model.seen += 5
            gate.opened.set()
            assert saver.taken() == tmp_path / str(number) / "checkpoint-1"
            if number == 0:
                assert files(tmp_path / "0" / "checkpoint-1") == files(tmp_path / "at-once" / "checkpoint-1")
    assert files(tmp_path / "1" / "checkpoint-1")["weights.safetensors"] != (
        files(tmp_path / "0" / "checkpoint-1")["weights.safetensors"])


def test_without_the_copy_it_would_leak_so_the_comparison_can_fail(
    small: Any, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostMemory, "copied", lambda self, tensors: dict(tensors))
    with pytest.raises(AssertionError):
        test_what_is_trained_meanwhile_does_not_leak_into_the_file(small, tmp_path, gate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_saved_beside_training_leaves_the_files_of_one_saved_at_once(
    small: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    plain = {**BESIDE, "dropout": 0.3, "dtype": dtype, "max_steps": 5, "raises": True}
    small.run(tmp_path / "at-once", **{**plain, "save_async": False})
    small.run(tmp_path / "beside", **plain)
    for number in range(1, 6):
        one, other = (files(tmp_path / name / f"checkpoint-{number}") for name in ("at-once", "beside"))
        for name in ("weights.safetensors", "optimizer.safetensors", "random.safetensors"):
            assert one[name] == other[name], (number, name)


def test_a_run_saved_beside_training_and_stopped_goes_on_bit_for_bit(small: Any, tmp_path: Path) -> None:
    whole = small.run(tmp_path / "whole", raises=True, dropout=0.3)
    small.run(tmp_path / "parts", stop_after=6, dropout=0.3, **BESIDE)
    second = small.run(tmp_path / "parts", resume_from_checkpoint=True, raises=True, dropout=0.3, **BESIDE)
    assert second.reports[0].step == 6
    assert small.same(whole.weights(), second.weights()) and small.same(whole.moments(), second.moments())
    assert whole.row_ids[5:] == second.row_ids


def test_a_second_save_waits_for_the_first_and_the_end_for_the_last(small: Any, tmp_path: Path, gate: Gate) -> None:
    seen: list[list[str]] = []

    def look(report: Any) -> None:
        if report.step == 2:  # the save of step 1 goes on; that of step 2 is to wait for it
            assert gate.reached.wait(60)
            seen.append([path.name for path in atomic.checkpoints(tmp_path)])
            gate.opened.set()
        if report.step == 3:
            seen.append([path.name for path in atomic.checkpoints(tmp_path)][:1])

    ran = small.run(tmp_path, raises=True, max_steps=4, on_step=look, **BESIDE)
    assert seen == [[], ["checkpoint-1"]]
    assert [path.name for path in atomic.checkpoints(tmp_path)] == [f"checkpoint-{n}" for n in (1, 2, 3, 4)]
    assert ran.result.checkpoint == tmp_path / "checkpoint-4"


def fails_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    straight = atomic.Writer.file

    def full(self: Any, name: str, chunks: Any) -> None:
        if f"checkpoint-{number}." in str(self.folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        straight(self, name, chunks)

    monkeypatch.setattr(atomic.Writer, "file", full)


def test_a_save_that_fails_beside_training_stops_the_run_and_keeps_the_one_before(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_at(monkeypatch, 2)
    ran = small.run(tmp_path, save_total_limit=1, **BESIDE)
    assert isinstance(ran.error, TrainingStopped) and ran.error.exit_code == 1
    assert "a checkpoint needs" in str(ran.error) and "bytes free" in str(ran.error)
    assert ran.error.checkpoint == tmp_path / "checkpoint-1", "nothing is deleted before its successor is there"
    assert ran.reports[-1].step == 3, "it is told at the end of the step in which it happened, or of the next"
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_the_last_save_that_fails_is_told_at_the_end(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_at(monkeypatch, 4)
    ran = small.run(tmp_path, max_steps=4, **BESIDE)
    assert isinstance(ran.error, TrainingStopped) and ran.error.checkpoint == tmp_path / "checkpoint-3"


def test_a_fault_of_a_step_waits_for_the_save_and_tells_its_checkpoint(small: Any, tmp_path: Path, gate: Gate) -> None:
    def spoil(report: Any) -> None:
        if report.step == 1:
            with torch.no_grad():
                ran_model[0].scale.fill_(float("nan"))
        gate.opened.set()

    ran_model: list[Any] = []
    ran = small.run(tmp_path, before=ran_model.append, on_step=spoil, **{**BESIDE, "save_steps": 1})
    assert isinstance(ran.error, TrainingStopped) and ran.error.checkpoint == tmp_path / "checkpoint-1"
    assert atomic.faults(tmp_path / "checkpoint-1", contents=True) == []


def test_an_interrupt_waits_for_its_checkpoint(small: Any, tmp_path: Path) -> None:
    interrupts = Interrupts()
    ran = small.run(tmp_path, interrupts=interrupts, save_async=True,
                    on_step=lambda report: interrupts.request("SIGTERM") if report.step == 3 else None)
    assert isinstance(ran.error, Interrupted) and ran.error.checkpoint == tmp_path / "checkpoint-3"
    assert atomic.faults(ran.error.checkpoint, contents=True) == []


def test_another_end_of_a_run_finishes_the_save_that_was_begun(small: Any, tmp_path: Path) -> None:
    small.run(tmp_path, stop_after=3, **BESIDE)
    assert [path.name for path in atomic.checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2"]
    assert not [thread for thread in threading.enumerate() if thread.name == "halo-save"]


def test_old_checkpoints_are_deleted_and_the_best_is_kept_and_taken_at_the_end(small: Any, tmp_path: Path) -> None:
    common = {"save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "evaluation": small.rows(5, seed=8),
              "save_strategy": "steps", "load_best_model_at_end": True, "save_total_limit": 2, "raises": True,
              "greater_is_better": True}
    one = small.run(tmp_path / "at-once", **common)
    other = small.run(tmp_path / "beside", save_async=True, **common)
    assert one.result.best.step == other.result.best.step < 9
    names = sorted(path.name for path in (tmp_path / "beside").glob("checkpoint-*"))
    assert names == sorted(path.name for path in (tmp_path / "at-once").glob("checkpoint-*"))
    assert small.same(one.weights(), other.weights())
    best = find.find(str(other.result.best.checkpoint), tmp_path)
    assert best is not None
    model = small.model()
    resume.load_weights(best, model)
    assert small.same(other.weights(), dict(model.state_dict()))


def test_the_memory_that_copies_take_is_told_once(small: Any, tmp_path: Path) -> None:
    said: list[str] = []

    class Notes:
        def __getattr__(self, name: str) -> Any:
            return said.append if name == "noted" else lambda *arguments: None

    small.run(tmp_path, raises=True, max_steps=3, reporters=(Notes(),), **BESIDE)
    assert [text for text in said if "GiB in host memory" in text] == [
        "save_async keeps 0.000 GiB in host memory for each process's part of a checkpoint"]


def test_a_second_signal_while_a_save_is_awaited_leaves_its_memory(
    small: Any, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(HostMemory, "close", lambda self: closed.append(True))

    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Saver(beside=True, timeout=60.0) as saver:  # noqa: PT012
        saver.begin(capture(tmp_path, **common(*trained(small))), lambda path, group: None)
        going = saver._going
        assert going is not None and going.thread is not None
        thread = going.thread
        with monkeypatch.context() as patch:
            patch.setattr(thread, "join", interrupted)
            saver.taken()
    assert thread.is_alive() and not closed
    gate.opened.set()
    thread.join(60)


def test_a_written_checkpoint_is_kept_in_mind_where_what_follows_fails(small: Any, tmp_path: Path) -> None:
    def fails(path: Path, group: Any) -> None:
        raise OSError("busy")

    with Saver(beside=False, timeout=60.0) as saver:
        saver.begin(capture(tmp_path, **common(*trained(small))), fails)
        assert saver._going is not None
        assert saver._going.path == tmp_path / "checkpoint-1"
        with pytest.raises(OSError, match="busy"):
            saver.taken()
