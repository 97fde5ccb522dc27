"""The grouped experts kernel against the loop that specifies it, and the loop against per-token arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from halo_core.kernels.experts.choice import grouped_obstacle, kernel
from halo_core.kernels.experts.grouped import grouped
from halo_core.kernels.experts.reference import reference
from halo_core.kernels.experts.weights import ExpertWeights

FP32 = 1e-6
"""Two orders of summation of numbers of size one, in fp32."""
BF16 = 2e-2
"""A few bf16 steps (2^-8) of numbers of size one; relative to the largest entry."""


def silu_gate(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def interleaved_clamped_gate(rows: Tensor) -> Tensor:
    gate, up = rows[..., ::2].clamp(max=7.0), rows[..., 1::2].clamp(min=-7.0, max=7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@dataclass(frozen=True, kw_only=True)
class Form:
    """One layout of expert weights."""

    is_transposed: bool = False
    has_bias: bool = False
    has_gate: bool = True
    activation: Callable[[Tensor], Tensor] = silu_gate


FORMS = {
    "plain": Form(),
    "transposed_biased_interleaved": Form(is_transposed=True, has_bias=True, activation=interleaved_clamped_gate),
    "without_gate": Form(has_gate=False, activation=torch.nn.functional.gelu),
    "biased": Form(has_bias=True),
}


def make(form: Form, *, experts: int, hidden: int, width: int, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    first = 2 * width if form.has_gate else width

    def tensor(*shape: int) -> Tensor:
        return (torch.randn(shape) * 0.3).to(dtype).requires_grad_()

    return ExpertWeights(
        gate_up=tensor(experts, hidden, first) if form.is_transposed else tensor(experts, first, hidden),
        down=tensor(experts, width, hidden) if form.is_transposed else tensor(experts, hidden, width),
        gate_up_bias=tensor(experts, first) if form.has_bias else None,
        down_bias=tensor(experts, hidden) if form.has_bias else None,
        activation=form.activation,
        is_transposed=form.is_transposed,
        is_concatenated=form.activation is silu_gate,
        has_bias=form.has_bias,
        has_gate=form.has_gate,
    )


def by_hand(weights: ExpertWeights, hidden: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    """Return the layer's output token by token, expert by expert."""
    rows = []
    for token in range(hidden.shape[0]):
        total = torch.zeros(hidden.shape[1], dtype=hidden.dtype)
        for slot in range(ids.shape[1]):
            expert = int(ids[token, slot])
            if expert == weights.num_experts:
                continue
            first, second = weights.gate_up[expert], weights.down[expert]
            if weights.is_transposed:
                first, second = first.T, second.T
            inner = first @ hidden[token]
            inner = inner if weights.gate_up_bias is None else inner + weights.gate_up_bias[expert]
            outer = second @ weights.activation(inner.unsqueeze(0)).squeeze(0)
            outer = outer if weights.down_bias is None else outer + weights.down_bias[expert]
            total = total + routing[token, slot] * outer
        rows.append(total)
    return torch.stack(rows) if rows else hidden * 0


def inputs(tokens: int, experts: int, hidden: int, slots: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    ids = torch.stack([torch.randperm(experts)[:slots] for _ in range(tokens)]) if tokens else torch.zeros(0, slots)
    rows = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    return [rows, ids.long(), torch.rand(tokens, slots).to(dtype).requires_grad_()]


def leaves(weights: ExpertWeights, hidden: Tensor, routing: Tensor) -> list[Tensor]:
    held = [weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias, hidden, routing]
    return [tensor for tensor in held if tensor is not None]


def run(call: Callable[..., Tensor], weights: ExpertWeights, *given: Tensor) -> tuple[Tensor, list[Tensor]]:
    output = call(weights, *given)
    direction = torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype)
    return output, list(torch.autograd.grad(output, leaves(weights, given[0], given[2]), direction, allow_unused=False))


def worst(left: list[Tensor], right: list[Tensor]) -> float:
    pairs = zip(left, right, strict=True)
    gaps = [(a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1) for a, b in pairs if a.numel()]
    return float(torch.stack(gaps).max()) if gaps else 0.0  # a nan stays one


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_reference_is_the_per_token_sum_of_expert_outputs(form: Form) -> None:
    torch.manual_seed(0)
    weights = make(form, experts=5, hidden=7, width=3)
    given = inputs(6, 5, 7)
    output, gradients = run(reference, weights, *given)
    expected, expected_gradients = run(by_hand, weights, *given)
    assert worst([output, *gradients], [expected, *expected_gradients]) < FP32


