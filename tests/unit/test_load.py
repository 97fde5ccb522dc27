"""Weights loaded by Halo against transformers' own from_pretrained of the same folder, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from halo_core.errors import Refused
from halo_core.kernels.experts.reference import reference
from halo_core.models import layout, load
from halo_core.models.build import attribute, build_meta
from halo_core.models.load import load_weights
from halo_core.models.safetensors_files import read_file

ALL = ("gpt_oss", "qwen3_moe", "qwen3", "qwen3_5_moe", "qwen3_5", "gemma4_moe", "gemma4", "lfm2_moe", "lfm2")
TEXT_SOURCES = [
    *((name, "plain") for name in ALL),
    *((name, "fused") for name in ("gpt_oss", "qwen3_moe", "qwen3_5_moe", "lfm2_moe")),
    *((name, "sharded") for name in ("qwen3_5_moe", "gemma4_moe", "lfm2")),
]
WRAPPED = ("qwen3_5_moe", "qwen3_5", "gemma4_moe", "gemma4")


def loaded(architecture: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    config = json.loads((folder / "config.json").read_text())
    model = build_meta(architecture, config, dtype=dtype, experts=reference)
    load_weights(model, folder, architecture)
    return model


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return all parameters and all buffers, the stored and the computed ones."""
    named = dict(model.named_parameters(remove_duplicate=False))
    named.update(model.named_buffers(remove_duplicate=False))
    return {name.replace("model.language_model.", "model."): tensor for name, tensor in named.items()}


def assert_same(ours: Any, theirs: Any, *, only_ours: bool = False) -> None:
    left, right = tensors(ours), tensors(theirs)
    assert only_ours or left.keys() == right.keys()
    wrong = [n for n in left if left[n].dtype != right[n].dtype or not torch.equal(left[n], right[n])]
    assert wrong == []


@pytest.mark.parametrize(("name", "form"), TEXT_SOURCES)
def test_every_parameter_and_buffer_equals_from_pretrained(name: str, form: str, sources: Any) -> None:
    architecture, folder = sources.architecture(name), sources.folder(name, form)
    assert_same(loaded(architecture, folder), attribute(architecture.spec.model_class).from_pretrained(folder))


@pytest.mark.parametrize("name", ALL)
def test_bf16_keeps_in_fp32_what_transformers_keeps_in_fp32(name: str, sources: Any) -> None:
    architecture, folder = sources.architecture(name), sources.folder(name)
    theirs = attribute(architecture.spec.model_class).from_pretrained(folder, dtype=torch.bfloat16)
    ours = loaded(architecture, folder, torch.bfloat16)
    assert_same(ours, theirs)
    assert next(ours.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["wrapped", "wrapped_bf16"])
@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_part_of_a_multimodal_checkpoint_equals_the_multimodal_class(
    name: str, form: str, sources: Any
) -> None:
    from transformers import AutoModelForImageTextToText

    architecture, folder = sources.architecture(name), sources.folder(name, form)
    for dtype in (torch.float32, torch.bfloat16):
        theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
        assert_same(loaded(architecture, folder, dtype), theirs, only_ours=True)


def test_the_comparison_sees_one_changed_buffer(sources: Any) -> None:
    architecture, folder = sources.architecture("lfm2_moe"), sources.folder("lfm2_moe")
    ours = loaded(architecture, folder)
    ours.model.layers[1].feed_forward.expert_bias[3] += 1e-3
    with pytest.raises(AssertionError):
        assert_same(ours, attribute(architecture.spec.model_class).from_pretrained(folder))


