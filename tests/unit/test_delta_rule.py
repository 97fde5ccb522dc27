"""The gated delta rule: the reference beside transformers' token by token, the chunked form beside the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from halo_core.kernels.delta_rule import chunked, reference
from halo_core.kernels.documents import Documents, find

FP64, FP32 = 1e-11, 2e-6
"""Sums in another order, of states that stay below ten."""
SEGMENTS = torch.tensor([[0] * 3 + [1] * 19 + [2] + [3] * 4, [1] * 13 + [2] * 14])
WHOLE = find(torch.ones(2, 9, dtype=torch.int64))


def inputs_of(rows: int, width: int, *, dtype: torch.dtype, keys: int = 2, values: int = 4) -> tuple[Tensor, ...]:
    """Return query, key, value, decay and beta, as far from neutral as a model has them."""
    shapes = ((rows, width, keys, 8), (rows, width, keys, 8), (rows, width, values, 6))
    drawn = [torch.randn(shape, dtype=dtype) for shape in shapes]
    decay, beta = -2 * torch.rand(rows, width, values, dtype=dtype), torch.rand(rows, width, values, dtype=dtype)
    return tuple(tensor.requires_grad_() for tensor in (*drawn, decay, beta))


def gaps(found: Tensor, wanted: Tensor, inputs: tuple[Tensor, ...]) -> float:
    """Return the largest difference of outputs, or of gradients under the same slope."""
    slope = torch.randn_like(found)
    pairs = [(found, wanted)]
    pairs += zip(torch.autograd.grad(found, inputs, slope), torch.autograd.grad(wanted, inputs, slope), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def test_reference_is_transformers_rule_on_each_document_alone() -> None:
    torch.manual_seed(0)
    inputs = inputs_of(*SEGMENTS.shape, dtype=torch.float32)
    documents = find(SEGMENTS)
    pieces, begin = [], 0
    for length in documents.lengths:
        q, k, v, g, beta = (tensor.flatten(0, 1)[None, begin : begin + length] for tensor in inputs)
        pieces.append(torch_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0])
        begin += length
    wanted = torch.cat(pieces, dim=1).view_as(inputs[2])
    assert gaps(reference.delta_rule(*inputs, documents), wanted, inputs) < FP32


@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
def test_chunks_compute_what_the_reference_does_token_by_token(chunk: int) -> None:
    torch.manual_seed(chunk)
    inputs = inputs_of(*SEGMENTS.shape, dtype=torch.float64)
    documents = find(SEGMENTS)
    wanted = reference.delta_rule(*inputs, documents)
    assert gaps(chunked.delta_rule(*inputs, documents, chunk), wanted, inputs) < FP64


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(1, 11), min_size=1, max_size=5), min_size=1, max_size=3), st.data())
def test_chunks_equal_the_reference_for_any_documents(rows: list[list[int]], data: Any) -> None:
    width = max(map(sum, rows))
    filled = [[n for n, length in enumerate(row, start=1) for _ in range(length)] for row in rows]
    documents = find(torch.tensor([ids + [0] * (width - len(ids)) for ids in filled]))
    torch.manual_seed(width)
    inputs = inputs_of(len(rows), width, dtype=torch.float64)
    chunk = data.draw(st.sampled_from([2, 5, 8]))
    assert gaps(chunked.delta_rule(*inputs, documents, chunk), reference.delta_rule(*inputs, documents), inputs) < FP64


def test_a_state_that_fades_to_nothing_or_not_at_all_stays_finite() -> None:
    torch.manual_seed(0)
    for decay in (-200.0, 0.0):
        inputs = inputs_of(2, 9, dtype=torch.float32)
        inputs = (*inputs[:3], torch.full_like(inputs[3], decay).requires_grad_(), inputs[4])
        found = chunked.delta_rule(*inputs, WHOLE)
        gap = gaps(found, reference.delta_rule(*inputs, WHOLE), inputs)
        assert gap < 10 * FP32, decay


def test_bf16_is_computed_in_fp32_and_rounded_once() -> None:
    torch.manual_seed(0)
    wide = inputs_of(2, 9, dtype=torch.float32)
    narrow = tuple(tensor.detach().bfloat16() for tensor in wide)
    found = chunked.delta_rule(*narrow, WHOLE)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, chunked.delta_rule(*(tensor.float() for tensor in narrow), WHOLE).bfloat16())


@pytest.mark.parametrize("kernel", [reference.delta_rule, chunked.delta_rule])
def test_no_token_is_no_error(kernel: Any) -> None:
    for rows, width in ((0, 4), (2, 0)):
        inputs = inputs_of(rows, width, dtype=torch.float32)
        empty: Documents = find(torch.zeros(rows, width, dtype=torch.int64))
        assert kernel(*inputs, empty).shape == (rows, width, 4, 6)
