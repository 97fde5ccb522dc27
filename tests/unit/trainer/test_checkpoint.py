"""How checkpoint folders are written, told complete, rotated and cleaned. Not for what a resume gives."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from halo_core.checkpoint import atomic, randomness, rotation, tensors
from halo_core.trainer.stopped import TrainingStopped

EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}


def write(folder: Path, text: bytes = b"data") -> Path:
    with atomic.publishing(folder, needed=len(text)) as writer:
        writer.file("part", [text[:2], text[2:]])
    return folder


def test_safetensors_reads_every_dtype_and_shape_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    given = {
        "matrix": torch.randn(3, 5), "transposed": torch.randn(4, 6).T, "scalar": torch.tensor(2.5),
        "narrow": torch.randn(7).bfloat16(), "half": torch.randn(3).half(), "double": torch.randn(2).double(),
        "flags": torch.tensor([True, False]), "bytes": torch.arange(5, dtype=torch.uint8),
        "long": torch.tensor([1 << 40]), "int": torch.tensor([-3], dtype=torch.int32), "none": torch.zeros(0, 4),
    }
    path = tmp_path / "file.safetensors"
    path.write_bytes(b"".join(tensors.chunks(given)))
    assert path.stat().st_size > tensors.num_bytes(given)
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == given.keys()
        for name, tensor in given.items():
            read = file.get_tensor(name)
            assert read.dtype == tensor.dtype and read.shape == tensor.shape and torch.equal(read, tensor)


def test_file_without_tensors_is_valid(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"".join(tensors.chunks({})))
    with safe_open(tmp_path / "empty", framework="pt") as file:
        assert list(file.keys()) == []


def test_published_folder_is_complete_and_nothing_else_is_left(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint-3")
    assert atomic.faults(folder, contents=True) == []
    assert (folder / "part").read_bytes() == b"data"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint-3")
    def interrupted() -> Any:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), atomic.publishing(folder, needed=1) as writer:
        writer.file("part", interrupted())
    assert (folder / "part").read_bytes() == b"data"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_writing_over_a_checkpoint_replaces_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint-3")
    write(folder, b"newer")
    assert (folder / "part").read_bytes() == b"newer" and [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_incomplete_folders_are_told_by_what_is_wrong(tmp_path: Path) -> None:
    assert atomic.faults(tmp_path / "checkpoint-1", contents=False) == ["it does not exist"]
    folder = write(tmp_path / "checkpoint-3")
    (folder / "part").write_bytes(b"dat")
    assert atomic.faults(folder, contents=False) == ["part has 3 bytes instead of 4"]
    (folder / "part").write_bytes(b"dbta")
    assert atomic.faults(folder, contents=False) == []
    assert atomic.faults(folder, contents=True) == ["part is damaged: its checksum is another one"]
    (folder / "part").unlink()
    assert atomic.faults(folder, contents=False) == ["part is missing"]
    (folder / atomic.MARKER).write_text("{")
    assert atomic.faults(folder, contents=False) == ["complete.json cannot be read"]
    (folder / atomic.MARKER).unlink()
    assert "never finished" in atomic.faults(folder, contents=False)[0]


def test_checkpoints_are_ordered_by_step_as_a_number_and_foreign_names_are_left_out(tmp_path: Path) -> None:
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-9.partial", "checkpoint-x", "other"):
        write(tmp_path / name)
    (tmp_path / "checkpoint-11").mkdir()
    assert [path.name for path in atomic.checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]


def test_cleaning_removes_partials_and_puts_a_replaced_checkpoint_back(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-1.partial")
    write(tmp_path / "checkpoint-2.replaced")
    write(tmp_path / "checkpoint-3")
    write(tmp_path / "checkpoint-3.replaced", b"older")
    write(tmp_path / "checkpoint-4.set-aside")
    atomic.clean(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["checkpoint-2", "checkpoint-3", "checkpoint-4.set-aside"]
    assert (tmp_path / "checkpoint-3" / "part").read_bytes() == b"data"


def test_too_little_space_names_needed_and_free_bytes_and_keeps_the_last_checkpoint(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)

    def fill_up(report: Any) -> None:
        if report.step == 2:
            monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: usage._replace(free=1234))

    ran = small.run(tmp_path, on_step=fill_up, **EVERY_STEP)
    assert isinstance(ran.error, TrainingStopped) and ran.error.exit_code == 1
    text = str(ran.error)
    assert "stopped at step 2" in text and "1234 bytes free" in text and "a checkpoint needs" in text
    assert f"the last complete checkpoint is {tmp_path / 'checkpoint-1'}" in text
    assert [path.name for path in atomic.checkpoints(tmp_path)] == ["checkpoint-1"]
    assert not list(tmp_path.glob("*.partial"))


def test_disk_that_fills_up_in_the_middle_of_a_file_is_told_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "checkpoint-1")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(atomic.SaveFailed, match=r"a checkpoint needs 1048580 bytes and .* has \d+ bytes free"):
        write(tmp_path / "checkpoint-2")
    monkeypatch.undo()
    assert atomic.checkpoints(tmp_path) == [folder] and not list(tmp_path.glob("*.partial"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return the folder of a real file system of 1,300 KiB, where this process may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1300k", "tmpfs", str(folder)], capture_output=True,
                             check=False)
    if mounted.returncode != 0:
        pytest.skip("file systems can be mounted by root only; other tests make the disk only look full")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("beside", [False, True])
def test_full_disk_names_needed_and_free_bytes_and_every_earlier_checkpoint_resumes(
    small: Any, disk: Path, beside: bool
) -> None:
    run = disk / "run"
    ran = small.run(run, save_async=beside, num_train_epochs=30.0, **EVERY_STEP)
    assert isinstance(ran.error, TrainingStopped)
    needed, free = map(int, re.findall(r"needs (\d+) bytes and .* has (\d+) bytes free", str(ran.error))[0])
    assert free < needed < free + 100_000
    kept = atomic.checkpoints(run)
    assert len(kept) >= 1 and ran.error.checkpoint == kept[-1] and not list(run.glob("*.partial"))
    assert all(atomic.faults(path, contents=True) == [] for path in kept)
    shutil.rmtree(kept[0])
    again = small.run(run, resume_from_checkpoint=str(kept[-1]), max_steps=ran.reports[-1].step + 1, raises=True,
                      save_strategy="no", num_train_epochs=30.0)
    assert again.result.step == ran.reports[-1].step + 1


def test_disk_that_is_full_only_once_files_are_written_keeps_what_was_there(disk: Path) -> None:
    folder = write(disk / "checkpoint-1")
    pieces = (b"x" * 100_000 for _ in range(20))
    with pytest.raises(atomic.SaveFailed, match=r"a checkpoint needs \d+ bytes and .* has \d+ bytes free") as caught:
        with atomic.publishing(disk / "checkpoint-2", needed=1) as writer:
            writer.file("part", pieces)
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOSPC
    assert atomic.checkpoints(disk) == [folder] and not list(disk.glob("*.partial"))
    assert shutil.disk_usage(disk).free > 1_000_000


def test_folder_that_cannot_be_written_is_a_save_failure_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(atomic.SaveFailed, match="could not be written"):
        write(tmp_path / "file" / "checkpoint-2")


def test_rotation_keeps_the_newest_and_what_it_must(tmp_path: Path) -> None:
    folders = [write(tmp_path / f"checkpoint-{step}") for step in (8, 9, 10, 11)]
    assert rotation.rotate(tmp_path, limit=None, keep=[]) == []
    assert rotation.rotate(tmp_path, limit=2, keep=[folders[0], folders[3]]) == folders[1:3]
    assert atomic.checkpoints(tmp_path) == [folders[0], folders[3]]
    assert rotation.rotate(tmp_path, limit=1, keep=[folders[0], folders[3]]) == []


def test_random_state_of_every_generator_comes_back(tmp_path: Path) -> None:
    import random

    import numpy as np

    def draw() -> tuple[float, float, float, float]:
        return random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))

    randomness.seed_all(4)
    np.random.randn()  # leaves one cached value behind, which is part of the state
    states, rest = randomness.captured()
    rest = json.loads(json.dumps(rest))
    first = draw()
    assert draw() != first
    randomness.put_back(states, rest)
    assert draw() == first


def test_seeding_reaches_every_generator() -> None:
    import random

    import numpy as np

    draws = []
    for seed in (5, 5, 6):
        randomness.seed_all(seed)
        draws.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert draws[0] == draws[1]
    assert all(one != other for one, other in zip(draws[1], draws[2], strict=True))


def test_checkpoint_holds_no_pickle(small: Any, tmp_path: Path) -> None:
    small.run(tmp_path, raises=True, max_steps=1, **EVERY_STEP)
    names = sorted(path.name for path in (tmp_path / "checkpoint-1").iterdir())
    assert names == ["complete.json", "optimizer.safetensors", "random.safetensors", "state.json",
                     "weights.safetensors"]


def test_an_old_checkpoint_that_cannot_be_deleted_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*given: object, **named: object) -> None:
        raise OSError(16, "Device or resource busy")

    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "state.json").write_text("{}")
    old, new = (tmp_path / f"checkpoint-{step}" for step in (1, 2))
    monkeypatch.setattr(atomic, "checkpoints", lambda folder: [old, new])
    monkeypatch.setattr(os, "rmdir", refuses)
    assert rotation.rotate(tmp_path, limit=1, keep=[new]) == [old]
    assert not old.exists() and new.is_dir()