@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_grouped_equals_reference_in_output_and_every_gradient(form: Form, tokens: int) -> None:
    torch.manual_seed(1)
    weights = make(form, experts=8, hidden=20, width=12)
    given = inputs(tokens, 8, 20)
    for may_skip in (False, True):
        output, gradients = run(kernel("grouped", may_skip=may_skip), weights, *given)
        expected, expected_gradients = run(reference, weights, *given)
        assert worst([output, *gradients], [expected, *expected_gradients]) < FP32


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_grouped_equals_reference_in_bf16(form: Form) -> None:
    torch.manual_seed(2)
    weights = make(form, experts=4, hidden=24, width=8, dtype=torch.bfloat16)
    given = inputs(17, 4, 24, dtype=torch.bfloat16)
    output, gradients = run(grouped, weights, *given)
    expected, expected_gradients = run(reference, weights, *given)
    assert output.dtype == torch.bfloat16
    assert worst([output, *gradients], [expected, *expected_gradients]) < BF16


class PoisonOutput(torch.autograd.Function):
    """Puts nan into rows that no expert owns, in the forward pass only."""

    @staticmethod
    def forward(ctx: object, rows: Tensor, end: Tensor) -> Tensor:
        return rows.index_fill(0, torch.arange(int(end), len(rows)), float("nan"))

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class PoisonGradient(torch.autograd.Function):
    """Puts nan into rows that no expert owns, in the backward pass only."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, rows: Tensor, end: Tensor) -> Tensor:
        ctx.end = int(end)
        return rows.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return PoisonOutput.apply(gradients[0], torch.tensor(ctx.end)), None


def poisoned_grouped_mm(rows: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
    """torch's grouped_mm with the worst that memory can hold where it leaves its results uninitialised."""
    return PoisonOutput.apply(grouped_mm(PoisonGradient.apply(rows, offs[-1]), weight, offs=offs), offs[-1])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_skipped_slots_add_nothing_whatever_memory_held_before(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halo_core.kernels.experts.grouped.grouped_mm", poisoned_grouped_mm)
    torch.manual_seed(3)
    weights = make(form, experts=4, hidden=16, width=8)
    hidden, ids, routing = inputs(12, 4, 16)
    ids[::2, 0] = 4
    ids[3] = 4
    output, gradients = run(grouped, weights, hidden, ids, routing)
    expected, expected_gradients = run(reference, weights, hidden, ids, routing)
    assert worst([output, *gradients], [expected, *expected_gradients]) < FP32
    assert torch.equal(output[3], torch.zeros(16))
    assert float(gradients[-1][3].abs().max()) == 0.0


def test_skipped_slots_would_be_seen_by_the_comparison() -> None:
    torch.manual_seed(3)
    weights = make(FORMS["biased"], experts=4, hidden=16, width=8)
    hidden, ids, routing = inputs(12, 4, 16)
    skipping = ids.clone()
    skipping[0, 0] = 4
    left, _ = run(grouped, weights, hidden, skipping, routing)
    right, _ = run(reference, weights, hidden, ids, routing)
    assert worst([left], [right]) > 100 * FP32


@pytest.mark.parametrize("call", [reference, grouped])
def test_expert_without_tokens_has_a_zero_gradient_and_not_none(call: Callable[..., Tensor]) -> None:
    torch.manual_seed(4)
    weights = make(FORMS["transposed_biased_interleaved"], experts=4, hidden=16, width=8)
    hidden, _, routing = inputs(5, 4, 16)
    ids = torch.tensor([[0, 2]] * 5)
    _, gradients = run(call, weights, hidden, ids, routing)
    for gradient in gradients[:4]:
        assert float(gradient[[1, 3]].abs().max()) == 0.0
        assert float(gradient[[0, 2]].abs().max()) > 0.0


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_expanded_incoming_gradient_and_strided_input_are_accepted(form: Form) -> None:
    torch.manual_seed(5)
    weights = make(form, experts=4, hidden=16, width=8)
    hidden, ids, routing = inputs(9, 4, 16)
    strided = torch.randn(16, 18).requires_grad_()
    results = []
    for call in (grouped, reference):
        output = call(weights, strided.T[::2], ids.T.contiguous().T, routing.T.contiguous().T)
        results.append(torch.autograd.grad(output.sum(), [*leaves(weights, strided, routing)]))
    assert worst(list(results[0]), list(results[1])) < 10 * FP32  # sums of 16 columns, all of one sign
    assert hidden.shape == (9, 16)


def test_bf16_gradients_of_many_tokens_are_as_close_to_fp64_as_bf16_allows() -> None:
    torch.manual_seed(8)
    form = FORMS["transposed_biased_interleaved"]
    weights = make(form, experts=2, hidden=16, width=8, dtype=torch.bfloat16)
    given = inputs(3000, 2, 16, dtype=torch.bfloat16)

    def loss_gradients(call: Callable[..., Tensor], held: ExpertWeights, *rest: Tensor) -> list[Tensor]:
        # All of one sign, so that a sum rounded at every row runs into a wall.
        return list(torch.autograd.grad(call(held, *rest).sum(), leaves(held, rest[0], rest[2])))

    def in_fp64(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().double().requires_grad_()

    exact = replace(
        weights, gate_up=in_fp64(weights.gate_up), down=in_fp64(weights.down),
        gate_up_bias=in_fp64(weights.gate_up_bias), down_bias=in_fp64(weights.down_bias),
    )
    expected = loss_gradients(reference, exact, in_fp64(given[0]), given[1], in_fp64(given[2]))
    for call in (grouped, reference):
        assert worst([g.double() for g in loss_gradients(call, weights, *given)], expected) < BF16


def test_fp32_routing_over_bf16_experts_gives_bf16_and_fp32_routing_gradients() -> None:
    torch.manual_seed(6)
    weights = make(FORMS["plain"], experts=4, hidden=16, width=8, dtype=torch.bfloat16)
    hidden, ids, _ = inputs(9, 4, 16, dtype=torch.bfloat16)
    routing = torch.rand(9, 2, requires_grad=True)
    for call in (grouped, reference):
        output, gradients = run(call, weights, hidden, ids, routing)
        assert output.dtype == torch.bfloat16
        assert gradients[-1].dtype == torch.float32


def test_reference_passes_torchs_numeric_gradient_check_in_fp64() -> None:
    torch.manual_seed(7)
    weights = make(FORMS["transposed_biased_interleaved"], experts=3, hidden=5, width=3, dtype=torch.float64)
    hidden, ids, routing = inputs(4, 3, 5, dtype=torch.float64)

    def layer(gate_up: Tensor, down: Tensor, rows: Tensor, routed: Tensor) -> Tensor:
        return reference(replace(weights, gate_up=gate_up, down=down), rows, ids, routed)

    assert torch.autograd.gradcheck(layer, (weights.gate_up, weights.down, hidden, routing))


@pytest.mark.parametrize(
    ("dtype", "hidden_size", "width", "word"),
    [
        (torch.float64, 64, 32, "float64"),
        (torch.float32, 63, 32, "hidden size 63"),
        (torch.float32, 64, 30, "expert width 30"),
        (torch.bfloat16, 64, 12, "expert width 12"),
    ],
)
def test_what_grouped_mm_cannot_multiply_is_known_beforehand(
    dtype: torch.dtype, hidden_size: int, width: int, word: str
) -> None:
    device = torch.device("cpu")
    why = grouped_obstacle(dtype=dtype, device=device, hidden_size=hidden_size, width=width)
    assert why is not None
    assert word in why
    weights = make(FORMS["plain"], experts=4, hidden=hidden_size, width=width, dtype=dtype)
    with pytest.raises(Exception):  # noqa: B017 - the obstacle is real: torch refuses, in words of its own
        run(grouped, weights, *inputs(9, 4, hidden_size, dtype=dtype))


@pytest.mark.parametrize(("dtype", "hidden_size", "width"), [(torch.float32, 20, 12), (torch.bfloat16, 24, 8)])
def test_what_the_rule_allows_runs(dtype: torch.dtype, hidden_size: int, width: int) -> None:
    device = torch.device("cpu")
    assert grouped_obstacle(dtype=dtype, device=device, hidden_size=hidden_size, width=width) is None
    weights = make(FORMS["plain"], experts=4, hidden=hidden_size, width=width, dtype=dtype)
    run(grouped, weights, *inputs(9, 4, hidden_size, dtype=dtype))
