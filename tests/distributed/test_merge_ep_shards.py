"""Parts of a model, written by the processes that hold them, put together: the export that there would have been."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from halo_core import model_config, registry
from halo_core.checkpoint import atomic, find
from halo_core.checkpoint.ep_shards import export_parts
from halo_core.checkpoint.export import export
from halo_core.checkpoint.merge import merge
from halo_core.checkpoint.shards_folder import FOLDER, MANIFEST
from halo_core.cli import main, sample
from halo_core.errors import Refused
from halo_core.models import source as model_source
from halo_core.models.safetensors_files import metadata_of, read_file
from halo_core.models.tiny import write_tiny
from tests.distributed import ranks
from tests.distributed.sharded_models import ALONE, degrees, marked
from tests.unit.conftest import Sources

REGISTRY = registry.load()
ARCHITECTURES = {a.name: a for a in REGISTRY.architectures()}
NAME = "lfm2_moe"
EP4, EP2, BOTH = {"ep": 4}, {"ep": 2}, {"shard": 2, "ep": 2}


def parts(name: str, source: Path, out: Path, sizes: Mapping[str, int], **options: Any) -> str:
    """Write the parts of a marked model, and return the note."""
    model = marked(ARCHITECTURES[name], source, sizes)
    return export_parts(model, ARCHITECTURES[name], source, out, plan="0123", degrees=vars(degrees(sizes)), step=7,
                        **options).note  # fmt: skip


def machine(root: Path) -> Path:
    return root / f"machine-{dist.get_rank() // 2}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    write_tiny(ARCHITECTURES[NAME], folder)
    return folder


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("expected")
    export(marked(ARCHITECTURES[NAME], source, ALONE), ARCHITECTURES[NAME], source, folder)
    return folder


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output_dir of a run at EP 4."""
    folder = tmp_path_factory.mktemp("written")
    ranks.run(4, parts, NAME, source, folder, EP4)
    return folder


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    """Return a copy of the parts that a test may damage."""
    return shutil.copytree(written / FOLDER, tmp_path / "parts")


def same_bytes(first: Path, second: Path) -> None:
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    assert [name for name in names if (first / name).read_bytes() != (second / name).read_bytes()] == []


def refused(folder: Path, out: Path) -> str:
    with pytest.raises(Refused) as caught:
        merge(folder, out, REGISTRY)
    assert not (out / "config.json").exists()
    return str(caught.value)


def test_parts_hold_every_element_once_and_are_no_model(written: Path, expected: Path) -> None:
    assert [path.name for path in written.iterdir()] == [FOLDER]
    folder = written / FOLDER
    files = sorted(folder.glob("tensors*.safetensors"))
    assert [path.name for path in files] == [f"tensors-rank-{rank}-of-4.safetensors" for rank in range(4)]
    elements = sum(tensor.numel() for path in files for tensor in load_file(path).values())
    assert elements == sum(tensor.numel() for tensor in load_file(expected / "model.safetensors").values())
    assert not list(written.rglob("model*.safetensors.index.json")) and not (folder / "config.json").exists()
    manifest = json.loads((folder / MANIFEST).read_text())
    assert (manifest["architecture"], manifest["plan"], manifest["step"], manifest["world"]) == (NAME, "0123", 7, 4)
    assert manifest["degrees"] == {"replicate": 1, "shard": 1, "cp": 1, "ep": 4, "etp": 1}
    own = json.loads(metadata_of(read_file(files[2]).head)["DCP_SHARDING_INFO"])
    experts = {tuple(place["saved_offsets"]) for name, place in own.items() if ".experts." in name}
    assert experts == {(4, 0, 0)}, "process 2 of 4 holds experts 4 and 5 of 8"


