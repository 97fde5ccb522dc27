"""Checkpoints where machines share a folder, and where each has its own: who writes what, and what can be resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halo_core import registry
from halo_core.checkpoint import agreement, atomic, resume, rotation
from halo_core.checkpoint.agreement import PeerFailed, agreed, once_per_folder, sharing
from halo_core.checkpoint.atomic import SaveFailed
from halo_core.checkpoint.find_together import find_together
from halo_core.checkpoint.identity import Identity
from halo_core.checkpoint.save import save, stored_weights
from halo_core.errors import Problem, Refused
from halo_core.models.tiny import write_tiny
from tests.distributed import ranks
from tests.distributed.sharded_models import built, marked, marked_optimizer, moments, wrong

MOE = {a.name: a for a in registry.load().architectures()}["lfm2_moe"]
REPLICAS, EP4, BOTH = {"replicate": 2, "ep": 2}, {"ep": 4}, {"shard": 2, "ep": 2}


def machine(root: Path) -> Path:
    """Return the output_dir of this process's machine: two processes on each."""
    return root / f"machine-{dist.get_rank() // 2}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    write_tiny(MOE, folder)
    return folder


def write(source: Path, sizes: Mapping[str, int], output_dir: Path, *steps: int) -> None:
    model = marked(MOE, source, sizes)
    optimizer = marked_optimizer(model)
    identity = Identity(config={}, plan={}, data={}, environment={})
    for step in steps:
        save(output_dir, step=step, model=model, optimizer=optimizer, progress={}, identity=identity)


def read(source: Path, sizes: Mapping[str, int], output_dir: Path) -> tuple[list[str], int]:
    model, _ = built(MOE, source, sizes)
    checkpoint = find_together(True, output_dir)
    assert checkpoint is not None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    resume.load_weights(checkpoint, model)
    resume.load_optimizer(checkpoint, model, optimizer)
    return wrong({**stored_weights(model), **moments(model, optimizer)}), checkpoint.step


def who_shares(root: Path) -> tuple[tuple[int, ...], bool, tuple[int, ...], bool]:
    own, all_of_them = sharing(machine(root)), sharing(root)
    return own.ranks, own.leads, all_of_them.ranks, all_of_them.leads


def test_processes_find_out_who_sees_the_same_folder(tmp_path: Path) -> None:
    assert ranks.run(4, who_shares, tmp_path) == [
        ((0, 1), True, (0, 1, 2, 3), True), ((0, 1), False, (0, 1, 2, 3), False),
        ((2, 3), True, (0, 1, 2, 3), False), ((2, 3), False, (0, 1, 2, 3), False)]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["machine-0", "machine-1"]


def test_what_is_done_once_per_folder_is_done_by_one_and_known_to_all_who_see_it(tmp_path: Path) -> None:
    def acts() -> int:
        return once_per_folder(machine(tmp_path), dist.get_rank)

    assert ranks.run(4, acts) == [0, 0, 2, 2]


def separate(source: Path, sizes: Mapping[str, int], root: Path) -> Any:
    write(source, sizes, machine(root), 1)
    return read(source, sizes, machine(root))


@pytest.mark.parametrize("sizes", [REPLICAS, EP4, BOTH], ids=str)
def test_machines_with_folders_of_their_own_resume_at_the_same_layout(
    source: Path, tmp_path: Path, sizes: Mapping[str, int]
) -> None:
    assert ranks.run(4, separate, source, sizes, tmp_path) == [([], 1)] * 4
    for number in (0, 1):
        folder = tmp_path / f"machine-{number}" / "checkpoint-1"
        own = {f"{stem}-rank-{rank}-of-4.safetensors" for stem in ("weights", "optimizer", "random")
               for rank in (2 * number, 2 * number + 1)}
        assert {path.name for path in folder.iterdir()} == own | {"complete.json", "state.json"}
        assert set(atomic.elsewhere(folder)) == {
            name.replace(f"rank-{rank}-", f"rank-{(rank + 2) % 4}-") for rank in range(4) for name in own
            if f"rank-{rank}-" in name}


def refused(source: Path, sizes: Mapping[str, int], output_dir: Path) -> str:
    with pytest.raises(Refused) as caught:
        read(source, sizes, output_dir)
    return str(caught.value)


def test_folders_of_their_own_are_refused_at_another_layout_until_they_are_brought_together(
    source: Path, tmp_path: Path
) -> None:
    ranks.run(4, lambda: write(source, EP4, machine(tmp_path), 1))
    for said in ranks.run(4, lambda: refused(source, BOTH, machine(tmp_path))):
        assert "this machine's folder lacks parts of" in said and "of another machine" in said
        assert "copy all machines' files into one folder" in said
    for said in ranks.run(2, refused, source, {"ep": 2}, tmp_path / "machine-1"):
        assert "they lie in" in said and "of-4.safetensors of another machine" in said
    together = tmp_path / "together"
    for number in (1, 0):
        shutil.copytree(tmp_path / f"machine-{number}", together, dirs_exist_ok=True)
    assert ranks.run(2, read, source, {"ep": 2}, together) == [([], 1)] * 2


def cut_off(source: Path, root: Path) -> tuple[Any, list[str]]:
    """Save twice; machine 1 then lost the second one, as if it was killed before it could rename its folder."""
    write(source, REPLICAS, machine(root), 1, 2)
    dist.barrier()
    if dist.get_rank() == 2:
        (machine(root) / "checkpoint-2").rename(machine(root) / "checkpoint-2.partial")
    dist.barrier()
    outcome = read(source, REPLICAS, machine(root))
    checkpoint = find_together(True, machine(root))
    assert checkpoint is not None
    return outcome, list(checkpoint.skipped)


