"""One optimizer step: accumulation, the global denominator, clipping, and what stops it. Not for the loop around it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from halo_core.data.batch import IGNORED
from halo_core.data.collate import collate
from halo_core.data.rows import Row
from halo_core.methods.sft import Sft
from halo_core.optim.update import update
from halo_core.trainer import gradients
from halo_core.trainer.step import run_step
from halo_core.trainer.stopped import StepFault

CPU = torch.device("cpu")
SFT = Sft(collate_rows=collate)
WEIGHTS_TOLERANCE = 1e-6
"""fp32 sums in another order, after SGD steps at rate 0.1."""


def moe() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=40, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
                            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                            num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, pad_token_id=0)
    return Qwen3MoeForCausalLM(config).train()


def moe_hidden(model: Any, batch: Any) -> torch.Tensor:
    mask = (batch.segment_ids > 0).to(torch.int64)
    return model.model(input_ids=batch.input_ids, attention_mask=mask, use_cache=False).last_hidden_state


def moe_head(model: Any) -> Any:
    return lambda hidden, targets: -nn.functional.cross_entropy(
        model.lm_head(hidden), targets, reduction="none", ignore_index=IGNORED)


def step(model: Any, parts: list[list[Row]], optimizer: Any, *, hidden: Any, head: Any, clip: float = 0.0) -> Any:
    batches = [SFT.collate(part, 0) for part in parts]
    return run_step(model=model, model_hidden=hidden, head=head, method=SFT, batches=batches, optimizer=optimizer,
                    max_grad_norm=clip, device=CPU)


def split(rows: list[Row], size: int) -> list[list[Row]]:
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def test_accumulation_over_unequal_rows_gives_the_same_weights(small: Any) -> None:
    rows = small.rows(24, longest=20)
    trained, reports = {}, {}
    for size in (8, 4, 1):
        model = moe()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reports[size] = [step(model, split(rows[first : first + 8], size), optimizer, hidden=moe_hidden,
                              head=moe_head(model)) for first in (0, 8, 16)]
        trained[size] = model.state_dict()
    moved = max((trained[8][name] - value).abs().max() for name, value in moe().state_dict().items())
    assert moved > 1000 * WEIGHTS_TOLERANCE
    for size in (4, 1):
        for name, value in trained[size].items():
            assert (value - trained[8][name]).abs().max() < WEIGHTS_TOLERANCE, name
        for one, other in zip(reports[size], reports[8], strict=True):
            assert one.loss == pytest.approx(other.loss, abs=1e-6) and one.tokens == other.tokens
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)


def test_mean_of_micro_batch_means_would_differ_so_the_comparison_can_fail(small: Any) -> None:
    rows = small.rows(8, longest=20)
    means = []
    model = moe()
    for part in split(rows, 4):
        batch = SFT.collate(part, 0)
        total = SFT.sums(batch, lambda targets, batch=batch: moe_head(model)(
            moe_hidden(model, batch).flatten(0, 1), targets.flatten()).view(targets.shape))["token_loss"]
        means.append(float(total.detach()) / batch.supervised_tokens)
    whole = step(model, [rows], torch.optim.SGD(model.parameters(), lr=0.0), hidden=moe_hidden, head=moe_head(model))
    assert abs(sum(means) / 2 - whole.loss) > 1e-4


def test_loss_and_gradients_are_those_of_transformers_own_loss(small: Any) -> None:
    rows = small.rows(6)
    model = moe()
    reference = copy.deepcopy(model)
    batch = SFT.collate(rows, 0)
    labels = torch.full_like(batch.input_ids, IGNORED)
    labels[:, 1:] = batch.targets[:, :-1]
    expected = reference(input_ids=batch.input_ids, attention_mask=(batch.segment_ids > 0).long(), labels=labels).loss
    expected.backward()
    outcome = step(model, [rows[:4], rows[4:]], torch.optim.SGD(model.parameters(), lr=1.0), hidden=moe_hidden,
                   head=moe_head(model))
    assert outcome.loss == pytest.approx(expected.item(), abs=1e-6)
    for (name, after), before in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert before.grad is not None
        assert (before - before.grad - after).abs().max() < WEIGHTS_TOLERANCE, name


def test_short_window_is_divided_by_its_own_tokens(small: Any) -> None:
    rows = small.rows(2)
    results = []
    for parts in ([rows[:1], rows[1:]], [rows]):
        torch.manual_seed(0)
        model = small.model()
        outcome = step(model, parts, torch.optim.SGD(model.parameters(), lr=0.1), hidden=small.model_hidden,
                       head=small.head_of(model))
        results.append((outcome, model))
    assert results[0][0].loss == pytest.approx(results[1][0].loss, abs=1e-6)
    for one, other in zip(results[0][1].parameters(), results[1][1].parameters(), strict=True):
        assert (one - other).abs().max() < WEIGHTS_TOLERANCE


def test_row_without_supervision_among_eight_changes_nothing(small: Any) -> None:
    rows = small.rows(8, longest=20)
    silent = Row(row_id=99, input_ids=[1, 2, 3], supervised=[False] * 3)
    trained = []
    for parts in ([rows], [[*rows, silent]], [rows, [silent]]):
        model = moe()
        outcome = step(model, parts, torch.optim.SGD(model.parameters(), lr=0.1), hidden=moe_hidden,
                       head=moe_head(model))
        trained.append((outcome.loss, outcome.supervised_tokens, model.state_dict()))
    for loss, supervised, weights in trained[1:]:
        assert loss == pytest.approx(trained[0][0], abs=1e-6) and supervised == trained[0][1]
        assert all((weights[n] - trained[0][2][n]).abs().max() < WEIGHTS_TOLERANCE for n in weights)


def test_step_without_any_supervised_token_is_a_named_fault(small: Any) -> None:
    silent = [Row(row_id=7 + n, input_ids=[1, 2, 3], supervised=[False] * 3) for n in range(2)]
    model = small.model()
    with pytest.raises(StepFault, match=r"none of the 2 rows of this step has a supervised token .*row 7, .* 3 tokens"):
        step(model, [silent], torch.optim.SGD(model.parameters(), lr=0.1), hidden=small.model_hidden,
             head=small.head_of(model))


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_clipping_is_torchs_own(small: Any, max_norm: float) -> None:
    rows = small.rows(4)
    torch.manual_seed(0)
    model = small.model()
    reference = copy.deepcopy(model)
    batch = SFT.collate(rows, 0)
    hidden = small.model_hidden(reference, batch)
    total = SFT.sums(batch, lambda targets: small.head_of(reference)(hidden.flatten(0, 1), targets.flatten())
                     .view(targets.shape))["token_loss"]
    (total / batch.supervised_tokens).backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    outcome = step(model, [rows], torch.optim.SGD(model.parameters(), lr=0.5), hidden=small.model_hidden,
                   head=small.head_of(model), clip=max_norm)
    assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-6)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("max_norm", [0.0, None])
def test_no_clipping_still_reports_the_norm(small: Any, max_norm: float | None) -> None:
    model = small.model()
    before = model.scale.detach().clone()
    outcome = step(model, [small.rows(4)], torch.optim.SGD(model.parameters(), lr=1e-3), hidden=small.model_hidden,
                   head=small.head_of(model), clip=max_norm)  # type: ignore[arg-type]
    assert outcome.grad_norm > 0 and not torch.equal(before, model.scale)


def test_narrow_gradients_accumulate_in_fp32() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    # 256 + 63 ones is 319; in bf16 every addition of 1 to 256 is rounded away.
    factors = [256.0] + [1.0] * 63
    with gradients.fp32_accumulation({"weight": weight}, len(factors)) as sums:
        for factor in factors:
            (weight * torch.tensor(factor, dtype=torch.bfloat16)).sum().backward()
            assert weight.grad is None
    assert float(sums["weight"]) == 319.0 and sums["weight"].dtype == torch.float32
    update(torch.optim.SGD([weight], lr=0.0), {"weight": weight}, sums, None)
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16 and float(weight.grad) == 320.0
    weight.grad = None
    for factor in factors:
        (weight * torch.tensor(factor, dtype=torch.bfloat16)).sum().backward()
    assert float(weight.grad) == 256.0, "torch's own accumulation loses them, so the test can fail"


def test_bf16_model_steps_from_fp32_sums(small: Any) -> None:
    rows = small.rows(8)
    torch.manual_seed(0)
    model = small.model(dtype=torch.bfloat16)
    exact = copy.deepcopy(model).float()
    for one in (model, exact):
        step(one, split(rows, 1), torch.optim.SGD(one.parameters(), lr=1.0), hidden=small.model_hidden,
             head=small.head_of(one))
    assert model.mix.weight.dtype == torch.bfloat16
    assert (model.mix.weight.float() - exact.mix.weight).abs().max() < 2e-2  # a few steps of bf16 near 1


@pytest.mark.parametrize("parts", [1, 4])
def test_planted_nan_weight_is_named_and_the_optimizer_is_not_stepped(small: Any, parts: int) -> None:
    model = small.model()
    with torch.no_grad():
        model.mix.weight[3, 4] = float("nan")
    before = model.embed.weight.detach().clone()
    with pytest.raises(StepFault, match=r"the weight mix\.weight holds a value that is not finite"):
        step(model, split(small.rows(4), 4 // parts), torch.optim.SGD(model.parameters(), lr=0.1),
             hidden=small.model_hidden, head=small.head_of(model))
    assert torch.equal(before, model.embed.weight)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradient_that_is_not_finite_is_named_although_the_loss_is_finite(small: Any) -> None:
    model = small.model()
    model.mix.bias.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(StepFault, match=r"first in the gradient of mix\.bias"):
        step(model, [small.rows(4)], torch.optim.SGD(model.parameters(), lr=0.1), hidden=small.model_hidden,
             head=small.head_of(model))


def test_frozen_parameters_stay_and_have_no_gradient(small: Any) -> None:
    model = small.model()
    model.mix.requires_grad_(False)
    before = model.mix.weight.clone()
    step(model, split(small.rows(4), 2), torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
         hidden=small.model_hidden, head=small.head_of(model))
    assert torch.equal(before, model.mix.weight)
