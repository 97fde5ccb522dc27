"""The specification of the gated delta rule in plain torch, one token after the other. Not for speed.

Shapes: B rows, S positions, hk heads of queries and keys of size dk, hv heads of values of size dv.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halo_core.kernels.documents import Documents

EPSILON = 1e-6
"""Added to a squared length before its root. Source: the normalisation inside flash-linear-attention's kernels."""


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, documents: Documents) -> Tensor:
    """Return what each token reads from its document's state, [B, S, hv, dv].

    query, key: [B, S, hk, dk], scaled to unit length here, the query then by `dk ** -0.5`. value: [B, S, hv, dv], hv a
    multiple of hk; each key head serves hv / hk neighbours. decay: [B, S, hv], the logarithm of what each token leaves
    of the state, never above 0. beta: [B, S, hv], how much of its correction a token writes. documents: of the same B
    rows of S positions; the first token of each finds a state of zeros.

    With the state M [dk, dv] of one head: `M <- exp(decay) M`; `M <- M + k (beta (v - M^T k))^T`; read `M^T q`.
    Computed in fp32 at least, returned in the dtype of `query`.

    Source: Yang et al., Gated Delta Networks, arXiv 2412.06464, equation 10.
    """
    queries, keys, values, decay, beta = heads_apart(query, key, value, decay, beta)
    begins = beginnings(documents)
    state = queries.new_zeros(*queries.shape[:2], queries.shape[-1], values.shape[-1])  # [B, hv, dk, dv]
    read = []
    for position in range(query.shape[1]):
        state = state.masked_fill(begins[:, position, None, None, None], 0.0)
        state = state * decay[..., position, None, None].exp()
        k, v, q = keys[:, :, position], values[:, :, position], queries[:, :, position]
        correction = (v - torch.einsum("bhkv,bhk->bhv", state, k)) * beta[..., position, None]
        state = state + k.unsqueeze(-1) * correction.unsqueeze(-2)
        read.append(torch.einsum("bhkv,bhk->bhv", state, q))
    return torch.stack(read, dim=1).to(query.dtype) if read else torch.zeros_like(value)


def heads_apart(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return query, key, value [B, hv, S, d] and decay, beta [B, hv, S], in fp32 at least; queries and keys of unit
    length, repeated for the heads they serve, queries scaled.
    """
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    query, key, value, decay, beta = (tensor.transpose(1, 2).to(wide) for tensor in tensors)
    served = value.shape[1] // key.shape[1]
    query, key = (_unit(tensor).repeat_interleave(served, dim=1) for tensor in (query, key))
    return query * query.shape[-1] ** -0.5, key, value, decay, beta


def beginnings(documents: Documents) -> Tensor:
    """Return where documents begin, [B, S] bool; a row begins one always."""
    numbers = documents.numbers
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return begins


def _unit(tensor: Tensor) -> Tensor:
    return tensor * torch.rsqrt(tensor.square().sum(dim=-1, keepdim=True) + EPSILON)
