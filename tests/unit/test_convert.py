"""A folder written again in bf16 against what transformers makes of the wide one that it loads in bf16."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from halo_core.checkpoint import convert, export_files
from halo_core.checkpoint.atomic import SaveFailed
from halo_core.checkpoint.convert import convert_to_bf16
from halo_core.cli.main import explain
from halo_core.errors import Refused
from halo_core.models.safetensors_files import read_file

TEXT = [
    *((name, "plain") for name in ("gpt_oss", "qwen3_moe", "qwen3_5_moe", "gemma4_moe", "lfm2_moe", "lfm2")),
    ("lfm2_moe", "fused"), ("qwen3_5_moe", "sharded"),
]
WRAPPED = [("qwen3_5_moe", "wrapped"), ("gemma4_moe", "wrapped")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def order(folder: Path) -> dict[str, list[str]]:
    return {path.name: [tensor.key for tensor in read_file(path).tensors]
            for path in sorted(folder.glob("*.safetensors"))}


def refused(folder: Path, out: Path, registry: Any) -> str:
    with pytest.raises(Refused) as caught:
        convert_to_bf16(folder, out, registry)
    return str(caught.value)


@pytest.mark.parametrize(("name", "form"), [*TEXT, *WRAPPED])
def test_the_new_folder_is_the_model_that_transformers_loads_in_bf16(
    name: str, form: str, sources: Any, tmp_path: Path
) -> None:
    folder, out = sources.folder(name, form), tmp_path / "out"
    written = convert_to_bf16(folder, out, sources.registry)
    loads = AutoModelForImageTextToText if form == "wrapped" else AutoModelForCausalLM
    theirs = loads.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    ours = loads.from_pretrained(out, dtype="auto").state_dict()
    assert theirs.keys() == ours.keys()
    for key, tensor in theirs.items():
        assert tensor.dtype == ours[key].dtype and torch.equal(tensor, ours[key]), key
    assert order(folder) == order(out)
    before, after = weights(folder), weights(out)
    for key, tensor in before.items():
        assert torch.equal(after[key].float(), tensor.float() if key in written.kept else tensor.bfloat16().float())
        assert after[key].dtype == (tensor.dtype if key in written.kept else torch.bfloat16)
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == json.loads(
        (folder / "config.json").read_text())["architectures"]
    assert "float32" not in json.dumps(config)
    for companion in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (out / companion).read_bytes() == (folder / companion).read_bytes()
    index = folder / "model.safetensors.index.json"
    assert index.is_file() == (out / index.name).is_file()
    if index.is_file():
        listed = json.loads((out / index.name).read_text())
        assert listed["weight_map"] == json.loads(index.read_text())["weight_map"]
        assert listed["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in after.values())
    assert written.num_cast + len(written.kept) == len(before) and written.bytes_after < written.bytes_before


def test_what_the_model_keeps_in_fp32_is_kept_and_named(sources: Any, tmp_path: Path) -> None:
    written = convert_to_bf16(sources.folder("lfm2_moe"), tmp_path / "out", sources.registry)
    assert written.kept and all(name.endswith("expert_bias") for name in written.kept)
    assert f"{len(written.kept)} tensors that the model computes with in fp32 stay as they are" in written.note
    assert convert_to_bf16(sources.folder("qwen3_moe"), tmp_path / "other", sources.registry).kept == ()


def test_a_bias_cast_all_the_same_is_seen_so_the_comparison_can_fail(
    sources: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "kept_wide", lambda *arguments: frozenset())
    folder = sources.folder("lfm2_moe")
    convert_to_bf16(folder, tmp_path / "out", sources.registry)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert [key for key in theirs if not torch.equal(theirs[key], ours[key])]


def test_rounding_is_to_the_nearest_even(sources: Any, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(sources.folder("lfm2"), folder)
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if name.endswith("norm.weight"))
    # Halfway between two bf16 numbers, to either side, and just beside halfway.
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 1 + 2**-8 - 2**-20])
    state[name] = values.repeat(state[name].numel() // 4 + 1)[: state[name].numel()].clone()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    convert_to_bf16(folder, tmp_path / "out", sources.registry)
    assert weights(tmp_path / "out")[name][:4].tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, 1.0]


def test_other_folders_are_refused_with_the_way_out(sources: Any, tmp_path: Path) -> None:
    registry, good, out = sources.registry, sources.folder("lfm2"), tmp_path / "out"
    assert "there is no such folder" in refused(tmp_path / "nowhere", out, registry)
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "complete.json").write_text("{}")
    assert "it is a point to resume from" in refused(tmp_path / "checkpoint-3", out, registry)
    assert "has not exported its model yet" in refused(tmp_path, out, registry)
    parts = tmp_path / "run" / "ep-shards"
    parts.mkdir(parents=True)
    (parts / "ep-shards.json").write_text("{}")
    assert f"halo run merge-ep-shards {parts} OUT" in refused(tmp_path / "run", out, registry)
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    assert "stored as mxfp4, which is narrower than bf16" in refused(packed, out, registry)
    listed = tmp_path / "listed"
    listed.mkdir()
    (listed / "config.json").write_text("[]")
    assert "config.json is not a JSON object" in refused(listed, out, registry)
    assert "it is SOURCE" in refused(good, good, registry)
    assert "it exists and is not an empty folder" in refused(good, tmp_path / "run", registry)
    (tmp_path / "empty").mkdir()
    assert "config.json cannot be read" in refused(tmp_path / "empty", out, registry)
    assert not out.exists()


def test_a_folder_that_is_bf16_already_and_an_unknown_model_are_refused(sources: Any, tmp_path: Path) -> None:
    convert_to_bf16(sources.folder("lfm2_moe"), tmp_path / "once", sources.registry)
    assert "its weights are bf16 already" in refused(tmp_path / "once", tmp_path / "twice", sources.registry)
    config = json.loads((tmp_path / "once" / "config.json").read_text())
    (tmp_path / "once" / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    said = refused(tmp_path / "once", tmp_path / "twice", sources.registry)
    assert "no installed plugin knows its model type unheard_of" in said


def test_a_missing_tensor_is_refused_by_its_name(sources: Any, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(sources.folder("lfm2_moe"), folder)
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if ".experts." in name)
    del state[name]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert name in refused(folder, tmp_path / "out", sources.registry)


def test_a_full_disk_leaves_nothing_behind(sources: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(export_files.shutil, "disk_usage", lambda path: usage._replace(free=1234))
        with pytest.raises(SaveFailed, match="has 1234 bytes free"):
            convert_to_bf16(sources.folder("lfm2"), tmp_path / "out", sources.registry)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SaveFailed, match="No space left on device"):
        convert_to_bf16(sources.folder("lfm2"), tmp_path / "out", sources.registry)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_told_with_the_way_out_and_not_as_a_fault_of_ours() -> None:
    code, text = explain(SaveFailed(what="out could not be written: no space", remedy="free some space"))
    assert code == 2
    assert text == "halo: out could not be written: no space\n    do:  free some space"
