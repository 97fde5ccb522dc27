"""The attention socket: every architecture's attention goes through the core's function, on this model alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from halo_core import registry
from halo_core.attention import socket
from halo_core.bench import random_weights
from halo_core.data.batch import Batch
from halo_core.data.collate import collate
from halo_core.data.rows import Row
from halo_core.data.units import Pack
from halo_core.errors import Refused
from halo_core.kernels import documents as borders
from halo_core.kernels.attention import choice, reference
from halo_core.kernels.documents import Documents
from halo_core.models.build import build_meta
from halo_core.models.hidden import last_hidden
from halo_core.models.tiny import tiny_config
from halo_core.trainer.recompute import enable_recompute

ARCHITECTURES = {architecture.name: architecture for architecture in registry.load().architectures()}
FP32 = 1e-4
"""Relative to the largest number: two ways through four fp32 layers, some of which multiply what they are given."""
REFERENCE = partial(choice.kernel, "reference")


def built(name: str, attention: Any = None, **changed: Any) -> Any:
    architecture = ARCHITECTURES[name]
    config = tiny_config(architecture).to_dict() | changed
    model = build_meta(architecture, config, dtype=torch.float32, attention_kernel=attention)
    random_weights.fill(model, torch.device("cpu"), seed=3)
    with torch.no_grad():
        torch.manual_seed(5)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def rows(*lengths: int) -> list[Row]:
    torch.manual_seed(2)
    return [
        Row(row_id=i, input_ids=torch.randint(5, 2000, (n,)).tolist(), supervised=[True] * n)
        for i, n in enumerate(lengths)
    ]


SOME = rows(29, 1, 20, 6)
BATCHES = {
    "padded": collate(SOME, 1),
    "packed": collate([Pack(rows=tuple(SOME[:2])), Pack(rows=tuple(SOME[2:]))], 1),
    "flat": collate(SOME, 1, flatten=True),
}


def learnt(model: Any, batches: Sequence[Batch]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    hidden = []
    for batch in batches:
        states = last_hidden(model, batch)
        assert torch.isfinite(states).all(), "padding is finite too"
        hidden.append(states[batch.segment_ids > 0])
    whole = torch.cat(hidden)
    (whole * torch.linspace(-1, 1, whole.shape[-1])).square().sum().backward()
    return {"hidden": whole.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def assert_alike(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert found.keys() == right.keys()
    largest = max(float(tensor.abs().max()) for name, tensor in right.items() if name != "hidden")
    for name, tensor in right.items():
        scale = max(float(tensor.abs().max()), 0.0 if name == "hidden" else 1e-3 * largest)
        assert float((found[name] - tensor).abs().max()) <= FP32 * scale, name


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_layout_equals_eager_on_each_row_alone(name: str) -> None:
    right = learnt(built(name), [collate([row], 1) for row in SOME])
    model = built(name, REFERENCE)
    for layout, batch in BATCHES.items():
        assert_alike(learnt(model, [batch]), right), layout
    socket.check_called(model)


def test_a_kernel_that_misses_a_border_is_seen() -> None:
    def leaking(size: int) -> Any:
        def attend(query: Tensor, key: Tensor, value: Tensor, documents: Documents, **named: Any) -> Tensor:
            return reference.attend(query, key, value, joined, **named)

        return attend

    batch = BATCHES["flat"]
    joined = borders.find(torch.ones_like(batch.segment_ids))
    right = learnt(built("gpt_oss"), [collate([row], 1) for row in SOME])
    with pytest.raises(AssertionError):
        assert_alike(learnt(built("gpt_oss", leaking), [batch]), right)


def test_detached_model_is_as_transformers_made_it() -> None:
    plain, model = built("gpt_oss"), built("gpt_oss", REFERENCE)
    names = [name for name, _ in model.named_parameters()]
    assert model.config._attn_implementation == "halo"
    socket.detach(model)
    assert model.config._attn_implementation == "eager" and socket.of(model) is None
    assert not any("halo_attention" in vars(module) for module in model.modules())
    assert names == [name for name, _ in plain.named_parameters()]
    assert_alike(learnt(model, [BATCHES["padded"]]), learnt(plain, [BATCHES["padded"]]))


def test_transformers_registers_gain_one_name_each() -> None:
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    built("qwen3", REFERENCE)
    for mapping, register in zip(before, (AttentionInterface, AttentionMaskInterface), strict=True):
        assert {k: v for k, v in register._global_mapping.items() if k != "halo"} == {
            k: v for k, v in mapping.items() if k != "halo"
        }


def test_two_models_have_each_their_own_kernel() -> None:
    asked: list[str] = []

    def naming(name: str) -> Any:
        def of_head(size: int) -> Any:
            def attend(*given: Any, **named: Any) -> Tensor:
                asked.append(f"{name} {size}")
                return reference.attend(*given, **named)

            return attend

        return of_head

    first, second, plain = built("gemma4_moe", naming("one")), built("qwen3", naming("two")), built("qwen3")
    for model in (first, plain, second):
        last_hidden(model, BATCHES["flat"])
    assert asked == ["one 32", "one 64", "one 32", "one 64", *["two 16"] * 4], "by head size, layer by layer"


def test_a_layer_that_was_bypassed_is_named() -> None:
    model = built("lfm2", REFERENCE)
    with pytest.raises(RuntimeError, match=r"layers\.1\.self_attn, model\.layers\.3\.self_attn"):
        socket.check_called(model)
    last_hidden(model, BATCHES["flat"])
    socket.check_called(model)


def test_a_module_that_was_not_attached_says_so() -> None:
    model = built("qwen3", REFERENCE)
    other = built("qwen3")
    other.config._attn_implementation_internal = "halo"
    other.get_decoder().config._attn_implementation_internal = "halo"
    with pytest.raises(RuntimeError, match="without the core's socket"):
        last_hidden(other, BATCHES["padded"])
    with pytest.raises(RuntimeError, match="nobody said where the documents"):
        model(input_ids=BATCHES["padded"].input_ids, use_cache=False)
    with pytest.raises(ValueError, match="attached already"):
        socket.attach(model, decoder_layer="Qwen3DecoderLayer", kernel_of_head=REFERENCE)
    with pytest.raises(ValueError, match="not attached"):
        socket.detach(built("qwen3"))


def test_attention_that_the_kernels_do_not_compute_is_refused() -> None:
    with pytest.raises(Refused) as refused:
        built("qwen3", REFERENCE, attention_dropout=0.1)
    assert "has dropout 0.1" in refused.value.problems[0].why
    model = built("qwen3")
    with pytest.raises(Refused, match="no decoder layer"):
        socket.attach(model, decoder_layer="Other", kernel_of_head=REFERENCE)
    model.get_decoder().layers[0].self_attn.is_causal = False
    with pytest.raises(Refused, match="see later ones"):
        socket.attach(model, decoder_layer="Qwen3DecoderLayer", kernel_of_head=REFERENCE)


def test_recomputed_layers_know_the_documents_of_their_own_pass() -> None:
    model = built("lfm2_moe", REFERENCE)
    right = learnt(model, [BATCHES["packed"]])
    enable_recompute(model, routes=True)
    model.zero_grad(set_to_none=True)
    states = last_hidden(model, BATCHES["packed"])
    last_hidden(model, collate(SOME[:1], 1))  # another batch comes before the backward pass
    whole = states[BATCHES["packed"].segment_ids > 0]
    (whole * torch.linspace(-1, 1, whole.shape[-1])).square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_alike({"hidden": whole.detach(), **found}, right)