def test_merged_parts_are_the_gathered_export_without_source_or_run(
    source: Path, expected: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(source, tmp_path / "source")
    note = ranks.run(4, parts, NAME, own, tmp_path / "out", BOTH)[3]
    assert "halo run merge-ep-shards" in note and "no model yet" in note
    shutil.rmtree(own)
    (tmp_path / "out").rename(tmp_path / "moved")
    assert main.exit_code(["run", "merge-ep-shards", str(tmp_path / "moved"), str(tmp_path / "model")]) == 0
    same_bytes(expected, tmp_path / "model")


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "gemma4_moe"])
def test_every_layout_of_experts_in_a_source_is_merged(tmp_path: Path, name: str) -> None:
    architecture, folder = ARCHITECTURES[name], tmp_path / "source"
    write_tiny(architecture, folder)
    export(marked(architecture, folder, ALONE), architecture, folder, tmp_path / "expected")
    ranks.run(2, parts, name, folder, tmp_path / "out", EP2)
    merge(tmp_path / "out" / FOLDER, tmp_path / "model", REGISTRY)
    same_bytes(tmp_path / "expected", tmp_path / "model")


@pytest.mark.parametrize("text_only", [False, True])
def test_what_was_not_trained_is_kept_or_left_out_as_asked(tmp_path: Path, text_only: bool) -> None:
    name = "qwen3_5_moe"
    folder = Sources(tmp_path / "sources", REGISTRY).folder(name, "wrapped_bf16")
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "chat_template.jinja").write_text("another")
    options = {"text_only": text_only, "tokenizer_folder": tokenizer}
    export(marked(ARCHITECTURES[name], folder, ALONE), ARCHITECTURES[name], folder, tmp_path / "expected", **options)
    ranks.run(2, lambda: parts(name, folder, tmp_path / "out", EP2, **options))
    copies = tmp_path / "out" / FOLDER / "untrained.safetensors"
    assert (copies.stat().st_size > 1000) == (not text_only)
    shutil.rmtree(folder)
    merge(tmp_path / "out", tmp_path / "model", REGISTRY)
    same_bytes(tmp_path / "expected", tmp_path / "model")


def test_one_process_may_write_parts_too(source: Path, expected: Path, tmp_path: Path) -> None:
    parts(NAME, source, tmp_path / "out", ALONE)
    merge(tmp_path / "out", tmp_path / "model", REGISTRY)
    same_bytes(expected, tmp_path / "model")


def test_missing_and_damaged_files_are_named(copied: Path, tmp_path: Path) -> None:
    (copied / "tensors-rank-2-of-4.safetensors").unlink()
    damaged = copied / "tensors-rank-1-of-4.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    (copied / "companions" / "config.json").unlink()
    said = refused(copied, tmp_path / "model")
    for text in ("tensors-rank-2-of-4.safetensors is missing", f"{damaged.name} is damaged",
                 "companions/config.json is missing"):
        assert text in said
    (copied / atomic.MARKER).unlink()
    assert "complete.json is missing" in refused(copied, tmp_path / "model")


def edited(folder: Path, file: str, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / file
    metadata, tensors = metadata_of(read_file(path).head), load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=metadata)
    marker = json.loads((folder / atomic.MARKER).read_text())
    marker["files"][file] = {"bytes": path.stat().st_size, "crc32": atomic._checksum(path)}
    (folder / atomic.MARKER).write_text(json.dumps(marker))


def test_a_removed_expert_tensor_is_named(copied: Path, tmp_path: Path) -> None:
    file = "tensors-rank-3-of-4.safetensors"
    name = next(name for name in load_file(copied / file) if ".experts." in name)
    edited(copied, file, lambda tensors: tensors.pop(name))
    assert f"{name} is not there in full" in refused(copied, tmp_path / "model")


def test_a_foreign_tensor_is_named(copied: Path, tmp_path: Path) -> None:
    file = "tensors-rank-0-of-4.safetensors"
    edited(copied, file, lambda tensors: tensors.update(stranger=tensors["model.embedding_norm.weight"].clone()))
    assert "stranger is of another shape, or no tensor of lfm2_moe" in refused(copied, tmp_path / "model")


