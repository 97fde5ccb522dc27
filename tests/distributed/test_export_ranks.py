"""What several processes export is what one would, byte for byte; and it loads in any layout. Not for one process."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from halo_core import registry
from halo_core.checkpoint import export_files
from halo_core.checkpoint.atomic import SaveFailed
from halo_core.checkpoint.export import export, sharded_state
from halo_core.checkpoint.full_tensors import Gathered
from halo_core.checkpoint.pieces import local, piece_of
from halo_core.errors import Refused
from halo_core.models import sockets
from halo_core.models.tiny import write_tiny
from tests.distributed import ranks
from tests.distributed.sharded_models import ALONE, built, marked, value_of
from tests.unit.conftest import Sources

REGISTRY = registry.load()
ARCHITECTURES = {a.name: a for a in REGISTRY.architectures()}
MOE = sorted(name for name, architecture in ARCHITECTURES.items() if architecture.spec.is_moe)
EP4, EP2, BOTH, SHARDED, REPLICAS = (
    {"ep": 4}, {"ep": 2}, {"shard": 2, "ep": 2}, {"shard": 4}, {"replicate": 2, "ep": 2}
)  # fmt: skip


class Small:
    """Source folders of every MoE architecture, and what one process exports of the same weights; made once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def source(self, name: str) -> Path:
        folder = self.root / name / "source"
        if not folder.exists():
            write_tiny(ARCHITECTURES[name], folder)
        return folder

    def expected(self, name: str) -> Path:
        folder = self.root / name / "expected"
        if not folder.exists():
            architecture, source = ARCHITECTURES[name], self.source(name)
            export(marked(architecture, source, ALONE), architecture, source, folder)
        return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("small"))


def same_bytes(first: Path, second: Path) -> None:
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    assert [name for name in names if (first / name).read_bytes() != (second / name).read_bytes()] == []


def exported(name: str, source: Path, out: Path, sizes: Mapping[str, int], **options: Any) -> str:
    model = marked(ARCHITECTURES[name], source, sizes)
    return export(model, ARCHITECTURES[name], source, out, **options).note


CASES = [*((name, EP4) for name in MOE), *(("lfm2_moe", sizes) for sizes in (EP2, BOTH, SHARDED, REPLICAS)),
         ("gpt_oss", BOTH), ("lfm2", SHARDED)]  # fmt: skip


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=str)
def test_the_export_is_that_of_one_process_byte_for_byte(
    small: Small, tmp_path: Path, name: str, sizes: Mapping[str, int]
) -> None:
    world = 2 if sizes == EP2 else 4
    notes = ranks.run(world, exported, name, small.source(name), tmp_path, sizes)
    assert len(set(notes)) == 1
    same_bytes(small.expected(name), tmp_path)


def wholes(model: Any) -> dict[str, Tensor]:
    return {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in model.state_dict().items()}


def loaded(name: str, folder: Path, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    model, _ = built(ARCHITECTURES[name], folder, sizes)
    return {key: tensor.detach().clone() for key, tensor in wholes(model).items()}


def mark_experts(name: str, source: Path, out: Path) -> None:
    """Export at four processes a model whose expert e has the value e in all its tensors."""
    architecture = ARCHITECTURES[name]
    model, _ = built(architecture, source, EP4)
    for _, module in sockets.experts_modules(model, architecture):
        for parameter in module.parameters():
            own = local(parameter)
            first = piece_of(parameter).offset[0]
            for place in range(own.shape[0]):
                own[place] = float(first + place)
    export(model, architecture, source, out)


@pytest.mark.parametrize("name", MOE)
def test_expert_e_saved_by_four_is_expert_e_for_one_for_two_and_for_transformers(
    small: Small, tmp_path: Path, name: str
) -> None:
    ranks.run(4, mark_experts, name, small.source(name), tmp_path)
    alone = loaded(name, tmp_path, ALONE)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    found = [alone, *ranks.run(2, loaded, name, tmp_path, EP2), theirs]
    experts = [key for key in alone if ".experts." in key]
    assert len(experts) >= 4
    for state in found:
        for key in experts:
            for number in range(8):
                assert bool((state[key][number] == number).all()), (key, number)
        assert state.keys() == alone.keys()
        assert [key for key in alone if not torch.equal(state[key], alone[key])] == []


@pytest.mark.parametrize("form", ["wrapped_bf16", "wrapped"])
def test_a_multimodal_source_keeps_what_was_not_trained(tmp_path: Path, form: str) -> None:
    sources = Sources(tmp_path / "sources", REGISTRY)
    source = sources.folder("qwen3_5_moe", form)
    export(marked(ARCHITECTURES["qwen3_5_moe"], source, ALONE), ARCHITECTURES["qwen3_5_moe"], source,
           tmp_path / "alone", text_only=form == "wrapped")  # fmt: skip
    ranks.run(2, lambda: exported("qwen3_5_moe", source, tmp_path / "two", EP2, text_only=form == "wrapped"))
    same_bytes(tmp_path / "alone", tmp_path / "two")


def test_a_missing_expert_is_refused_by_its_name_on_every_process(small: Small, tmp_path: Path) -> None:
    shutil.copytree(small.expected("lfm2_moe"), tmp_path, dirs_exist_ok=True)
    state = load_file(tmp_path / "model.safetensors")
    removed = next(key for key in sorted(state) if ".experts.5." in key)
    del state[removed]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})

    def refused() -> str:
        with pytest.raises(Refused) as caught:
            built(ARCHITECTURES["lfm2_moe"], tmp_path, EP2)
        return str(caught.value)

    for said in ranks.run(2, refused):
        assert removed in said


