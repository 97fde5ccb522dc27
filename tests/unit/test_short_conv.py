"""The reference of the short convolution beside each document alone through torch's own convolution."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from halo_core.kernels.documents import find
from halo_core.kernels.short_conv.reference import short_conv

FP64 = 1e-12
SEGMENTS = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 2, 3, 3, 3, 0], [1] * 5 + [2] * 7])


def alone(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Return each document of `SEGMENTS` through a padded convolution of its own."""
    documents = find(SEGMENTS)
    out, begin = [], 0
    flat = inputs.transpose(0, 1).flatten(1)  # [C, B * S]
    for length in documents.lengths:
        piece = functional.pad(flat[:, begin : begin + length], (weight.shape[1] - 1, 0))
        out.append(functional.conv1d(piece[None], weight[:, None], bias, groups=len(weight))[0])
        begin += length
    convolved = torch.cat(out, dim=1).unflatten(1, tuple(SEGMENTS.shape)).transpose(0, 1)
    return functional.silu(convolved) if activation == "silu" else convolved


@pytest.mark.parametrize("taps", [1, 3, 4, 20])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("biased", [False, True])
def test_each_document_is_convolved_as_if_alone(taps: int, activation: str | None, biased: bool) -> None:
    torch.manual_seed(taps)
    made = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 12), (5, taps), (5,))]
    inputs, weight, bias = made
    used = made if biased else made[:2]
    found = short_conv(inputs, weight, bias if biased else None, activation, find(SEGMENTS))
    wanted = alone(inputs, weight, bias if biased else None, activation)
    pairs = [(found, wanted)]
    slope = torch.randn_like(found)
    pairs += zip(torch.autograd.grad(found, used, slope), torch.autograd.grad(wanted, used, slope), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < FP64


def test_bf16_is_summed_in_fp32_and_rounded_once() -> None:
    torch.manual_seed(0)
    inputs, weight, bias = torch.randn(2, 5, 12).bfloat16(), torch.randn(5, 4).bfloat16(), torch.randn(5).bfloat16()
    found = short_conv(inputs, weight, bias, "silu", find(SEGMENTS))
    wide = short_conv(inputs.float(), weight.float(), bias.float(), "silu", find(SEGMENTS))
    assert torch.equal(found, wide.bfloat16())


def test_strides_do_not_matter_and_no_position_is_no_error() -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(2, 12, 5).transpose(1, 2), torch.randn(4, 5).T
    found = short_conv(inputs, weight, None, None, find(SEGMENTS))
    assert torch.equal(found, short_conv(inputs.contiguous(), weight.contiguous(), None, None, find(SEGMENTS)))
    empty = find(torch.zeros(2, 0, dtype=torch.int64))
    assert short_conv(torch.zeros(2, 5, 0), weight, None, "silu", empty).shape == (2, 5, 0)


def test_an_unknown_activation_is_an_error() -> None:
    with pytest.raises(KeyError):
        short_conv(torch.zeros(1, 1, 2), torch.zeros(1, 2), None, "gelu", find(torch.ones(1, 2)))
