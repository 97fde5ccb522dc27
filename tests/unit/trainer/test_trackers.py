"""Trackers: TensorBoard for real, the others by stand-in modules with the calls their packages have."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from halo_core.trainer import trackers


def open_for(names: tuple[str, ...], folder: Path, said: list[str], logging_steps: int = 1, **targets: str) -> Any:
    return trackers.open_trackers(names, targets, run_name="my run", config={"seed": 1}, folder=folder,
                                  logging_steps=logging_steps, say=said.append)


def test_tensorboard_event_file_holds_the_losses(small: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ran = small.run(tmp_path, raises=True, evaluation=small.rows(2, seed=3), eval_strategy="epoch",
                    reporters=tuple(open_for(("tensorboard",), tmp_path, [])))
    events = EventAccumulator(str(tmp_path / "runs")).Reload()
    expected = {"train/loss", "train/grad_norm", "train/learning_rate", "train/epoch", "eval/loss"}
    assert expected <= set(events.Tags()["scalars"])
    written = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert [step for step, _ in written] == list(range(1, 10))
    assert [value for _, value in written] == pytest.approx([report.loss for report in ran.reports], rel=1e-6)
    assert [event.step for event in events.Scalars("eval/loss")] == [3, 6, 9]


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, calls: list[Any]) -> None:
    module = ModuleType(name)
    module.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]

    def log(values: Any, step: int) -> None:
        calls.append(("log", step, values))

    def finish() -> None:
        calls.append(("finish",))

    def init(**given: Any) -> Any:
        calls.append(("init", given))
        return SimpleNamespace(log=log, finish=finish)

    module.init, module.log, module.finish = init, log, finish  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_run_is_started_logged_and_finished(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    calls: list[Any] = []
    stand_in(monkeypatch, name, calls)
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
    assert trackers.check((name,), {}) == ()
    ran = small.run(tmp_path, raises=True, reporters=tuple(open_for((name,), tmp_path, [], logging_steps=4)))
    assert calls[0][1]["project"] == "mine" and calls[0][1]["name"] == "my run" and calls[0][1]["config"] == {"seed": 1}
    logged = [(call[1], call[2]["train/loss"]) for call in calls if call[0] == "log"]
    losses = [report.loss for report in ran.reports]
    assert logged == [(4, sum(losses[:4]) / 4), (8, sum(losses[4:8]) / 4), (9, losses[8])]
    assert calls[-1] == ("finish",)


def test_missing_package_is_refused_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    problems = trackers.check(("tensorboard", "wandb", "trackio", "comet"), {})
    assert [problem.remedy.split(",")[0] for problem in problems[:3]] == [
        f"pip install 'halo-moe[{name}]'" for name in ("tensorboard", "wandb", "trackio")]
    assert "use one of none, tensorboard, wandb, trackio" in problems[3].remedy
    assert trackers.check((), {}) == ()


OPENED: list[Any] = []


class Recorder:
    """A plugin's tracker, that fails."""

    def __init__(self, name: str, config: Any, folder: Path, step: int) -> None:
        OPENED.append((name, dict(config), folder, step))

    def log(self, values: Any, step: int) -> None:
        raise OSError("no route to host")

    def finish(self) -> None:
        raise AssertionError("a tracker that failed is left out")


def test_plugins_tracker_is_found_and_its_failure_is_told_once_and_ends_nothing(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("some_package")
    module.Recorder = Recorder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_package", module)
    said: list[str] = []
    targets = {"recorder": "some_package:Recorder"}
    assert trackers.check(("recorder",), targets) == ()
    plain = small.run(tmp_path / "plain", raises=True)
    ran = small.run(tmp_path / "run", raises=True, reporters=tuple(open_for(("recorder",), tmp_path, said, **targets)))
    assert [("my run", {"seed": 1}, tmp_path, 0)] == OPENED
    assert said == ["the tracker recorder failed and is left out from now on: OSError: no route to host"]
    assert small.same(plain.weights(), ran.weights())
