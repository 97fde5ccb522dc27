"""The gated delta rule in matrix products over chunks of one document, and a scan over chunks between them.

Not for a GPU that has a fused kernel. Shapes: B rows, h value heads, S positions, N chunks of C slots, dk and dv.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halo_core.kernels.delta_rule.reference import beginnings, heads_apart
from halo_core.kernels.documents import Documents

CHUNK = 64
"""Slots of one chunk: products of C x C for each, and a document of L tokens takes ceil(L / C) steps of the scan."""


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, documents: Documents, chunk: int = CHUNK
) -> Tensor:
    """Return what the reference returns, [B, S, hv, dv]; see there for the arguments. chunk: slots of one chunk.

    Within a chunk that finds state M, with G the running sum of `decay`, the corrections U [C, dv] solve
    `(I + A) U = beta (V - exp(G) K M)` where `A[i, j] = beta[i] exp(G[i] - G[j]) k[i].k[j]` for j < i; then
    `out[i] = exp(G[i]) q[i] M + sum over j <= i of exp(G[i] - G[j]) (q[i].k[j]) U[j]`.

    Source: Yang et al., Gated Delta Networks, arXiv 2412.06464, section 3.3.
    """
    if query.shape[0] * query.shape[1] == 0:
        return torch.zeros_like(value)
    slots, is_first = _chunks_apart(documents, query.shape[1], chunk)
    total = is_first.shape[1] * chunk
    apart = heads_apart(query, key, value, decay, beta)
    q, k, v, g, b = (_placed(tensor, slots, total).unflatten(2, (-1, chunk)) for tensor in apart)  # [B, h, N, C, ...]
    running = g.cumsum(dim=-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).triu(1)
    # Masked before exp: a sum that runs backwards overflows.
    fading = (running.unsqueeze(-1) - running.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()  # [B, h, N, C, C]
    system = b.unsqueeze(-1) * fading * (k @ k.transpose(-1, -2))  # its diagonal counts as ones
    left = running.exp().unsqueeze(-1)
    sides = torch.cat([v, left * k], dim=-1) * b.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    fresh, answer = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = fading * (q @ k.transpose(-1, -2))
    reading, writing = left * q, (running[..., -1:] - running).exp().unsqueeze(-1) * k
    kept = running[..., -1].exp()[..., None, None].masked_fill(is_first[:, None, :, None, None], 0.0)
    reading, answer = (t.masked_fill(is_first[:, None, :, None, None], 0.0) for t in (reading, answer))
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    read = []
    for number in range(is_first.shape[1]):
        corrections = fresh[:, :, number] - answer[:, :, number] @ state
        read.append(reading[:, :, number] @ state + within[:, :, number] @ corrections)
        state = kept[:, :, number] * state + writing[:, :, number].transpose(-1, -2) @ corrections
    out = torch.stack(read, dim=2).flatten(2, 3)  # [B, h, N * C, dv]
    found = out.gather(2, slots[:, None, :, None].expand(-1, out.shape[1], -1, out.shape[3]))
    return found.transpose(1, 2).to(query.dtype)


def _chunks_apart(documents: Documents, width: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Return each position's slot when every document begins a chunk, [B, S] int64, and which chunks begin one [B, N].

    N is that of the row with the most chunks.
    """
    numbers, borders = documents.numbers.long(), documents.borders.long()
    before = ((borders.diff() + chunk - 1) // chunk).cumsum(0)
    before = torch.cat([before.new_zeros(1), before])[numbers]  # chunks of earlier documents, [B, S]
    before = before - before[:, :1]
    positions = torch.arange(numbers.numel(), device=numbers.device).view_as(numbers)
    slots = before * chunk + positions - borders[numbers]
    is_first = torch.zeros(numbers.shape[0], _most_chunks(documents.lengths, width, chunk), device=numbers.device)
    is_first.scatter_add_(1, slots // chunk, beginnings(documents).float())
    return slots, is_first > 0


def _most_chunks(lengths: tuple[int, ...], width: int, chunk: int) -> int:
    most = chunks = filled = 0
    for length in lengths:
        chunks, filled = chunks + -(-length // chunk), filled + length
        most = max(most, chunks)
        if filled == width:
            chunks = filled = 0
    return most


def _placed(tensor: Tensor, slots: Tensor, total: int) -> Tensor:
    """Return [B, h, S, ...] laid out in `total` slots, zeros where no token is."""
    index = slots.view(slots.shape[0], 1, slots.shape[1], *[1] * (tensor.ndim - 3)).expand_as(tensor)
    return tensor.new_zeros(*tensor.shape[:2], total, *tensor.shape[3:]).scatter(2, index, tensor)