def fails(source: Path, out: Path, file: str) -> tuple[str, list[str]]:
    """Export at two processes, where the first cannot write beyond the beginning of a file of this name."""
    model = marked(ARCHITECTURES["gemma4_moe"], source, EP2)
    if dist.get_rank() == 0:
        attempt = export_files._Writing.attempt
        written = [0]

        def fill_up(self: Any, pieces: Any) -> Exception | None:
            written[0] += self.path.name == file
            if written[0] == 3:
                return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return attempt(self, pieces)

        export_files._Writing.attempt = fill_up  # type: ignore[method-assign, assignment]
    with pytest.raises(SaveFailed) as caught:
        export(model, ARCHITECTURES["gemma4_moe"], source, out)
    dist.barrier()
    left = sorted(path.name for path in out.iterdir())
    dist.barrier()
    if dist.get_rank() == 0:
        export_files._Writing.attempt = attempt  # type: ignore[method-assign]
    export(model, ARCHITECTURES["gemma4_moe"], source, out)
    return caught.value.what, left


def test_a_writer_that_fails_in_the_middle_fails_all_and_leaves_nobody_waiting(tmp_path: Path) -> None:
    source = Sources(tmp_path / "sources", REGISTRY).folder("gemma4_moe", "sharded")
    _, file, *_ = sorted(path.name for path in source.glob("*.safetensors"))
    for said, left in ranks.run(2, fails, source, tmp_path / "out", file):
        assert said.startswith("on rank 0: the model could not be exported") and "No space left" in said
        assert left == []
    assert (tmp_path / "out" / "config.json").is_file()


def test_too_little_space_is_told_on_all_before_anything_travels(small: Small, tmp_path: Path) -> None:
    source = small.source("lfm2_moe")

    def refused() -> str:
        model = marked(ARCHITECTURES["lfm2_moe"], source, EP2)
        usage = shutil.disk_usage(tmp_path)
        if dist.get_rank() == 0:
            export_files.shutil.disk_usage = lambda path: usage._replace(free=12345)  # type: ignore[attr-defined]
        Gathered.get = None  # type: ignore[method-assign, assignment]
        with pytest.raises(SaveFailed) as caught:
            export(model, ARCHITECTURES["lfm2_moe"], source, tmp_path)
        return caught.value.what

    for said in ranks.run(2, refused):
        assert said.startswith("on rank 0: ") and "12345 bytes free" in said
    assert list(tmp_path.iterdir()) == []


def test_processes_with_other_sources_are_refused_before_anything_travels(small: Small, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(small.source("lfm2_moe"), other)
    state = load_file(other / "model.safetensors")
    save_file(state, other / "model.safetensors", metadata={"format": "pt", "another": "order"})

    def refused() -> str:
        source = small.source("lfm2_moe") if dist.get_rank() == 0 else other
        model = marked(ARCHITECTURES["lfm2_moe"], source, EP2)
        with pytest.raises(Refused) as caught:
            export(model, ARCHITECTURES["lfm2_moe"], source, tmp_path / "out")
        return str(caught.value)

    for said in ranks.run(2, refused):
        assert "the source's tensors" in said and "rank 1" in said
    assert not (tmp_path / "out").exists()


def gathered(source: Path) -> list[Any]:
    """Return per name: whether the whole is right (writer), or that nothing came (others)."""
    model = marked(ARCHITECTURES["lfm2_moe"], source, BOTH)
    full = Gathered(sharded_state(model))
    aliases = {name: next(n for n, p in model.named_parameters() if p is tensor)
               for name, tensor in model.named_parameters(remove_duplicate=False)}
    found = []
    for name in full.state:
        tensor = full.get(name)
        if dist.get_rank():
            found.append(tensor is None)
        else:
            value = value_of(aliases.get(name, name), tuple(full.state[name].shape), full.state[name].dtype)
            found.append(tensor is not None and torch.equal(tensor, value))
    return found


def test_whole_tensors_come_together_on_the_writer_alone(small: Small) -> None:
    for found in ranks.run(4, gathered, small.source("lfm2_moe")):
        assert len(found) > 40 and all(found)


def test_groups_are_let_go_once_written(small: Small, tmp_path: Path) -> None:
    source = small.source("qwen3_moe")
    most = 0

    class Watched(export_files.SourceTensors):
        def done(self, stored: Any) -> None:
            nonlocal most
            most = max(most, len(self.held))
            super().done(stored)
            assert self.converted.keys() <= self.held.keys()

    def exports() -> int:
        from halo_core.checkpoint import export as exporting

        exporting.SourceTensors = Watched  # type: ignore[misc]
        exported("qwen3_moe", source, tmp_path, EP2)
        return most

    # A layer's two expert tensors are stored expert by expert, so both are needed at a time; nothing else is.
    assert ranks.run(2, exports) == [2, 2]
