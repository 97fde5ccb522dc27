"""The chunked head against its reference: same values and gradients, and never more than a chunk of logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halo_core.kernels.head import chunked, reference

FP32, BF16 = 1e-5, 2e-2
"""Other orders of summation: in fp32, and of bf16 products."""


def given(dtype: torch.dtype, tokens: int = 37, hidden: int = 9, vocabulary: int = 21) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    targets = torch.randint(0, vocabulary, (tokens,))
    targets[::4] = reference.IGNORED
    rows = torch.randn(2 * tokens, hidden).to(dtype)[::2].requires_grad_()  # not contiguous
    return rows, torch.randn(vocabulary, hidden).to(dtype).requires_grad_(), targets


@pytest.mark.parametrize("rows_per_chunk", [1, 5, 27, 28, 100])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, FP32), (torch.bfloat16, BF16), (torch.float64, 1e-12)]
)
def test_values_and_gradients_equal_the_reference(
    rows_per_chunk: int, softcap: float | None, dtype: torch.dtype, tolerance: float
) -> None:
    hidden, weight, targets = given(dtype)
    upstream = torch.linspace(-1, 1, len(targets), dtype=torch.promote_types(dtype, torch.float32))
    results = []
    for ours in (True, False):
        if ours:
            out = chunked.log_probabilities(hidden, weight, targets, softcap, chunk_bytes=rows_per_chunk * 4 * 21)
        else:
            out = reference.log_probabilities(hidden, weight, targets, softcap)
        results.append((out, *torch.autograd.grad(out, (hidden, weight), upstream)))
    for left, right in zip(*results, strict=True):
        assert left.dtype == right.dtype
        assert float((left - right).detach().abs().max()) <= tolerance * max(1.0, float(right.detach().abs().max()))


def test_weight_gradient_is_summed_over_chunks_in_fp32() -> None:
    hidden, weight, targets = given(torch.bfloat16, tokens=4000)
    upstream = torch.ones(len(targets))
    ours = chunked.log_probabilities(hidden, weight, targets, chunk_bytes=4 * 21)
    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    exact = reference.log_probabilities(exact_hidden, exact_weight, targets)
    (gradient,) = torch.autograd.grad(ours, (weight,), upstream)
    (wanted,) = torch.autograd.grad(exact, (exact_weight,), upstream.double())
    # Each of the 3000 chunks is a bf16 product; summed in bf16 they would be off by half and more.
    assert float((gradient - wanted).abs().max() / wanted.abs().max()) < BF16


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize(("function", "holds_all"), [(chunked, False), (reference, True)])
def test_no_more_than_a_chunk_of_logits_exists_at_once(function: object, holds_all: bool) -> None:
    tokens, hidden_size, vocabulary = 64, 4, 500
    hidden, weight, targets = given(torch.float32, tokens, hidden_size, vocabulary)
    with _Largest() as seen:
        if holds_all:
            out = reference.log_probabilities(hidden, weight, targets)
        else:
            out = chunked.log_probabilities(hidden, weight, targets, chunk_bytes=4 * vocabulary * 8)
        out.sum().backward()
    assert (seen.numel >= 48 * vocabulary) is holds_all
    if not holds_all:
        assert seen.numel <= 8 * vocabulary


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_supervised_row_gives_zeros_with_a_graph(tokens: int) -> None:
    hidden, weight, _ = given(torch.float32, max(tokens, 1))
    hidden = hidden[:tokens]
    out = chunked.log_probabilities(hidden, weight, torch.full((tokens,), reference.IGNORED), chunk_bytes=84)
    assert torch.equal(out, torch.zeros(tokens))
    out.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()
