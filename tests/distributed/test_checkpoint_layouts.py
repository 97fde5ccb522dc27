"""A checkpoint of several processes: each element once, read back in any layout, and nothing half-written.

Not for what a resumed run then computes: see `test_checkpoint_resume.py`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from halo_core import registry
from halo_core.checkpoint import atomic, find, randomness, resume
from halo_core.checkpoint.atomic import SaveFailed
from halo_core.checkpoint.find_together import find_together
from halo_core.checkpoint.identity import Identity
from halo_core.checkpoint.save import save, stored_weights
from halo_core.errors import Refused
from halo_core.models.safetensors_files import metadata_of, read_file
from halo_core.models.tiny import write_tiny
from tests.distributed import ranks
from tests.distributed.sharded_models import ALONE, built, marked, marked_optimizer, moments, wrong

ARCHITECTURES = {a.name: a for a in registry.load().architectures()}
MOE = ARCHITECTURES["lfm2_moe"]
EP4, EP2, BOTH, SHARDED, REPLICAS = (
    {"ep": 4}, {"ep": 2}, {"shard": 2, "ep": 2}, {"shard": 4}, {"replicate": 2, "ep": 2}
)  # fmt: skip


def size(sizes: Mapping[str, int]) -> int:
    product = 1
    for degree in sizes.values():
        product *= degree
    return product


def everywhere(sizes: Mapping[str, int], function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run on as many processes as the sizes ask for; one is this process itself."""
    return [function(*arguments)] if size(sizes) == 1 else ranks.run(size(sizes), function, *arguments)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    write_tiny(MOE, folder)
    return folder


def identity() -> Identity:
    return Identity(config={"seed": 3}, plan={}, data={}, environment={})


def write(source: Path, sizes: Mapping[str, int], output_dir: Path, step: int = 1) -> None:
    model = marked(MOE, source, sizes)
    optimizer = marked_optimizer(model)
    save(output_dir, step=step, model=model, optimizer=optimizer, progress={"best": None}, identity=identity())


def read(source: Path, sizes: Mapping[str, int], output_dir: Path) -> tuple[list[str], int, list[float]]:
    """Return names read wrongly, the number of tensors read, and each parameter's step."""
    model, _ = built(MOE, source, sizes)
    checkpoint = find_together(True, output_dir)
    assert checkpoint is not None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    resume.load_weights(checkpoint, model)
    resume.load_optimizer(checkpoint, model, optimizer)
    tensors = {**stored_weights(model), **moments(model, optimizer)}
    return wrong(tensors), len(tensors), sorted({float(state["step"]) for state in optimizer.state.values()})


