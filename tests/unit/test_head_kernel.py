"""The head kernel's reference against torch's own cross entropy over whole logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halo_core.kernels.head.reference import IGNORED, log_probabilities

FP32 = 1e-6
"""Two orders of summation in fp32."""


def by_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    """Return log-probabilities by whole logits in fp64."""
    logits = hidden.double() @ weight.double().T
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)


def given(tokens: int = 11, hidden: int = 7, vocabulary: int = 13) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(0, vocabulary, (tokens,))
    targets[::3] = IGNORED
    return torch.randn(tokens, hidden, requires_grad=True), torch.randn(vocabulary, hidden, requires_grad=True), targets


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_log_probabilities_and_gradients_equal_cross_entropy(softcap: float | None) -> None:
    hidden, weight, targets = given()
    ours = log_probabilities(hidden, weight, targets, softcap)
    theirs = by_cross_entropy(hidden, weight, targets, softcap)
    assert ours.dtype == torch.float32
    assert float((ours - theirs).detach().abs().max()) < 10 * FP32
    direction = torch.linspace(-1, 1, len(targets))
    for left, right in zip(
        torch.autograd.grad(ours, (hidden, weight), direction),
        torch.autograd.grad(theirs, (hidden, weight), direction.double()),
        strict=True,
    ):
        assert float((left - right).abs().max()) < 10 * FP32


def test_softcap_changes_the_result() -> None:
    hidden, weight, targets = given()
    capped = log_probabilities(hidden, weight, targets, 3.0)
    assert float((capped - log_probabilities(hidden, weight, targets)).detach().abs().max()) > 1e-2


def test_ignored_rows_are_zero_and_not_even_read() -> None:
    hidden, weight, targets = given()
    poisoned = hidden.detach().clone()
    poisoned[targets == IGNORED] = float("nan")
    assert torch.equal(log_probabilities(poisoned, weight, targets)[targets == IGNORED], torch.zeros(4))
    assert bool(log_probabilities(poisoned, weight, targets).isfinite().all())


@pytest.mark.parametrize("tokens", [0, 5])
def test_without_any_target_the_result_is_zeros_with_zero_gradients(tokens: int) -> None:
    hidden, weight, _ = given(tokens)
    result = log_probabilities(hidden, weight, torch.full((tokens,), IGNORED))
    assert torch.equal(result, torch.zeros(tokens))
    gradients = torch.autograd.grad(result.sum(), (hidden, weight))
    assert all(float(gradient.abs().sum()) == 0.0 for gradient in gradients)


def test_bf16_input_is_normalised_in_fp32() -> None:
    hidden, weight, targets = given()
    half = log_probabilities(hidden.bfloat16(), weight.bfloat16(), targets)
    assert half.dtype == torch.float32
    expected = by_cross_entropy(hidden.bfloat16(), weight.bfloat16(), targets, None)
    # Only the logits are rounded: half a bf16 step (2^-9) of logits below 8, on target and normaliser.
    assert float((half - expected).detach().abs().max()) < 2 * 8 * 2**-9


def test_reference_passes_torchs_numeric_gradient_check_in_fp64() -> None:
    hidden, weight, targets = given(5)
    rows, vocabulary = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: log_probabilities(h, w, targets, 2.0), (rows, vocabulary))
