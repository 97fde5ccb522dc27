"""Which attention and mixer kernels a run resolves to, why, and what it says about it; no kernel runs here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halo_core import config as configuration
from halo_core import plan, registry, runtime
from halo_core.errors import Refused
from halo_core.kernels.attention import flash, reference, wide
from halo_core.kernels.delta_rule import choice as delta_rule_choice
from halo_core.kernels.short_conv import choice as short_conv_choice

REGISTRY = registry.load()
FLASH = "flash_attention_2"


def checked(model: str, attention: str = "eager", **keys: Any) -> plan.Checked:
    given = {"model_name_or_path": model, "dataset_name": "rows.jsonl", "dtype": "bfloat16", **keys}
    read = configuration.read(None, given=given, more_words=REGISTRY.words())
    ready = plan.build(read, REGISTRY, dry_run=True)
    return replace(ready, plan=replace(ready.plan, attention=attention))


def installed(find: Callable[[str], object]) -> Any:
    """Return what stands for importlib where packages are looked up by `find`, and all are of version 9."""
    return SimpleNamespace(
        util=SimpleNamespace(find_spec=find), metadata=SimpleNamespace(version=lambda name: "9.0")
    )


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everything be decided as on a CUDA device that has triton and flash-linear-attention."""
    monkeypatch.setattr(runtime, "_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for rule in (short_conv_choice, delta_rule_choice):
        monkeypatch.setattr(rule, "importlib", installed(lambda name: object()))


def test_flash_attention_without_a_gpu_is_refused_with_a_way_out() -> None:
    with pytest.raises(Refused) as refused:
        runtime.resolve(checked("openai/gpt-oss-20b", FLASH))
    (problem,) = refused.value.problems
    assert (problem.key, problem.value) == ("attn_implementation", FLASH)
    assert problem.remedy.startswith("leave attn_implementation out; kernels: {attention: reference}")


def test_the_reference_runs_everywhere_where_it_is_asked_for() -> None:
    resolved = runtime.resolve(checked("openai/gpt-oss-20b", FLASH, kernels={"attention": "reference"}))
    assert resolved.attention_by == "reference" and resolved.attention == FLASH
    assert resolved.attention_kernel is not None and resolved.attention_kernel(64) is reference.attend
    assert any("reference, because the configuration asks for it" in note for note in resolved.notes)
    assert resolved.as_dict()["kernels"]["attention"] == "reference"


@pytest.mark.usefixtures("on_cuda")
def test_flash_attention_on_a_gpu_says_which_kernels_run() -> None:
    resolved = runtime.resolve(checked("openai/gpt-oss-20b", "kernels-community/vllm-flash-attn3"))
    assert resolved.attention_by == "flash"
    assert resolved.attention_kernel is not None and resolved.attention_kernel(64) is flash.attend
    (note,) = resolved.notes
    assert note == f"attention kernel: the flash kernels that torch {torch.__version__} carries"


@pytest.mark.usefixtures("on_cuda")
def test_flash_attention_in_fp32_is_refused() -> None:
    with pytest.raises(Refused) as refused:
        runtime.resolve(checked("openai/gpt-oss-20b", FLASH, dtype="float32"))
    assert refused.value.problems[0].remedy == "dtype: bfloat16"


@pytest.mark.usefixtures("on_cuda")
def test_layers_with_wider_heads_get_another_kernel_that_is_said() -> None:
    resolved = runtime.resolve(checked("google/gemma-4-26B-A4B", FLASH))
    kernel = resolved.attention_kernel
    assert kernel is not None and kernel(256) is flash.attend and kernel(512) is wide.attend
    assert [note for note in resolved.notes if "heads of 512" in note and "document by document" in note]


@pytest.mark.usefixtures("on_cuda")
def test_transformers_attention_stays_and_says_what_packing_costs_with_it() -> None:
    resolved = runtime.resolve(checked("openai/gpt-oss-20b", "eager", padding_free=True))
    assert resolved.attention_by is None and resolved.attention_kernel is None
    assert [note for note in resolved.notes if "makes a mask of every pair" in note]


def test_a_kernel_of_attention_that_is_not_used_is_said() -> None:
    resolved = runtime.resolve(checked("openai/gpt-oss-20b", "eager", kernels={"attention": "reference"}))
    assert [note for note in resolved.notes if "says nothing while attention is eager" in note]


@pytest.mark.usefixtures("on_cuda")
def test_mixers_are_fused_on_a_gpu() -> None:
    resolved = runtime.resolve(checked("Qwen/Qwen3.5-35B-A3B"))
    assert dict(resolved.mixers) == {"short_conv": "fused", "delta_rule": "fused"}
    assert runtime.resolve(checked("openai/gpt-oss-20b")).mixers == {}


@pytest.mark.usefixtures("on_cuda")
def test_a_missing_package_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule_choice, "importlib", installed(lambda name: None if name == "fla" else object()))
    resolved = runtime.resolve(checked("Qwen/Qwen3.5-35B-A3B"))
    assert dict(resolved.mixers) == {"short_conv": "fused", "delta_rule": "chunked"}
    assert [n for n in resolved.notes if n.startswith("delta_rule")] == [
        "delta_rule kernel: chunked, because flash-linear-attention is not installed"
    ]


def test_on_the_cpu_mixers_are_transformers_own_where_a_row_is_one_document() -> None:
    resolved = runtime.resolve(checked("Qwen/Qwen3.5-35B-A3B"))
    assert dict(resolved.mixers) == {"short_conv": "reference", "delta_rule": "chunked"}
    assert resolved.mixer_kernels is None, "the core's kernels come in where several documents share a row"
    assert not [note for note in resolved.notes if " kernel" in note]


def test_a_mixer_asked_for_by_name_is_used_for_every_batch() -> None:
    resolved = runtime.resolve(checked("Qwen/Qwen3.5-35B-A3B", kernels={"delta_rule": "reference"}))
    assert resolved.mixer_kernels is not None
    assert resolved.mixer_kernels["delta_rule"] is delta_rule_choice.kernel("reference")


def test_plans_of_other_kernels_have_other_digests() -> None:
    one, other = (
        runtime.resolve(checked("Qwen/Qwen3.5-35B-A3B", kernels={"delta_rule": name}))
        for name in ("reference", "chunked")
    )
    assert one.digest() != other.digest()
