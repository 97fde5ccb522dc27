"""The door from gradients to optimizers: torch's get what they always got, others sums and coefficient unrounded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from halo_core.data.collate import collate
from halo_core.methods.sft import Sft
from halo_core.optim.adamw_bf16 import AdamWBF16, AdamWFP32
from halo_core.optim.build import build_optimizer
from halo_core.optim.update import TakesGradients, update
from halo_core.trainer import gradients
from halo_core.trainer.step import run_step

CPU = torch.device("cpu")
KEYS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}


def two_parameters(dtype: torch.dtype = torch.bfloat16) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {"a": nn.Parameter(torch.randn(40, 3).to(dtype)), "b": nn.Parameter(torch.randn(7).to(dtype))}


def sums() -> dict[str, torch.Tensor]:
    """Return fp32 gradients that no bf16 number holds."""
    torch.manual_seed(1)
    return {"a": torch.randn(40, 3), "b": torch.randn(7)}


def in_bf16(parameters: dict[str, nn.Parameter], kind: type = AdamWBF16) -> Any:
    return kind([{"params": list(parameters.items()), "weight_decay": 0.1}], seed=5, **KEYS)


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.AdamW(p, fused=True, **KEYS),
    lambda p: torch.optim.AdamW(p, **KEYS),
])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torchs_optimizers_get_what_clipping_in_place_and_rounding_once_give(make: Any, dtype: torch.dtype) -> None:
    found, wanted = two_parameters(dtype), two_parameters(dtype)
    norm = gradients.global_norm(sums())
    scale = gradients.clip_coefficient(norm, 0.5)
    one, other = make(found.values()), make(wanted.values())
    for _ in range(3):
        update(one, found, sums(), scale)
        for name, total in sums().items():
            wanted[name].grad = total.mul_(torch.clamp(0.5 / (norm + 1e-6), max=1.0)).to(dtype)
        other.step()
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_gradient_of_the_parameters_own_dtype_is_scaled_where_it_lies() -> None:
    parameters = two_parameters()
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    own = {name: parameter.grad for name, parameter in parameters.items()}
    update(torch.optim.SGD(parameters.values(), lr=0.0), parameters, own, torch.tensor(0.25, dtype=torch.float64))
    assert all(parameter.grad is own[name] for name, parameter in parameters.items())
    assert all(float(gradient.max()) == 0.25 == float(gradient.min()) for gradient in own.values())


@pytest.mark.parametrize("kind", [AdamWBF16, AdamWFP32])
def test_others_get_fp32_sums_and_the_coefficient_as_they_are(kind: type) -> None:
    found, wanted, rounded = two_parameters(), two_parameters(), two_parameters()
    scale = torch.tensor(0.3, dtype=torch.float64)
    for parameters, given in (
        (found, None), (wanted, {n: g * scale.float() for n, g in sums().items()}),
        (rounded, {n: (g * scale.float()).bfloat16() for n, g in sums().items()}),
    ):
        optimizer = in_bf16(parameters, kind)
        assert isinstance(optimizer, TakesGradients)
        given_sums = sums()
        update(optimizer, parameters, given_sums if given is None else given, scale if given is None else None)
        assert all(torch.equal(given_sums[name], total) for name, total in sums().items()), "they are left alone"
        assert all(parameter.grad is None for parameter in parameters.values())
        found_moments = [optimizer.state[parameter]["exp_avg_sq"].clone() for parameter in parameters.values()]
        if parameters is found:
            moments = found_moments
        elif parameters is wanted:
            assert all(torch.equal(one, other) for one, other in zip(moments, found_moments, strict=True))
        else:
            assert not all(torch.equal(one, other) for one, other in zip(moments, found_moments, strict=True)), (
                "gradients rounded before would be seen"
            )
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def stepped(small: Any, *, parts: int, **keys: Any) -> Any:
    torch.manual_seed(0)
    model = small.model(dtype=torch.bfloat16)
    config = small.settings(bf16=True, **keys)
    optimizer = build_optimizer(model, config)
    method, rows = Sft(collate_rows=collate), small.rows(8)
    size = len(rows) // parts
    for _ in range(3):
        batches = [method.collate(rows[first : first + size], 0) for first in range(0, len(rows), size)]
        outcome = run_step(
            model=model, model_hidden=small.model_hidden, head=small.head_of(model), method=method, batches=batches,
            optimizer=optimizer, max_grad_norm=config.max_grad_norm, device=CPU,
            sums_in_fp32=config.grad_accumulation_dtype == "float32",
        )
    return model, optimizer, outcome


@pytest.mark.parametrize("parts", [1, 4])
def test_a_step_in_bf16_with_stochastic_rounding_repeats_bit_by_bit(small: Any, parts: int) -> None:
    (one, optimizer, outcome), (other, _, again) = stepped(small, parts=parts), stepped(small, parts=parts)
    assert isinstance(optimizer, AdamWBF16) and outcome == again
    assert small.same(dict(one.state_dict()), dict(other.state_dict()))
    torch.manual_seed(0)
    assert not small.same(dict(one.state_dict()), dict(small.model(dtype=torch.bfloat16).state_dict()))
    assert all(parameter.grad is None for parameter in one.parameters())
    elsewhere, _, _ = stepped(small, parts=parts, seed=2)
    assert not small.same(dict(one.state_dict()), dict(elsewhere.state_dict())), "the seed is the noise's"


def test_sums_of_micro_batches_are_fp32_unless_asked_otherwise(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[torch.dtype]] = []

    class Watched(AdamWBF16):
        def update(self, found: Any, scale: Any = None) -> None:
            seen.append({gradient.dtype for gradient in found.values()})
            super().update(found, scale)

    monkeypatch.setattr("halo_core.optim.build.AdamWBF16", Watched)
    for parts, dtype, expected in ((1, "float32", "bfloat16"), (4, "float32", "float32"), (4, "bfloat16", "bfloat16")):
        stepped(small, parts=parts, grad_accumulation_dtype=dtype)
        assert seen[-1] == {getattr(torch, expected)}


def test_gradient_that_only_fp32_sums_keep_reaches_the_weight(small: Any) -> None:
    """256 and 63 times 1: bf16 sums stay 256, so that its first moment is another."""
    found = {}
    for in_fp32 in (True, False):
        weight = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
        named = {"weight": weight}
        with gradients.fp32_accumulation(named, 64 if in_fp32 else 1) as totals:
            for factor in [256.0] + [1.0] * 63:
                (weight * torch.tensor(factor, dtype=torch.bfloat16)).sum().backward()
        optimizer = in_bf16({"weight": weight})
        update(optimizer, named, gradients.gathered(named, totals), None)
        found[in_fp32] = float(optimizer.state[weight]["exp_avg"][0])
    assert found[True] == pytest.approx(31.9, rel=2**-8) and found[False] == pytest.approx(25.6, rel=2**-8)


def test_unclipped_run_gives_no_coefficient_and_a_zero_gradient_no_fault() -> None:
    assert float(gradients.clip_coefficient(torch.tensor(0.0, dtype=torch.float64), 1.0)) == 1.0
    assert float(gradients.clip_coefficient(torch.tensor(4.0, dtype=torch.float64), 1.0)) == pytest.approx(0.25)
    parameters = two_parameters()
    before = copy.deepcopy(parameters)
    update(in_bf16(parameters), parameters, {}, None)
    assert all(torch.equal(parameters[name], before[name]) for name in before), "no gradient, no step and no decay"
