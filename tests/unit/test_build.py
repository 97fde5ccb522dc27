"""The meta build, sizes, finding a source, and resolving a plan on this machine."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import halo_core
from halo_core import runtime
from halo_core.errors import Refused
from halo_core.kernels.experts.reference import reference
from halo_core.models import source
from halo_core.models.build import build_meta, text_model_config
from halo_core.models.sizes import Sizes, sizes_of, sizes_of_plan
from halo_core.models.tiny import write_tiny

ALL = ("gpt_oss", "qwen3_moe", "qwen3", "qwen3_5_moe", "qwen3_5", "gemma4_moe", "gemma4", "lfm2_moe", "lfm2")
MOE = ("gpt_oss", "qwen3_moe", "qwen3_5_moe", "gemma4_moe", "lfm2_moe")


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", ALL)
def test_a_meta_build_has_transformers_own_names_shapes_and_no_memory(
    name: str, sources: Any, text_class_model: Any
) -> None:
    architecture = sources.architecture(name)
    model = build_meta(architecture, config_of(sources.folder(name)), dtype=torch.float32)
    theirs = text_class_model(architecture)
    shapes = {key: tuple(tensor.shape) for key, tensor in theirs.state_dict().items()}
    assert {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()} == shapes
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert model.config.use_cache is False
    assert model.config._attn_implementation == "eager"
    assert model.training


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_5", "gemma4_moe", "gemma4"])
def test_a_multimodal_configuration_gives_the_text_part_with_its_layer_types_and_rotary_settings(
    name: str, sources: Any
) -> None:
    architecture = sources.architecture(name)
    whole = config_of(sources.folder(name, "wrapped"))
    config = text_model_config(architecture, whole)
    plain = text_model_config(architecture, config_of(sources.folder(name)))
    assert whole["model_type"] != config.model_type
    for field in ("layer_types", "rope_parameters", "hidden_size", "vocab_size", "tie_word_embeddings"):
        assert getattr(config, field) == getattr(plain, field)


def test_the_multimodal_configurations_own_word_on_tying_decides(sources: Any) -> None:
    architecture = sources.architecture("qwen3_5")
    whole = config_of(sources.folder("qwen3_5", "wrapped"))
    for tied in (True, False):
        whole["tie_word_embeddings"] = tied
        whole["text_config"]["tie_word_embeddings"] = not tied
        model = build_meta(architecture, whole, dtype=torch.float32)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_bf16_is_for_parameters_and_leaves_what_the_model_makes_in_fp32(sources: Any) -> None:
    architecture = sources.architecture("lfm2_moe")
    model = build_meta(architecture, config_of(sources.folder("lfm2_moe")), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.layers[1].feed_forward.expert_bias.dtype == torch.float32


def test_parameters_that_transformers_loads_in_fp32_are_built_in_fp32(
    sources: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3MoeForCausalLM

    architecture = sources.architecture("qwen3_moe")
    monkeypatch.setattr(Qwen3MoeForCausalLM, "_keep_in_fp32_modules_strict", ["mlp.gate", "embed_tokens"])
    model = build_meta(architecture, config_of(sources.folder("qwen3_moe")), dtype=torch.bfloat16)
    kept = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert "model.embed_tokens.weight" in kept
    assert all("embed_tokens" in name or "mlp.gate" in name for name in kept)
    assert len(kept) > 1


@pytest.mark.parametrize("name", ALL)
def test_sizes_count_tied_parameters_once_and_persistent_buffers_too(
    name: str, sources: Any, text_class_model: Any
) -> None:
    architecture = sources.architecture(name)
    model = build_meta(architecture, config_of(sources.folder(name)), dtype=torch.float32)
    file = sources.folder(name) / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    counted = sizes_of(model, optim="adamw_torch")
    assert counted.weight_bytes == file.stat().st_size - header
    parameters = sum(parameter.numel() for parameter in text_class_model(architecture).parameters())
    assert counted == Sizes(
        parameters=parameters, trainable=parameters, weight_bytes=counted.weight_bytes,
        gradient_bytes=4 * parameters, optimizer_bytes=8 * parameters,
    )
    assert sizes_of(model, optim="sgd").optimizer_bytes == 0


def test_frozen_parameters_have_neither_gradients_nor_optimizer_state(sources: Any) -> None:
    model = build_meta(sources.architecture("lfm2"), config_of(sources.folder("lfm2")), dtype=torch.bfloat16)
    model.model.embed_tokens.weight.requires_grad_(False)
    counted = sizes_of(model, optim="adamw_torch_fused")
    assert counted.trainable == counted.parameters - model.model.embed_tokens.weight.numel()
    assert counted.gradient_bytes == 2 * counted.trainable
    assert counted.optimizer_bytes == 4 * counted.trainable


def run_config(**given: Any) -> dict[str, Any]:
    return {"model_name_or_path": "tiny", "dataset_name": "rows.jsonl", "family": "lfm2", **given}


def test_sizes_of_a_plan_for_the_tiny_model_are_those_of_the_folder_it_will_write(
    sources: Any, tmp_path: Path
) -> None:
    checked = halo_core.check(run_config())
    write_tiny(checked.architecture, tmp_path / "tiny")
    model = build_meta(checked.architecture, config_of(tmp_path / "tiny"), dtype=torch.float32)
    assert sizes_of_plan(checked) == sizes_of(model, optim=checked.config.optim)


def test_resolving_chooses_grouped_experts_and_says_why_not_where_they_cannot_run(
    sources: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checked = halo_core.check(run_config())
    resolved = runtime.resolve(checked)
    assert (str(resolved.device), resolved.dtype, resolved.experts) == ("cpu", torch.float32, "grouped")
    assert resolved.notes == ()
    assert resolved.versions["torch"] == torch.__version__
    odd = runtime.resolve(checked, {**checked.model_config, "moe_intermediate_size": 30})
    assert odd.experts == "reference"
    assert odd.experts_kernel is reference
    assert "expert width 30" in odd.experts_reason
    assert odd.notes[0].startswith("experts kernel: reference, because ")


def test_sizes_that_a_config_leaves_out_are_its_classs_defaults(sources: Any) -> None:
    architecture = sources.architecture("lfm2_moe")
    default = text_model_config(architecture, {"layer_types": ["conv"] * 32}).moe_intermediate_size
    assert runtime._sizes(architecture, {"hidden_size": 128, "layer_types": ["conv"] * 32}) == (128, default)


@pytest.mark.parametrize(
    "given", [{"kernels": {"experts": "reference"}}, {"use_grouped_gemm": False}], ids=["by_name", "by_key"]
)
def test_the_configuration_switches_the_experts_kernel(given: dict[str, Any]) -> None:
    resolved = runtime.resolve(halo_core.check(run_config(**given)))
    assert resolved.experts == "reference"
    assert resolved.experts_reason == "the configuration asks for it"
    assert resolved.digest() != runtime.resolve(halo_core.check(run_config())).digest()


@pytest.mark.parametrize("kernels", [{"experts": "fast"}, {"expert": "grouped"}])
def test_an_unknown_kernel_or_form_is_refused_with_the_legal_ones(kernels: dict[str, str]) -> None:
    with pytest.raises(Refused, match=r"grouped|experts"):
        halo_core.check(run_config(kernels=kernels))


def test_a_dense_model_resolves_without_an_experts_kernel() -> None:
    resolved = runtime.resolve(halo_core.check(run_config(model_name_or_path="tiny-dense")))
    assert resolved.experts == "none"
    assert resolved.experts_kernel is None


def test_auto_dtype_is_the_sources_and_half_precision_without_range_is_refused(sources: Any) -> None:
    architecture = sources.architecture("gemma4")
    assert runtime.dtype_of("auto", {"dtype": "bfloat16"}, architecture) == torch.bfloat16
    assert runtime.dtype_of("auto", {"text_config": {"torch_dtype": "bfloat16"}}, architecture) == torch.bfloat16
    assert runtime.dtype_of("auto", {}, architecture) == torch.float32
    assert runtime.dtype_of("float32", {"dtype": "bfloat16"}, architecture) == torch.float32
    for stored in ("float16", "float64"):
        with pytest.raises(Refused, match=stored):
            runtime.dtype_of("auto", {"dtype": stored}, architecture)


def test_two_ranks_of_one_machine_agree_and_two_devices_do_not() -> None:
    resolved = runtime.resolve(halo_core.check(run_config()))
    first, second = (replace(resolved, device=torch.device("cuda", index)) for index in (0, 1))
    assert first.digest() == second.digest()
    assert first.digest() != replace(resolved, device=torch.device("cpu")).digest()


def refusal(folder: Path) -> Refused:
    with pytest.raises(Refused) as caught:
        source.resolve(str(folder))
    return caught.value


@pytest.fixture
def copied(sources: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "copied"
    shutil.copytree(sources.folder("lfm2", "sharded"), folder)
    return folder


def test_a_whole_folder_is_its_own_source(copied: Path) -> None:
    assert source.resolve(str(copied)) == copied
    assert all(path.is_file() for path in source.weight_files(copied))
    assert len(source.weight_files(copied)) > 1


def test_a_shard_that_the_index_names_but_nobody_copied_is_refused_by_name(copied: Path) -> None:
    gone = source.weight_files(copied)[1]
    gone.unlink()
    assert gone.name in str(refusal(copied))


def test_shards_without_their_index_are_refused(copied: Path) -> None:
    (copied / "model.safetensors.index.json").unlink()
    assert "model.safetensors.index.json" in str(refusal(copied))


def test_pickled_weights_are_refused(copied: Path) -> None:
    for path in copied.glob("*.safetensors*"):
        path.unlink()
    (copied / "pytorch_model.bin").write_bytes(b"")
    assert "pickled" in str(refusal(copied))


def test_an_adapter_and_an_empty_folder_are_refused(copied: Path, tmp_path: Path) -> None:
    for path in copied.glob("*.safetensors*"):
        path.unlink()
    assert "no safetensors file" in str(refusal(copied))
    (copied / "adapter_config.json").write_text("{}")
    assert "adapter" in str(refusal(copied))
    assert "config.json" in str(refusal(tmp_path))


def test_a_quantised_source_is_a_thing_not_built_and_names_the_way_out(copied: Path) -> None:
    config = config_of(copied)
    config["quantization_config"] = {"quant_method": "fp8"}
    (copied / "config.json").write_text(json.dumps(config))
    found = refusal(copied)
    assert [problem.kind for problem in found.problems] == ["not built"]
    assert "stored as fp8" in str(found)
    assert "bf16 copy" in str(found)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c"])
def test_a_path_that_is_no_folder_is_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(Refused, match="no such folder"):
        source.resolve(name)


def test_a_hub_id_that_cannot_be_had_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: Any) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(Refused, match="the hub did not give it"):
        source.resolve("nobody/nothing")
