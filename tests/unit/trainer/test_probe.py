"""The start-up probe: it lets every architecture through, and refuses each way of leaking by name.

Not for proofs in numbers: see `tests/conformance/test_isolation.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import halo_core
from halo_core.errors import Refused
from halo_core.kernels.experts.reference import reference
from halo_core.models import hidden, mixers, sockets
from halo_core.models.hidden import last_hidden
from halo_core.trainer import probe
from halo_core.trainer.probe import LATER, NOT_ALONE, OTHER, Leak
from halo_core.trainer.stopped import TrainingStopped
from tests.leaking import LEAKS, as_one, breaks, delta_rule

ALL = ("gpt_oss", "qwen3_moe", "qwen3", "qwen3_5_moe", "qwen3_5", "gemma4_moe", "gemma4", "lfm2_moe", "lfm2")
CPU = torch.device("cpu")
SAID = {"no documents": OTHER, "no order": LATER, "nothing but itself": NOT_ALONE}


def prepared(sources: Any, text_class_model: Any, name: str, attention: str = "eager") -> tuple[Any, Any]:
    """Return an architecture and a random model of it with everything attached."""
    architecture = sources.architecture(name)
    torch.manual_seed(0)
    model = text_class_model(architecture)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.set_attn_implementation(attention)
    sockets.attach(model, architecture, reference)
    mixers.attach(model, architecture)
    return architecture, model.train()


def find(model: Any, architecture: Any, **forms: bool) -> Leak | None:
    return probe.find_leak(model, architecture, last_hidden, device=CPU, **forms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ALL)
def test_no_architecture_leaks(name: str, dtype: torch.dtype, sources: Any, text_class_model: Any) -> None:
    for attention in ("eager",) if name == "gpt_oss" else ("eager", "sdpa"):
        architecture, model = prepared(sources, text_class_model, name, attention)
        assert find(model.to(dtype), architecture, packs=True, flattens=True) is None


@pytest.mark.parametrize(("name", "way"), LEAKS)
@pytest.mark.parametrize("form", ["packs", "flattens"])
def test_each_way_of_leaking_is_found_in_the_first_layer_that_has_it(
    name: str, way: str, form: str, sources: Any, text_class_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, model = prepared(sources, text_class_model, name)
    breaks(way, model, architecture, monkeypatch)
    leak = find(model, architecture, **{form: True})
    assert leak is not None
    assert leak.what == SAID.get(way, OTHER)
    mixing = {path for path, module in model.named_modules() if type(module).__name__ == leak.module}
    assert leak.path == min(mixing)
    bound = mixers.of(model)
    assert bound is not None
    assert (leak.path in bound.by_path) == (way not in SAID)


def test_rows_of_one_document_are_let_through_whatever_packs_would_do(
    sources: Any, text_class_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, model = prepared(sources, text_class_model, "lfm2")
    breaks("convolution over borders", model, architecture, monkeypatch)
    assert find(model, architecture) is None


def seen_by_all(segment_ids: Tensor, documents: Any) -> Tensor:
    """Return a padding mask that took the place of causality."""
    return (segment_ids != 0)[:, None, None, :].expand(-1, 1, segment_ids.shape[1], -1)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_later_token_that_is_seen_is_found(
    attention: str, sources: Any, text_class_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, model = prepared(sources, text_class_model, "qwen3", attention)
    monkeypatch.setattr(hidden, "padding_mask", seen_by_all)
    if attention == "eager":  # adds the mask instead of reading it as yes and no
        monkeypatch.setattr(hidden, "padding_mask", lambda *given: (~seen_by_all(*given)).float() * -1e9)
    assert find(model, architecture) == Leak(path="model.layers.0.self_attn", module="Qwen3Attention", what=LATER)


def test_a_module_that_nobody_calls_a_mixer_is_found_in_its_layer(sources: Any, text_class_model: Any) -> None:
    architecture, model = prepared(sources, text_class_model, "qwen3")
    block = model.model.layers[1].mlp
    own = block.forward
    block.forward = lambda states: own(states + states.mean(dim=1, keepdim=True))
    leak = find(model, architecture)
    assert leak == Leak(path="model.layers.1", module="Qwen3DecoderLayer", what=LATER)


def test_a_model_in_which_no_token_arrives_is_no_pass(sources: Any, text_class_model: Any) -> None:
    architecture, model = prepared(sources, text_class_model, "qwen3")
    nn.init.zeros_(model.model.embed_tokens.weight)
    with pytest.raises(RuntimeError, match="sees no token of its own"):
        find(model, architecture)


def test_nothing_of_the_model_or_of_chance_is_moved(sources: Any, text_class_model: Any) -> None:
    architecture, model = prepared(sources, text_class_model, "lfm2_moe")
    config = plain_config(packing=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    probe.check(model, architecture, last_hidden, config, attention_name="eager", device=CPU)
    assert torch.equal(torch.rand(3), wanted)
    assert model.training
    assert {socket.calls for socket in sockets.of(model).by_path.values()} == {0}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("keys", [{"packing": True}, {"padding_free": True}, {"eval_packing": True}])
def test_a_leak_refuses_the_run_with_the_layer_and_the_way_out(
    keys: dict[str, bool], sources: Any, text_class_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, model = prepared(sources, text_class_model, "qwen3_5")
    breaks("state over borders", model, architecture, monkeypatch)
    with pytest.raises(Refused) as refusal:
        probe.check(model, architecture, last_hidden, plain_config(**keys), attention_name="sdpa", device=CPU)
    (problem,) = refusal.value.problems
    assert (problem.key, problem.value) == (next(iter(keys)), "true")
    assert "model.layers.0.linear_attn (Qwen3_5GatedDeltaNet)" in problem.why
    assert f"{problem.key}: false" in problem.remedy


def test_a_kind_of_layer_that_nothing_keeps_apart_is_refused(sources: Any, text_class_model: Any) -> None:
    architecture, model = prepared(sources, text_class_model, "lfm2")
    mixers.detach(model)
    with pytest.raises(Refused, match=r"packing: true[\s\S]*nothing keeps documents apart in layers of type conv"):
        probe.check(
            model, architecture, last_hidden, plain_config(packing=True), attention_name="sdpa", device=CPU
        )  # fmt: skip


def test_a_state_that_leaks_behind_its_first_block_is_seen(sources: Any, text_class_model: Any) -> None:
    """As a kernel does that is right for documents of one block and forgets the border where there are several."""
    architecture, model = prepared(sources, text_class_model, "qwen3_5")
    mixers.detach(model)

    def forgets(*given: Any) -> Any:
        documents = given[-1]
        return delta_rule(*given[:-1], as_one(documents) if documents.longest > 64 else documents)

    mixers.attach(model, architecture, {**mixers.KERNELS, "delta_rule": forgets})
    leak = find(model, architecture, packs=True)
    assert leak is not None and leak.what == OTHER and leak.path == "model.layers.0.linear_attn"


def plain_config(**keys: Any) -> Any:
    from halo_core import config

    needed = {"model_name_or_path": "tiny", "family": "lfm2", "dataset_name": "rows", "output_dir": "out"}
    return config.read(None, given={**needed, **keys}).config


ROWS = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c d"}]}] * 4


def run_config(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    return {
        "model_name_or_path": "tiny", "family": "lfm2", "dataset_name": "rows given in Python", "max_steps": 1,
        "output_dir": str(tmp_path / "run"), "save_strategy": "no", **keys,
    }  # fmt: skip


def run_of(tmp_path: Path, **keys: Any) -> None:
    halo_core.train(run_config(tmp_path, **keys), rows=ROWS)


def test_a_weight_that_is_no_number_is_told_by_the_step_and_is_no_leak(tmp_path: Path) -> None:
    halo_core.train(run_config(tmp_path, max_steps=1), rows=ROWS)
    file = tmp_path / "run" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.operator_norm.weight"][0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    again = run_config(tmp_path, model_name_or_path=str(tmp_path / "run"), output_dir=str(tmp_path / "again"))
    told = r"model\.layers\.0\.operator_norm\.weight holds a value that is not finite"
    for keys in ({}, {"packing": True, "max_length": 64}):
        with pytest.raises(TrainingStopped, match=told):
            halo_core.train({**again, **keys, "output_dir": f"{again['output_dir']}-{len(keys)}"}, rows=ROWS)


def test_a_run_on_packs_is_refused_before_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks("no documents", None, None, monkeypatch)
    with pytest.raises(Refused, match=r"packing: true[\s\S]*self_attn"):
        run_of(tmp_path, packing=True, max_length=64)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_whose_tokens_see_later_ones_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden, "padding_mask", seen_by_all)
    with pytest.raises(Refused, match=r"attn_implementation: sdpa[\s\S]*a later one does"):
        run_of(tmp_path, attn_implementation="sdpa")


def test_what_a_run_without_packs_cannot_compute_is_told_by_its_attention(
    sources: Any, text_class_model: Any
) -> None:
    architecture, model = prepared(sources, text_class_model, "qwen3")

    def cannot(*given: Any) -> Any:
        raise NotImplementedError("attention with a softcap is not computed")

    with pytest.raises(Refused, match=r"attn_implementation[\s\S]*softcap[\s\S]*attn_implementation: eager"):
        probe.check(model, architecture, cannot, plain_config(), attention_name="sdpa", device=CPU)