def test_the_newest_step_that_every_machine_has_is_taken(source: Path, tmp_path: Path) -> None:
    said = ["checkpoint-2 is passed over: it does not exist on ranks 2-3"]
    assert ranks.run(4, cut_off, source, tmp_path) == [(([], 1), said)] * 4


def test_a_damaged_file_is_found_whoever_reads_it_and_its_checkpoint_passed_over(source: Path, tmp_path: Path) -> None:
    ranks.run(2, write, source, {"ep": 2}, tmp_path, 1, 2)
    for path in sorted((tmp_path / "checkpoint-2").glob("*.safetensors")):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

        def found() -> tuple[int, str]:
            checkpoint = find_together(True, tmp_path)
            assert checkpoint is not None
            return checkpoint.step, checkpoint.skipped[0]

        for step, skipped in ranks.run(2, found):
            assert step == 1 and f"{path.name} is damaged" in skipped
        data[-1] ^= 1
        path.write_bytes(data)


def test_checkpoints_of_two_runs_are_no_checkpoint_of_one(source: Path, tmp_path: Path) -> None:
    ranks.run(4, lambda: write(source, REPLICAS, machine(tmp_path), 1))
    folder = tmp_path / "machine-1" / "checkpoint-1"
    marker = json.loads((folder / atomic.MARKER).read_text())
    random = folder / "random-rank-3-of-4.safetensors"
    random.write_bytes(random.read_bytes()[:-1] + b"!")
    marker["files"][random.name] = {"bytes": random.stat().st_size, "crc32": atomic._checksum(random)}
    (folder / atomic.MARKER).write_text(json.dumps(marker))
    for said in ranks.run(4, lambda: refused(source, REPLICAS, machine(tmp_path))):
        assert "ranks 2-3 see another checkpoint-1 than rank 0" in said


def test_a_named_checkpoint_that_one_machine_lacks_is_refused_with_its_ranks(source: Path, tmp_path: Path) -> None:
    ranks.run(4, lambda: write(source, REPLICAS, machine(tmp_path), 1))
    shutil.rmtree(tmp_path / "machine-0" / "checkpoint-1")

    def named() -> str:
        with pytest.raises(Refused) as caught:
            find_together(str(machine(tmp_path) / "checkpoint-1"), machine(tmp_path))
        return str(caught.value)

    for said in ranks.run(4, named):
        assert "it does not exist" in said and "ranks 0-1" in said


def test_a_folder_of_checkpoints_that_is_empty_on_one_machine_is_told_as_such(source: Path, tmp_path: Path) -> None:
    ranks.run(4, lambda: write(source, REPLICAS, machine(tmp_path), 1))
    shutil.rmtree(tmp_path / "machine-1" / "checkpoint-1")

    def of_the_folder() -> str:
        with pytest.raises(Refused) as caught:
            find_together(str(machine(tmp_path)), tmp_path / "elsewhere")
        return str(caught.value)

    for said in ranks.run(4, of_the_folder):
        assert "checkpoint-1 is passed over: it does not exist on ranks 2-3" in said


def test_nothing_asked_and_nothing_there(tmp_path: Path) -> None:
    def asks() -> tuple[bool, str]:
        nothing = find_together(None, tmp_path) is None and find_together(False, tmp_path) is None
        with pytest.raises(Refused) as caught:
            find_together(True, tmp_path)
        return nothing, str(caught.value)

    for nothing, said in ranks.run(2, asks):
        assert nothing and f"no complete checkpoint-<step> folder lies in {tmp_path}" in said


def test_one_process_that_fails_fails_all_each_in_its_way() -> None:
    def fails(error: Exception) -> str:
        def act() -> None:
            if dist.get_rank() == 1:
                raise error

        with pytest.raises(Exception) as caught:
            agreed(act)
        return f"{type(caught.value).__name__}: {caught.value}"

    problem = Problem(key="output_dir", value="x", why="no", remedy="yes")
    said = ranks.run(2, fails, SaveFailed(what="the disk is gone", remedy="get one"))
    assert said == ["SaveFailed: on rank 1: the disk is gone"] * 2
    said = ranks.run(2, fails, Refused(problem))
    assert said[0] == said[1] and said[0].startswith("Refused: rank 1: output_dir: x")
    assert ranks.run(2, fails, KeyError("lost")) == [
        "PeerFailed: rank 1 failed: KeyError: 'lost'", "KeyError: 'lost'"]
    assert issubclass(PeerFailed, RuntimeError)


def test_old_checkpoints_are_rotated_once_per_folder(source: Path, tmp_path: Path) -> None:
    def rotates() -> list[str]:
        output_dir = machine(tmp_path)
        write(source, REPLICAS, output_dir, 1, 2, 3)
        newest = output_dir / "checkpoint-3"
        once_per_folder(output_dir, lambda: rotation.rotate(output_dir, limit=2, keep=[newest]))
        return [path.name for path in atomic.checkpoints(output_dir)]

    assert ranks.run(4, rotates) == [["checkpoint-2", "checkpoint-3"]] * 4


def test_a_folder_that_one_machine_cannot_make_stops_all(tmp_path: Path) -> None:
    (tmp_path / "machine-1").write_text("a file")

    def shares() -> str:
        with pytest.raises(SaveFailed) as caught:
            sharing(machine(tmp_path))
        return caught.value.what

    for said in ranks.run(4, shares):
        assert said.startswith("on rank 2: ") and "could not be written" in said
    assert not list((tmp_path / "machine-0").glob(f"{agreement.TOKEN}*"))
