"""Saving beside training on several processes: a group of its own, a failure that all hear of, kills in between."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halo_core import process_group, registry
from halo_core.checkpoint import atomic, find, resume
from halo_core.checkpoint.atomic import SaveFailed
from halo_core.checkpoint.find_together import find_together
from halo_core.checkpoint.identity import Identity
from halo_core.checkpoint.pieces import local
from halo_core.checkpoint.save import capture, stored_weights
from halo_core.checkpoint.saver import Saver
from halo_core.models.tiny import write_tiny
from tests.distributed import ranks
from tests.distributed.sharded_models import built, fill, marked, marked_optimizer, moments, wrong

MOE = {a.name: a for a in registry.load().architectures()}["lfm2_moe"]
EP2, BOTH = {"ep": 2}, {"shard": 2, "ep": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    write_tiny(MOE, folder)
    return folder


def captured(model: Any, optimizer: Any, folder: Path, step: int) -> Any:
    identity = Identity(config={}, plan={}, data={}, environment={})
    return capture(folder, step=step, model=model, optimizer=optimizer, progress={}, identity=identity)


def nothing_after(path: Path, group: Any) -> None:
    pass


def beside_other_collectives(source: Path, sizes: Mapping[str, int], folder: Path) -> tuple[list[str], list[float]]:
    model = marked(MOE, source, sizes)
    optimizer = marked_optimizer(model)
    going_on = threading.Event()
    straight = atomic.Writer.file

    def late(self: Any, name: str, chunks: Any) -> None:
        assert going_on.wait(60)
        straight(self, name, chunks)

    if dist.get_rank() == 1:
        atomic.Writer.file = late  # type: ignore[method-assign]
    sums = []
    with Saver(beside=True, timeout=60.0) as saver:
        for step in (1, 2):
            going_on.clear()
            saver.begin(captured(model, optimizer, folder, step), nothing_after)
            for tensor in stored_weights(model).values():
                local(tensor).zero_()
            for number in range(20):  # as a step would, while the others' threads wait for this one's
                value = torch.tensor(float(number + dist.get_rank()))
                dist.all_reduce(value)
                sums.append(float(value))
            assert not process_group.any_rank(saver.has_ended()), "one process has not written yet"
            going_on.set()
            assert saver.taken() == folder / f"checkpoint-{step}"
            for name, tensor in stored_weights(model).items():
                fill(name, tensor)
    found = find_together(True, folder)
    assert found is not None and found.step == 2
    model, _ = built(MOE, source, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    resume.load_weights(found, model)
    resume.load_optimizer(found, model, optimizer)
    return wrong({**stored_weights(model), **moments(model, optimizer)}), sums


@pytest.mark.parametrize("sizes", [EP2, BOTH], ids=str)
def test_writing_and_training_communicate_side_by_side_and_the_file_holds_the_captured_values(
    source: Path, tmp_path: Path, sizes: Mapping[str, int]
) -> None:
    world = 2 * sizes.get("shard", 1)
    for faults, sums in ranks.run(world, beside_other_collectives, source, sizes, tmp_path):
        assert faults == []
        assert sums == [world * number + world * (world - 1) / 2 for number in range(20)] * 2


def fails_on_one(source: Path, folder: Path) -> tuple[str, int]:
    model = marked(MOE, source, EP2)
    optimizer = marked_optimizer(model)
    with Saver(beside=True, timeout=60.0) as saver:
        saver.begin(captured(model, optimizer, folder, 1), nothing_after)
        saver.taken()
        straight = atomic.Writer.file
        if dist.get_rank() == 1:

            def full(self: Any, name: str, chunks: Any) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            atomic.Writer.file = full  # type: ignore[method-assign]
        saver.begin(captured(model, optimizer, folder, 2), nothing_after)
        boundaries = 0
        while not process_group.any_rank(saver.has_ended()):
            boundaries += 1
        with pytest.raises(SaveFailed) as caught:
            saver.taken()
        atomic.Writer.file = straight  # type: ignore[method-assign]
        saver.begin(captured(model, optimizer, folder, 3), nothing_after)
        saver.taken()
    return caught.value.what, boundaries


def test_a_failure_on_one_process_is_raised_on_all_at_the_same_boundary(source: Path, tmp_path: Path) -> None:
    (said, boundaries), other = ranks.run(2, fails_on_one, source, tmp_path)
    assert said.startswith("on rank 1: a checkpoint needs ") and "bytes free" in said
    assert other == (said, boundaries)
    assert [path.name for path in atomic.checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-3"]


def dies_at(source: Path, folder: Path, victim: int, name: str) -> None:
    import sys

    model = marked(MOE, source, EP2)
    optimizer = marked_optimizer(model)
    with Saver(beside=True, timeout=60.0) as saver:
        saver.begin(captured(model, optimizer, folder, 1), nothing_after)
        saver.taken()
        if dist.get_rank() == victim:

            def heard(event: str, arguments: tuple[object, ...]) -> None:
                if event in ("open", "os.rename") and str(arguments[0]).endswith(name):
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(heard)
        saver.begin(captured(model, optimizer, folder, 2), nothing_after)
        saver.taken()


@pytest.mark.parametrize(
    ("victim", "name"),
    [(1, "optimizer-rank-1-of-2.safetensors"), (0, "complete.json"), (0, "checkpoint-2.partial")],
)
def test_a_process_killed_while_its_thread_saves_leaves_the_checkpoint_before(
    source: Path, tmp_path: Path, victim: int, name: str
) -> None:
    with pytest.raises(ranks.RankFailed):
        ranks.run(2, dies_at, source, tmp_path, victim, name)
    assert not (tmp_path / "checkpoint-2").exists()
    atomic.clean(tmp_path)
    found = find.find(True, tmp_path)
    assert found is not None and found.step == 1 and not found.skipped
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
