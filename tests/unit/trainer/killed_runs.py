"""Run by a test in a process of its own: trains in forked children, kills them while they save, resumes, compares.

Not a test by itself. Forking after one import of torch keeps a trial short. Three kinds of kill: a save at each of its
file operations in turn, saves at moments drawn uniformly over their measured duration, at once and beside training, and
whole runs at random moments. Random delays are seeded.
usage: killed_runs.py FOLDER
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from halo_core.checkpoint import atomic, find, resume, rotation
from halo_core.checkpoint.save import capture
from halo_core.checkpoint.saver import Saver

SAVES = 50
"""Killed saves of each kind, at the least."""
CUT = SAVES // 5
"""How many of them have to be cut in two. A machine that grows busier after the measurement hits fewer: then more saves
are killed, up to `MOST_SAVES`."""
MOST_SAVES = 5 * SAVES
MEASURED = 5
"""Saves whose median is the duration."""
RANDOM_RUNS = 2
MOST_KILLS = 4
"""Kills of one run after which it may end."""


EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "shutil.copyfile")


def conftest() -> Any:
    spec = importlib.util.spec_from_file_location("small_runs", Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["small_runs"] = module
    spec.loader.exec_module(module)
    return module


SMALL = conftest()
RUN: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "dropout": 0.3}


def train(folder: Path, limit: int | None) -> None:
    """Run as a person would: go on from a checkpoint where there is one, otherwise begin again in an empty folder."""
    atomic.clean(folder)
    going_on = True if atomic.checkpoints(folder) else None
    if going_on is None:
        shutil.rmtree(folder, ignore_errors=True)
    ran = SMALL.run_small(folder, raises=True, resume_from_checkpoint=going_on, save_total_limit=limit, **RUN)
    torch.save({"weights": ran.weights(), "moments": ran.moments(), "metrics": ran.metric_rows()}, folder / "end.pt")


def warm_up() -> None:
    """Import what torch imports at the first step, once. No backward: a forked child would wait for its threads."""
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.zeros(2)
    torch.optim.AdamW([weight]).step()


def forked(act: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except BaseException as error:
            print(f"child failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    return child


def outcome(child: int) -> int:
    """Return 0 for a child that ended well, 9 for a killed one; anything else ends this process."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return 9
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0, f"a resumed child failed: {status}"
    return 0


def die_at(operation: int) -> None:
    """Make this process kill itself just before its n-th file operation (from 1) on a checkpoint's files.

    Python's audit events see every opening, making, renaming and deleting whatever function asks for it; a flush to
    disk has no event and is counted by itself.
    """
    done = [0]
    flush = os.fsync

    def count() -> None:
        done[0] += 1
        if done[0] == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    def heard(event: str, arguments: tuple[object, ...]) -> None:
        if event in EVENTS and "checkpoint-" in str(arguments[0]):
            count()

    def flushed(handle: int) -> None:
        count()
        flush(handle)

    os.fsync = flushed  # type: ignore[assignment]
    sys.addaudithook(heard)


def same(folder: Path, reference: dict[str, Any]) -> None:
    end = torch.load(folder / "end.pt", weights_only=True)
    assert SMALL.same(end["weights"], reference["weights"]), f"{folder}: weights differ"
    assert SMALL.same(end["moments"], reference["moments"]), f"{folder}: moments differ"
    assert end["metrics"] == reference["metrics"], f"{folder}: metrics differ"
    left = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert left == ["checkpoint-3", "checkpoint-4"], left


