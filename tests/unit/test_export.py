"""An exported folder against its source: same keys, order, dtypes and configuration, trained tensors replaced."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from halo_core.checkpoint import export_files
from halo_core.checkpoint.atomic import SaveFailed
from halo_core.checkpoint.export import export
from halo_core.errors import Refused
from halo_core.kernels.experts.reference import reference
from halo_core.models.build import build_meta
from halo_core.models.load import load_weights
from halo_core.models.safetensors_files import header_of, metadata_of, read_file

ALL = ("gpt_oss", "qwen3_moe", "qwen3", "qwen3_5_moe", "qwen3_5", "gemma4_moe", "gemma4", "lfm2_moe", "lfm2")
TEXT_SOURCES = [
    *((name, "plain") for name in ALL),
    *((name, "fused") for name in ("gpt_oss", "qwen3_moe", "qwen3_5_moe", "lfm2_moe")),
    *((name, "sharded") for name in ("qwen3_5_moe", "gemma4_moe", "lfm2")),
]
WRAPPED = ("qwen3_5_moe", "qwen3_5", "gemma4_moe", "gemma4")
EAGER = {"attn_implementation": "eager"}
"""As the models under test compute."""
FP32 = 1e-5
"""Equal weights at other addresses: a matrix multiplication may add in another order, on logits of size ten."""
VISION = ("visual", "vision_tower", "embed_vision", "mtp")


def trained(architecture: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return the folder's model with every stored tensor changed, as training would."""
    model = build_meta(architecture, json.loads((folder / "config.json").read_text()), dtype=dtype, experts=reference)
    load_weights(model, folder, architecture)
    torch.manual_seed(3)
    with torch.no_grad():
        for tensor in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values():
            tensor.add_(torch.randn_like(tensor), alpha=0.05)
    return model


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def description(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return file name -> its (key, dtype, shape) in the order of their bytes."""
    files = [read_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {file.path.name: [(t.key, t.dtype, t.shape) for t in file.tensors] for file in files}


def assert_same_model(theirs: Any, ours: Any) -> None:
    """Check that the weights are equal, and the logits as far as floating point lets equal weights go."""
    left = {key.replace("model.language_model.", "model."): tensor for key, tensor in theirs.state_dict().items()}
    assert [key for key, tensor in ours.state_dict().items() if not torch.equal(left[key], tensor)] == []
    ids = torch.arange(1, 13).view(2, 6)
    with torch.no_grad():
        logits = [model.eval()(input_ids=ids, use_cache=False).logits for model in (theirs, ours)]
    assert float((logits[0] - logits[1]).abs().max()) < FP32


@pytest.mark.parametrize(("name", "form"), TEXT_SOURCES)
def test_a_text_source_comes_back_in_its_own_layout_with_the_trained_weights(
    name: str, form: str, sources: Any, tmp_path: Path
) -> None:
    architecture, source = sources.architecture(name), sources.folder(name, form)
    model = trained(architecture, source)
    export(model, architecture, source, tmp_path)
    assert description(tmp_path) == description(source)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in source.iterdir())
    before, after = weights(source), weights(tmp_path)
    assert [key for key in before if torch.equal(before[key], after[key])] == []
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path, **EAGER), model)


@pytest.mark.parametrize("form", ["wrapped", "wrapped_bf16", "wrapped_fused"])
@pytest.mark.parametrize("name", WRAPPED)
def test_a_multimodal_source_keeps_its_class_keys_dtypes_and_untrained_bytes(
    name: str, form: str, sources: Any, tmp_path: Path
) -> None:
    architecture, source = sources.architecture(name), sources.folder(name, form)
    model = trained(architecture, source)
    written = export(model, architecture, source, tmp_path)
    assert description(tmp_path) == description(source)
    assert (tmp_path / "config.json").read_bytes() == (source / "config.json").read_bytes()
    before, after = weights(source), weights(tmp_path)
    kept = {key for key in before if torch.equal(before[key], after[key])}
    assert kept == {key for key in before if any(word in key for word in VISION)}
    assert kept
    assert f"{len(kept)} tensors" in written.note
    dtype = torch.bfloat16 if form == "wrapped_bf16" else torch.float32
    for parameter in model.parameters():  # the sources keep their buffers in fp32
        parameter.data = parameter.data.to(dtype).float()
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32, **EAGER)
    assert_same_model(theirs, model)


@pytest.mark.parametrize("form", ["wrapped", "wrapped_fused"])
@pytest.mark.parametrize("name", WRAPPED)
def test_text_only_writes_the_text_class_and_says_so(name: str, form: str, sources: Any, tmp_path: Path) -> None:
    architecture, source = sources.architecture(name), sources.folder(name, form)
    model = trained(architecture, source)
    written = export(model, architecture, source, tmp_path, text_only=True)
    assert type(model).__name__ in written.note
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(model).__name__]
    theirs, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, **EAGER)
    assert type(theirs) is type(model)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert_same_model(theirs, model)
    assert not any("language_model" in key or any(word in key for word in VISION) for key in weights(tmp_path))


def test_text_only_of_a_text_source_is_the_ordinary_export(sources: Any, tmp_path: Path) -> None:
    architecture, source = sources.architecture("lfm2_moe"), sources.folder("lfm2_moe")
    export(trained(architecture, source), architecture, source, tmp_path, text_only=True)
    assert description(tmp_path) == description(source)


def test_a_bf16_run_of_an_fp32_source_is_written_in_fp32_and_fp32_buffers_stay_exact(
    sources: Any, tmp_path: Path
) -> None:
    architecture, source = sources.architecture("lfm2_moe"), sources.folder("lfm2_moe")
    model = trained(architecture, source, torch.bfloat16)
    export(model, architecture, source, tmp_path)
    assert description(tmp_path) == description(source)
    after = weights(tmp_path)
    block = model.model.layers[2].feed_forward
    assert torch.equal(after["model.layers.2.feed_forward.expert_bias"], block.expert_bias)
    up = block.experts.gate_up_proj[5, 64:].float()
    assert torch.equal(after["model.layers.2.feed_forward.experts.5.w3.weight"], up)


def test_every_expert_is_written_under_its_own_number(sources: Any, tmp_path: Path) -> None:
    architecture, source = sources.architecture("qwen3_moe"), sources.folder("qwen3_moe")
    model = trained(architecture, source)
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__ == "Qwen3MoeExperts":
                for number in range(8):
                    module.down_proj[number] = float(number)
    export(model, architecture, source, tmp_path)
    found = {key: tensor for key, tensor in weights(tmp_path).items() if "experts" in key and "down_proj" in key}
    assert len(found) >= 8
    for key, tensor in found.items():
        number = int(key.split(".experts.")[1].split(".")[0])
        assert torch.equal(tensor, torch.full_like(tensor, number))


def test_a_tied_head_that_the_source_stores_is_written_with_the_embedding(sources: Any, tmp_path: Path) -> None:
    architecture, source = sources.architecture("lfm2"), tmp_path / "source"
    shutil.copytree(sources.folder("lfm2"), source)
    state = load_file(source / "model.safetensors")
    from safetensors.torch import save_file

    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}, source / "model.safetensors")
    model = trained(architecture, source)
    export(model, architecture, source, tmp_path / "out")
    after = weights(tmp_path / "out")
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    assert torch.equal(after["lm_head.weight"], model.model.embed_tokens.weight)


def test_an_export_can_be_the_source_of_the_next_run(sources: Any, tmp_path: Path) -> None:
    architecture, source = sources.architecture("qwen3_5_moe"), sources.folder("qwen3_5_moe", "wrapped_bf16")
    export(trained(architecture, source), architecture, source, tmp_path / "first")
    export(trained(architecture, tmp_path / "first"), architecture, tmp_path / "first", tmp_path / "second")
    assert description(tmp_path / "second") == description(source)


def test_an_unchanged_model_gives_back_the_source_files_byte_for_byte(sources: Any, tmp_path: Path) -> None:
    architecture, source = sources.architecture("qwen3_5_moe"), sources.folder("qwen3_5_moe", "wrapped_bf16")
    model = build_meta(architecture, json.loads((source / "config.json").read_text()), dtype=torch.float32)
    load_weights(model, source, architecture)
    export(model, architecture, source, tmp_path)
    for path in source.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_tokenizer_files_of_another_folder_take_the_sources_place(sources: Any, tmp_path: Path) -> None:
    architecture, source = sources.architecture("lfm2"), sources.folder("lfm2")
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "chat_template.jinja").write_text("another")
    (other / "config.json").write_text("{}")
    export(trained(architecture, source), architecture, source, tmp_path / "out", tokenizer_folder=other)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "another"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_what_a_run_keeps_beside_the_export_is_left_alone_and_a_sources_run_files_are_not_copied(
    sources: Any, tmp_path: Path
) -> None:
    architecture, source = sources.architecture("lfm2"), tmp_path / "source"
    shutil.copytree(sources.folder("lfm2"), source)
    (source / "metrics.jsonl").write_text("an earlier run")
    (source / "README.md").write_text("another model")
    (source / "pytorch_model.bin").write_bytes(b"pickled")
    (source / "checkpoint-3").mkdir()
    out = tmp_path / "out"
    (out / "checkpoint-1").mkdir(parents=True)
    (out / "metrics.jsonl").write_text("this run")
    export(trained(architecture, source), architecture, source, out)
    assert (out / "metrics.jsonl").read_text() == "this run"
    assert sorted(path.name for path in out.iterdir()) == [
        "chat_template.jinja", "checkpoint-1", "config.json", "generation_config.json", "metrics.jsonl",
        "model.safetensors", "tokenizer.json",
    ]


def test_a_failing_export_leaves_no_folder_that_could_be_taken_for_a_model(
    sources: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, source = sources.architecture("qwen3"), sources.folder("qwen3", "sharded")
    model = trained(architecture, source)

    def break_down(staged: Path, output_dir: Path) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(export_files, "publish", break_down)
    with pytest.raises(SaveFailed, match="the disk is gone"):
        export(model, architecture, source, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_export_over_an_older_one_is_not_a_model_until_it_is_whole(
    sources: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, source = sources.architecture("qwen3"), sources.folder("qwen3")
    model = trained(architecture, source)
    export(model, architecture, source, tmp_path)
    replace, moved = Path.replace, []

    def stops_at_config(path: Path, target: Path) -> Path:
        moved.append(target.name)
        if target.name == "config.json":
            raise OSError("killed here")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", stops_at_config)
    with pytest.raises(SaveFailed):
        export(model, architecture, source, tmp_path)
    assert moved[-1] == "config.json"
    assert not (tmp_path / "config.json").exists()


def test_weights_of_an_older_export_in_other_files_are_removed(sources: Any, tmp_path: Path) -> None:
    architecture = sources.architecture("qwen3")
    for form in ("sharded", "plain", "sharded"):
        source = sources.folder("qwen3", form)
        export(trained(architecture, source), architecture, source, tmp_path)
        assert description(tmp_path) == description(source)
        assert (tmp_path / "model.safetensors.index.json").exists() == (form == "sharded")


def test_too_little_space_names_needed_and_free_bytes(
    sources: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, source = sources.architecture("qwen3"), sources.folder("qwen3")
    model = trained(architecture, source)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(export_files.shutil, "disk_usage", lambda path: usage._replace(free=12345))
    with pytest.raises(SaveFailed) as caught:
        export(model, architecture, source, tmp_path)
    needed = (source / "model.safetensors").stat().st_size + export_files.MARGIN
    assert f"needs {needed} bytes" in caught.value.what
    assert "12345 bytes free" in caught.value.what
    assert list(tmp_path.iterdir()) == []


def test_the_source_folder_itself_is_refused_as_a_target(sources: Any) -> None:
    architecture, source = sources.architecture("qwen3"), sources.folder("qwen3")
    with pytest.raises(Refused, match="source folder"):
        export(trained(architecture, source), architecture, source, source)


def test_a_written_tensor_that_differs_from_its_plan_is_an_error(sources: Any, tmp_path: Path) -> None:
    source = read_file(sources.folder("qwen3") / "model.safetensors")
    kept = source.tensors[1:]
    head = header_of([(t.key, t.dtype, t.shape) for t in kept], metadata_of(source.head))
    file = export_files.NewFile(name="model.safetensors", head=head, tensors=tuple((source, t) for t in kept))
    shutil.copy(source.path, tmp_path)
    with pytest.raises(RuntimeError, match="other tensors than planned"):
        export_files.compare(tmp_path, [file])