@pytest.fixture(scope="module")
def at_ep4(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ep4")
    ranks.run(4, write, source, EP4, folder)
    return folder


@pytest.mark.parametrize("sizes", [ALONE, EP2, EP4, BOTH, SHARDED, REPLICAS], ids=str)
def test_weights_and_moments_of_ep_4_are_exact_in_every_layout(
    source: Path, at_ep4: Path, sizes: Mapping[str, int]
) -> None:
    for faults, count, steps in everywhere(sizes, read, source, sizes, at_ep4):
        assert faults == []
        assert count > 60 and steps == [1.0]


@pytest.mark.parametrize("sizes", [ALONE, BOTH, REPLICAS], ids=str)
def test_every_element_is_written_once_and_read_by_one_process_and_by_two(
    source: Path, tmp_path: Path, sizes: Mapping[str, int]
) -> None:
    everywhere(sizes, write, source, sizes, tmp_path)
    model, _ = built(MOE, source, ALONE)
    expected = sum(tensor.numel() for tensor in stored_weights(model).values())
    folder = tmp_path / "checkpoint-1"
    files = list(folder.glob("weights*.safetensors"))
    assert len(files) == size(sizes)
    assert sum(tensor.numel() for path in files for tensor in load_file(path).values()) == expected
    assert read(source, ALONE, tmp_path)[0] == []
    assert [faults for faults, *_ in ranks.run(2, read, source, EP2, tmp_path)] == [[], []]


def test_one_process_writes_plain_files_without_a_note_of_parts(source: Path, tmp_path: Path) -> None:
    write(source, ALONE, tmp_path)
    folder = tmp_path / "checkpoint-1"
    assert sorted(path.name for path in folder.iterdir()) == [
        "complete.json", "optimizer.safetensors", "random.safetensors", "state.json", "weights.safetensors"]
    assert metadata_of(read_file(folder / "weights.safetensors").head) == {"format": "pt"}


def test_a_value_in_another_place_is_seen(source: Path, at_ep4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from halo_core.checkpoint import stored

    straight = stored.overlap
    monkeypatch.setattr(stored, "overlap", lambda a, b: straight(a, b) if a.offset[:1] != (2,) else None)
    monkeypatch.setattr(stored.Stored, "holds", lambda self, wanted: True)
    assert any("experts" in name for name in read(source, ALONE, at_ep4)[0])


def saved_again(source: Path, first: Path, second: Path) -> tuple[bool, list[float]]:
    """Save, draw, load, draw again, save: return whether the draws agree, and this process's draws."""
    model = marked(MOE, source, BOTH)
    optimizer = marked_optimizer(model)
    randomness.seed_all(10 + dist.get_rank())
    save(first, step=1, model=model, optimizer=optimizer, progress={}, identity=identity())
    drawn = torch.rand(3)
    checkpoint = find_together(str(first / "checkpoint-1"), first)
    assert checkpoint is not None
    model, _ = built(MOE, source, BOTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    resume.load_weights(checkpoint, model)
    resume.load_optimizer(checkpoint, model, optimizer)
    resume.load_random(checkpoint)
    save(second, step=1, model=model, optimizer=optimizer, progress={}, identity=identity())
    return torch.equal(torch.rand(3), drawn), drawn.tolist()


def test_at_the_same_layout_every_byte_and_each_process_own_random_state_come_back(
    source: Path, tmp_path: Path
) -> None:
    results = ranks.run(4, saved_again, source, tmp_path / "first", tmp_path / "second")
    assert [same for same, _ in results] == [True] * 4
    assert len({tuple(drawn) for _, drawn in results}) == 4
    names = sorted(path.name for path in (tmp_path / "first" / "checkpoint-1").iterdir())
    assert len(names) == 3 * 4 + 2
    for name in names:
        first, second = (tmp_path / part / "checkpoint-1" / name for part in ("first", "second"))
        assert first.read_bytes() == second.read_bytes(), name


def random_elsewhere(at: Path) -> tuple[float, float]:
    checkpoint = find_together(True, at)
    assert checkpoint is not None
    resume.load_random(checkpoint)
    first = float(torch.rand(()))
    resume.load_random(checkpoint)
    return first, float(torch.rand(()))


def test_another_number_of_processes_begins_random_numbers_anew_and_the_same_each_time(at_ep4: Path) -> None:
    results = ranks.run(2, random_elsewhere, at_ep4)
    assert all(first == again for first, again in results)
    assert results[0] != results[1]


def saves_with_a_fault(source: Path, folder: Path) -> tuple[str, list[str]]:
    model = marked(MOE, source, EP4)
    optimizer = marked_optimizer(model)

    def try_to(step: int) -> str:
        try:
            save(folder, step=step, model=model, optimizer=optimizer, progress={}, identity=identity())
        except SaveFailed as fault:
            return fault.what
        return ""

    assert try_to(1) == ""
    flush = os.fsync
    if dist.get_rank() == 2:

        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.fsync = full
    said = try_to(2)
    os.fsync = flush
    dist.barrier()
    left = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    assert try_to(3) == ""
    return said, left


def test_a_full_disk_on_one_process_is_told_on_all_and_keeps_what_was_there(source: Path, tmp_path: Path) -> None:
    for said, left in ranks.run(4, saves_with_a_fault, source, tmp_path):
        assert said.startswith("on rank 2: a checkpoint needs ") and "bytes free" in said
        assert left == ["checkpoint-1"]
    assert [path.name for path in atomic.checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-3"]


def without_space(source: Path, folder: Path) -> str:
    model = marked(MOE, source, EP2)
    optimizer = marked_optimizer(model)
    usage = shutil.disk_usage(folder)
    if dist.get_rank() == 0:
        atomic.shutil.disk_usage = lambda path: usage._replace(free=1234)  # type: ignore[attr-defined]
    with pytest.raises(SaveFailed) as caught:
        save(folder, step=1, model=model, optimizer=optimizer, progress={}, identity=identity())
    return caught.value.what


def test_too_little_space_is_found_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    said = ranks.run(2, without_space, source, tmp_path)
    model, _ = built(MOE, source, ALONE)
    elements = sum(parameter.numel() for parameter in model.parameters())
    needed = int(said[0].split("needs ")[1].split()[0])
    assert said[0] == said[1] and "1234 bytes free" in said[0]
    assert 3 * 4 * elements < needed < 3 * 4 * elements + (2 << 20)
    assert list(tmp_path.iterdir()) == []


def dies_at(source: Path, folder: Path, victim: int, name: str) -> None:
    """Save once; in the second save `victim` is killed where it opens or renames something of this name."""
    model = marked(MOE, source, EP4)
    optimizer = marked_optimizer(model)
    save(folder, step=1, model=model, optimizer=optimizer, progress={}, identity=identity())
    dist.barrier()
    if dist.get_rank() == victim:
        import sys

        def heard(event: str, arguments: tuple[object, ...]) -> None:
            if event in ("open", "os.rename") and str(arguments[0]).endswith(name):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(heard)
    save(folder, step=2, model=model, optimizer=optimizer, progress={}, identity=identity())


@pytest.mark.parametrize(
    ("victim", "name"),
    [(2, "optimizer-rank-2-of-4.safetensors"), (0, "complete.json"), (0, "checkpoint-2.partial")],
)
def test_a_process_killed_while_saving_leaves_the_checkpoint_before(
    source: Path, tmp_path: Path, victim: int, name: str
) -> None:
    with pytest.raises(ranks.RankFailed):
        ranks.run(4, dies_at, source, tmp_path, victim, name)
    assert (tmp_path / "checkpoint-2.partial").is_dir()
    atomic.clean(tmp_path)
    found = find.find(True, tmp_path)
    assert found is not None and found.step == 1 and not found.skipped
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def refused(source: Path, sizes: Mapping[str, int], output_dir: Path) -> str:
    with pytest.raises(Refused) as caught:
        read(source, sizes, output_dir)
    return str(caught.value)


def edited(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a file, and its checksum in the marker."""
    path = folder / name
    metadata = metadata_of(read_file(path).head)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=metadata)
    marker = json.loads((folder / atomic.MARKER).read_text())
    marker["files"][name] = {"bytes": path.stat().st_size, "crc32": atomic._checksum(path)}
    (folder / atomic.MARKER).write_text(json.dumps(marker))


def test_a_part_that_is_missing_is_refused_by_its_name_on_every_process(
    source: Path, at_ep4: Path, tmp_path: Path
) -> None:
    shutil.copytree(at_ep4, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "checkpoint-1"
    name = next(name for name in load_file(folder / "weights-rank-2-of-4.safetensors") if "experts" in name)
    edited(folder, "weights-rank-2-of-4.safetensors", lambda tensors: tensors.pop(name))
    moment = next(name for name in load_file(folder / "optimizer-rank-0-of-4.safetensors") if "exp_avg_sq" in name)
    for sizes in (ALONE, EP2):
        for said in everywhere(sizes, refused, source, sizes, tmp_path):
            assert f"parts of {name} are in none of its files" in said
    edited(folder, "optimizer-rank-0-of-4.safetensors", lambda tensors: tensors.pop(moment))
    shutil.copy(at_ep4 / "checkpoint-1" / "weights-rank-2-of-4.safetensors", folder)
    shutil.copy(at_ep4 / "checkpoint-1" / atomic.MARKER, folder)
    edited(folder, "optimizer-rank-0-of-4.safetensors", lambda tensors: None)
    assert f"parts of {moment} are in none of its files" in refused(source, ALONE, tmp_path)


def test_a_file_that_is_missing_or_damaged_is_refused_by_its_name(source: Path, at_ep4: Path, tmp_path: Path) -> None:
    shutil.copytree(at_ep4, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoint-1" / "optimizer-rank-3-of-4.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for said in ranks.run(2, refused, source, EP2, tmp_path):
        assert f"{path.name} is damaged" in said
    path.unlink()
    for said in ranks.run(2, refused, source, EP2, tmp_path):
        assert f"{path.name} is missing" in said


def resumed_warm(source: Path, sizes: Mapping[str, int], output_dir: Path) -> tuple[list[str], list[str], list[str]]:
    """Return weights read wrongly, parameters without a state, those with a wrong one, and what is told."""
    model, _ = built(MOE, source, sizes)
    checkpoint = find_together(True, output_dir, warm=True)
    assert checkpoint is not None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    resume.load_weights(checkpoint, model)
    notes = resume.load_optimizer(checkpoint, model, optimizer, warm=True)
    without = sorted(name for name, parameter in model.named_parameters() if not optimizer.state.get(parameter))
    return wrong({**stored_weights(model), **moments(model, optimizer)}), without, list(notes)


@pytest.mark.parametrize("sizes", [ALONE, EP2, EP4], ids=str)
def test_a_deleted_optimizer_shard_is_gone_without_alike_on_every_process_where_allowed(
    source: Path, at_ep4: Path, tmp_path: Path, sizes: Mapping[str, int]
) -> None:
    shutil.copytree(at_ep4, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoint-1" / "optimizer-rank-1-of-4.safetensors"
    lost = sorted({key.partition("/")[2] for key in load_file(path)})
    path.unlink()
    assert len(lost) > 10
    for said in everywhere(sizes, refused, source, sizes, tmp_path):
        assert "optimizer-rank-1-of-4.safetensors is missing" in said
    results = everywhere(sizes, resumed_warm, source, sizes, tmp_path)
    for faults, without, notes in results:
        assert faults == [] and (without, notes) == results[0][1:]
        assert without == lost
        assert notes[0] == "optimizer-rank-1-of-4.safetensors is missing: allow_warm_restart goes on without it"
        assert notes[1].startswith(f"the moments of {len(without)} of ") and without[0] in notes[1]


@pytest.mark.parametrize("sizes", [ALONE, EP2], ids=str)
def test_a_deleted_shard_of_weights_is_never_gone_without(
    source: Path, at_ep4: Path, tmp_path: Path, sizes: Mapping[str, int]
) -> None:
    shutil.copytree(at_ep4, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint-1" / "weights-rank-1-of-4.safetensors").unlink()

    def named() -> str:
        with pytest.raises(Refused) as caught:
            find_together(str(tmp_path / "checkpoint-1"), tmp_path, warm=True)
        return str(caught.value)

    for said in everywhere(sizes, named):
        assert "weights-rank-1-of-4.safetensors is missing" in said and "allow_warm_restart" not in said


def test_a_file_of_another_step_in_the_place_of_one_is_damage(source: Path, tmp_path: Path) -> None:
    def twice() -> None:
        model = marked(MOE, source, EP2)
        optimizer = marked_optimizer(model)
        for step in (1, 2):
            save(tmp_path, step=step, model=model, optimizer=optimizer, progress={}, identity=identity())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)

    ranks.run(2, twice)
    name = "weights-rank-1-of-2.safetensors"
    shutil.copy(tmp_path / "checkpoint-1" / name, tmp_path / "checkpoint-2" / name)
    found = find.find(True, tmp_path)
    assert found is not None and found.step == 1
    assert found.skipped == (f"checkpoint-2 is passed over: {name} is damaged: its checksum is another one",)
