"""Log-probabilities of target tokens a chunk of rows at a time, so that no whole logits are held.

Not for small batches: where the logits fit one chunk, the reference keeps them and recomputes nothing. Shapes:
T tokens, N supervised ones, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halo_core.kernels.head import reference

CHUNK_BYTES = 256 * 2**20
"""The most that the fp32 logits of one chunk take."""


def log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    softcap: float | None = None,
    ignored: int = reference.IGNORED,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Return what the reference returns, [T] fp32; see there for the arguments.

    chunk_bytes: the most bytes of fp32 logits at one time. The backward pass multiplies with the vocabulary again and
    sums the weight's gradient over chunks in fp32.
    """
    rows_per_chunk = max(1, chunk_bytes // (4 * weight.shape[0]))
    rows = torch.nonzero(targets != ignored).squeeze(-1)  # [N]
    chosen: Tensor
    if len(rows) <= rows_per_chunk:
        chosen = reference.of_supervised(hidden[rows], weight, targets[rows], softcap)
    else:
        chosen = _Chunked.apply(hidden[rows], weight, targets[rows], softcap, rows_per_chunk)
    return torch.zeros(targets.shape, dtype=chosen.dtype, device=hidden.device).index_put((rows,), chosen)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, rows_per_chunk: int
    ) -> Tensor:
        chosen, normalisers = [], []
        for rows, ids in zip(hidden.split(rows_per_chunk), targets.split(rows_per_chunk), strict=True):
            logits = reference.capped_logits(rows, weight, softcap)
            normalisers.append(logits.logsumexp(dim=-1))
            chosen.append(logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - normalisers[-1])
        context.save_for_backward(hidden, weight, targets, torch.cat(normalisers))
        context.softcap, context.rows_per_chunk = softcap, rows_per_chunk
        return torch.cat(chosen)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normaliser = context.saved_tensors
        size, (gradient,) = context.rows_per_chunk, gradients
        to_hidden: list[Tensor] = []
        to_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        chunks = (tensor.split(size) for tensor in (hidden, targets, normaliser, gradient))
        for rows, ids, logsumexp, upstream in zip(*chunks, strict=True):
            logits = reference.capped_logits(rows, weight, context.softcap)
            # d log p(target) / d logits = one-hot(target) - softmax
            slope = torch.exp(logits - logsumexp.unsqueeze(-1)).neg_().mul_(upstream.unsqueeze(-1))
            slope.scatter_add_(-1, ids.unsqueeze(-1), upstream.unsqueeze(-1))
            if context.softcap is not None:
                slope.mul_(1 - (logits / context.softcap).square())
            slope = slope.to(weight.dtype)
            if context.needs_input_grad[0]:
                to_hidden.append(slope @ weight)
            if context.needs_input_grad[1]:
                to_weight += slope.T @ rows
        return (
            torch.cat(to_hidden) if to_hidden else None,
            to_weight.to(weight.dtype) if context.needs_input_grad[1] else None,
            None,
            None,
            None,
        )