def fresh(folder: Path, whole: Path) -> Callable[[], Path]:
    """Return a function that gives back `folder` with checkpoints 1 and 2 of the whole run in it."""

    def prepare() -> Path:
        shutil.rmtree(folder / "checkpoint-3", ignore_errors=True)
        for step in (1, 2):
            if not (folder / f"checkpoint-{step}").exists():
                shutil.copytree(whole / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        return folder

    return prepare


def saver(whole: Path, *, beside: bool = False) -> Callable[[Path], None]:
    """Return a function that saves checkpoint-3 of the whole run into a folder, as the loop does, without training."""
    checkpoint = find.find(str(whole / "checkpoint-3"), whole)
    assert checkpoint is not None
    model = SMALL.SmallModel(RUN["dropout"])
    optimizer = torch.optim.AdamW(model.parameters())
    resume.load_weights(checkpoint, model)
    resume.load_optimizer(checkpoint, model, optimizer)

    def save_into(folder: Path) -> None:
        resume.load_random(checkpoint)  # here, because Python seeds its generator anew in a forked child

        def rotate(newest: Path, group: object) -> None:
            rotation.rotate(folder, limit=2, keep=[newest])

        captured = capture(folder, step=3, model=model, optimizer=optimizer, progress=checkpoint.progress,
                           identity=checkpoint.identity)
        with Saver(beside=beside, timeout=60.0) as saver:
            saver.begin(captured, rotate)
            saver.taken()

    return save_into


def begun(act: Callable[[], None]) -> tuple[int, int]:
    """Return a child that is just about to `act`, and a pipe that its end closes."""
    told, tell = os.pipe()
    child = forked(lambda: (os.write(tell, b"!"), act()))  # type: ignore[arg-type, return-value]
    os.close(tell)
    assert os.read(told, 1) == b"!"
    return child, told


def killed_uniformly(save_into: Callable[[Path], None], prepare: Callable[[], Path], whole: Path,
                     draw: random.Random) -> tuple[float, int, list[int]]:
    """Kill saves at instants drawn over their duration; return it, how many were cut in two, and what was newest."""
    durations = []
    for _ in range(MEASURED):
        folder = prepare()
        child, pipe = begun(lambda folder=folder: save_into(folder))  # type: ignore[misc]
        began = time.monotonic()
        assert os.read(pipe, 1) == b""
        durations.append(time.monotonic() - began)
        os.close(pipe)
        assert outcome(child) == 0 and newest_is_whole(folder, whole, (3,)) == 3
    duration = sorted(durations)[MEASURED // 2]
    cut = 0
    newest: list[int] = []
    while len(newest) < SAVES or (cut < CUT and len(newest) < MOST_SAVES):
        folder = prepare()
        child, pipe = begun(lambda folder=folder: save_into(folder))  # type: ignore[misc]
        time.sleep(draw.uniform(0.0, duration))
        os.kill(child, signal.SIGKILL)
        outcome(child)
        os.close(pipe)
        cut += any(path.suffix == atomic.PARTIAL for path in folder.iterdir())
        newest.append(newest_is_whole(folder, whole, (2, 3)))
    return duration, cut, newest


def newest_is_whole(folder: Path, whole: Path, steps: tuple[int, ...]) -> int:
    """Check that what a resume would take is a checkpoint of the whole run, byte for byte; return its step."""
    atomic.clean(folder)
    found = find.find(True, folder)
    assert found is not None and found.step in steps and not found.skipped, found
    for path in found.path.iterdir():
        assert path.read_bytes() == (whole / found.path.name / path.name).read_bytes(), path
    assert [path for path in folder.iterdir() if atomic.step_of(path) is None] == [], list(folder.iterdir())
    return found.step


def main(root: Path) -> None:
    warm_up()
    whole = root / "whole"
    began = time.monotonic()
    assert outcome(forked(lambda: train(whole, limit=None))) == 0
    duration = time.monotonic() - began
    reference = torch.load(whole / "end.pt", weights_only=True)
    save_into = saver(whole)

    def prepared(name: str) -> Path:
        folder = root / name
        for step in (1, 2):
            shutil.copytree(whole / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        return folder

    steps: list[int] = []
    while True:
        operation = len(steps) + 1
        folder = prepared(f"counted-{operation}")

        def doomed(folder: Path = folder, operation: int = operation) -> None:
            die_at(operation)
            save_into(folder)

        ended = outcome(forked(doomed))
        steps.append(newest_is_whole(folder, whole, (2, 3)))
        if ended == 0:
            break
    assert len(steps) > 20 and steps[0] == 2 and steps[-1] == 3 and steps == sorted(steps), steps

    draw = random.Random(5)
    said = []
    for beside in (False, True):
        prepare = fresh(root / f"uniform-{beside}", whole)
        duration, cut, newest = killed_uniformly(saver(whole, beside=beside), prepare, whole, draw)
        assert cut >= CUT, f"only {cut} of {len(newest)} kills hit a save in its middle"
        kind = "beside training" if beside else "at once"
        said.append(f"{len(newest)} saves {kind} over {1000 * duration:.1f} ms each, "
                    f"{cut} cut in two, {newest.count(3)} published")

    kills = 0
    for trial in range(RANDOM_RUNS):
        folder = root / f"run-{trial}"
        for _ in range(MOST_KILLS):
            child = forked(lambda folder=folder: train(folder, limit=2))  # type: ignore[misc]
            time.sleep(draw.uniform(0.3, 1.0) * duration)
            os.kill(child, signal.SIGKILL)
            if outcome(child) == 0:
                break
            kills += 1
        else:
            assert outcome(forked(lambda folder=folder: train(folder, limit=2))) == 0  # type: ignore[misc]
        same(folder, reference)
    print(f"killed a save at {len(steps) - 1} operations; {'; '.join(said)}; runs at {kills} moments: all equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