def test_parts_of_several_machines_are_merged_once_they_lie_together(
    source: Path, expected: Path, tmp_path: Path
) -> None:
    ranks.run(4, lambda: parts(NAME, source, machine(tmp_path), EP4))
    said = refused(tmp_path / "machine-0", tmp_path / "model")
    assert "tensors-rank-2-of-4.safetensors is missing: another machine of the run wrote it" in said
    assert "tensors-rank-3-of-4.safetensors" in said and "rank-1-of-4" not in said
    assert "companions/config.json" in refused(tmp_path / "machine-1" / FOLDER, tmp_path / "model")
    for number in (0, 1):
        shutil.copytree(tmp_path / f"machine-{number}" / FOLDER, tmp_path / "together", dirs_exist_ok=True)
    merge(tmp_path / "together", tmp_path / "model", REGISTRY)
    same_bytes(expected, tmp_path / "model")


def test_other_folders_are_refused_for_what_they_are(
    source: Path, written: Path, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, empty = tmp_path / "model", tmp_path / "empty"
    empty.mkdir()
    assert "it holds a model already" in refused(source, out)
    assert "it has no ep-shards.json, so it holds no parts of a model" in refused(empty, out)
    assert "it does not exist" in refused(tmp_path / "nowhere", out)
    (tmp_path / "file").write_text("")
    assert "it exists and is not an empty folder" in refused(written, tmp_path / "file")
    assert "it exists and is not an empty folder" in refused(written, written)
    manifest = json.loads((copied / MANIFEST).read_text())
    (copied / MANIFEST).write_text(json.dumps({**manifest, "format": 9}))
    assert "it has format 9, and this version reads format 2" in refused(copied, out)
    assert main.exit_code(["run", "merge-ep-shards", str(empty), str(out)]) == 2
    assert "halo: refused" in capsys.readouterr().err


def test_a_family_that_is_not_installed_is_told(copied: Path, tmp_path: Path) -> None:
    manifest = json.loads((copied / MANIFEST).read_text())
    text = json.dumps({**manifest, "architecture": "stranger", "family": "strange"}).encode()
    (copied / MANIFEST).write_bytes(text)
    marker = json.loads((copied / atomic.MARKER).read_text())
    marker["files"][MANIFEST] = {"bytes": len(text), "crc32": atomic._checksum(copied / MANIFEST)}
    (copied / atomic.MARKER).write_text(json.dumps(marker))
    assert "it holds a stranger of family strange, which no installed plugin has" in refused(copied, tmp_path / "model")


def test_nothing_that_loads_a_model_or_a_checkpoint_takes_parts_for_one(written: Path) -> None:
    for folder in (written, written / FOLDER):
        problem = model_config.read(str(folder), None, REGISTRY, may_use_bundled=False)
        assert isinstance(problem, model_config.Problem)
        assert problem.remedy == f"halo run merge-ep-shards {written / FOLDER} OUT, then give OUT"
        with pytest.raises(Refused, match="holds the parts of a model"):
            model_source.check_folder(folder)
        with pytest.raises(Refused, match="holds the parts of a model"):
            sample.run(folder, "hello", 1)
    with pytest.raises(Refused, match="holds the parts of a finished model, no resume point"):
        find.find(str(written / FOLDER), written)


def test_parts_take_the_place_of_an_older_model_and_of_older_parts(
    source: Path, expected: Path, tmp_path: Path
) -> None:
    shutil.copytree(expected, tmp_path / "out")
    (tmp_path / "out" / "metrics.jsonl").write_text("this run")
    (tmp_path / "out" / FOLDER).mkdir()
    (tmp_path / "out" / FOLDER / "old").write_text("")
    ranks.run(2, parts, NAME, source, tmp_path / "out", EP2)
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"metrics.jsonl", FOLDER} <= left and not left & {"config.json", "model.safetensors"}
    assert not (tmp_path / "out" / FOLDER / "old").exists()


def test_a_killed_writing_of_parts_is_cleaned_up(tmp_path: Path) -> None:
    (tmp_path / f"{FOLDER}.partial").mkdir()
    (tmp_path / f"{FOLDER}.replaced").mkdir()
    atomic.clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER]