@pytest.mark.parametrize("name", ["lfm2_moe", "gemma4_moe"])
def test_a_tied_head_is_one_parameter_with_its_embedding(name: str, sources: Any) -> None:
    model = loaded(sources.architecture(name), sources.folder(name))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_every_parameter_can_be_trained_and_the_model_is_in_training_mode(sources: Any) -> None:
    model = loaded(sources.architecture("lfm2_moe"), sources.folder("lfm2_moe"))
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.fixture
def damaged(sources: Any, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies a source and edits its one file's tensors."""

    def make(name: str, edit: Callable[[dict[str, torch.Tensor]], None], form: str = "plain") -> Path:
        folder = tmp_path / "damaged"
        shutil.copytree(sources.folder(name, form), folder)
        state = load_file(folder / "model.safetensors")
        edit(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def refusal(architecture: Any, folder: Path) -> str:
    with pytest.raises(Refused) as caught:
        loaded(architecture, folder)
    return str(caught.value)


EXPERT = "model.layers.2.feed_forward.experts.5.w3.weight"


def test_a_missing_expert_tensor_is_refused_by_its_name(sources: Any, damaged: Any) -> None:
    text = refusal(sources.architecture("lfm2_moe"), damaged("lfm2_moe", lambda state: state.pop(EXPERT)))
    assert EXPERT in text
    assert "lacks" in text


def test_the_last_expert_missing_everywhere_is_refused(sources: Any, damaged: Any) -> None:
    def edit(state: dict[str, torch.Tensor]) -> None:
        for key in [key for key in state if ".experts.7." in key]:
            del state[key]

    assert "layers.1.feed_forward.experts.7.w1.weight" in refusal(
        sources.architecture("lfm2_moe"), damaged("lfm2_moe", edit)
    )


def test_missing_unexpected_doubled_and_misshapen_tensors_come_in_one_refusal(sources: Any, damaged: Any) -> None:
    def edit(state: dict[str, torch.Tensor]) -> None:
        del state["model.layers.0.operator_norm.weight"]
        state["model.layers.9.operator_norm.weight"] = torch.zeros(3)
        state["model.layers.1.feed_forward.experts.gate_up_proj"] = torch.zeros(8, 128, 128)
        state["model.layers.3.ffn_norm.weight"] = torch.zeros(5)
        state["model.layers.3.feed_forward.experts.2.w2.weight"] = torch.zeros(7, 7)
        state["model.layers.2.feed_forward.experts.8.w2.weight"] = torch.zeros(128, 64)

    text = refusal(sources.architecture("lfm2_moe"), damaged("lfm2_moe", edit))
    for words in (
        "lacks tensors that the model has: model.layers.0.operator_norm.weight",
        "no place for: model.layers.9.operator_norm.weight, model.layers.2.feed_forward.experts.8.w2.weight",
        "more than once: model.layers.1.feed_forward.experts.gate_up_proj",
        "model.layers.3.ffn_norm.weight is [5], the model has [128]",
        "do not combine to model.layers.3.feed_forward.experts.down_proj",
    ):
        assert words in text


def test_a_tensor_in_two_files_is_refused(sources: Any, tmp_path: Path) -> None:
    folder = tmp_path / "doubled"
    shutil.copytree(sources.folder("qwen3", "sharded"), folder)
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    one, two = load_file(first), load_file(second)
    key = next(iter(one))
    save_file({**two, key: one[key] + 1}, second)
    assert f"{key} (in two files)" in refusal(sources.architecture("qwen3"), folder)


def test_a_truncated_file_is_refused_by_its_name(sources: Any, tmp_path: Path) -> None:
    folder = tmp_path / "truncated"
    shutil.copytree(sources.folder("qwen3"), folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    assert "model.safetensors" in refusal(sources.architecture("qwen3"), folder)
    (folder / "model.safetensors").write_bytes(b"not safetensors at all")
    assert "header" in refusal(sources.architecture("qwen3"), folder)


def test_integer_tensors_are_refused_as_quantised(sources: Any, damaged: Any) -> None:
    def edit(state: dict[str, torch.Tensor]) -> None:
        state["model.layers.0.mlp.experts.down_proj"] = state["model.layers.0.mlp.experts.down_proj"].to(torch.uint8)

    assert "quantised: model.layers.0.mlp.experts.down_proj (U8)" in refusal(
        sources.architecture("gpt_oss"), damaged("gpt_oss", edit)
    )


def test_a_head_that_differs_from_the_embedding_it_should_be_tied_to_stays_its_own(sources: Any, damaged: Any) -> None:
    def edit(state: dict[str, torch.Tensor]) -> None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"] + 1

    folder = damaged("lfm2", edit)
    architecture = sources.architecture("lfm2")
    ours = loaded(architecture, folder)
    assert_same(ours, attribute(architecture.spec.model_class).from_pretrained(folder))
    assert ours.lm_head.weight is not ours.model.embed_tokens.weight


def test_a_source_with_only_the_head_of_a_tied_pair_loads(sources: Any, damaged: Any) -> None:
    def edit(state: dict[str, torch.Tensor]) -> None:
        state["lm_head.weight"] = state.pop("model.embed_tokens.weight")

    folder = damaged("lfm2", edit)
    architecture = sources.architecture("lfm2")
    assert_same(loaded(architecture, folder), attribute(architecture.spec.model_class).from_pretrained(folder))


def test_a_conversion_that_cannot_be_undone_is_found_before_training(
    sources: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = layout.to_source

    def forgets_one_dimension(group: Any, held: Any, model: Any) -> dict[str, torch.Tensor]:
        return {key: tensor[0] for key, tensor in whole(group, held, model).items()}

    monkeypatch.setattr(layout, "to_source", forgets_one_dimension)
    with pytest.raises(RuntimeError, match="would be written back as"):
        loaded(sources.architecture("lfm2_moe"), sources.folder("lfm2_moe"))


def test_a_tensor_left_without_a_value_is_an_error(sources: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_finish", lambda *given: None)
    with pytest.raises(RuntimeError, match=r"without a value after loading: .*inv_freq"):
        loaded(sources.architecture("qwen3"), sources.folder("qwen3"))


def test_headers_are_read_as_the_formats_own_reader_reads_them(sources: Any) -> None:
    path = sources.folder("lfm2_moe") / "model.safetensors"
    file = read_file(path)
    with safe_open(path, framework="pt") as handle:
        assert sorted(tensor.key for tensor in file.tensors) == sorted(handle.keys())
        for tensor in file.tensors:
            assert list(tensor.shape) == handle.get_slice(tensor.key).get_shape()
            assert tensor.dtype == handle.get_slice(tensor.key).get_dtype()
