"""Attention within documents as one masked softmax in plain torch: the specification of the attention kernel.

Not for speed or long rows: it holds a score for every pair of tokens, across documents too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halo_core.kernels.documents import Documents, seen_positions


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return what each token reads of its document, [T, h, d]; see `AttentionKernel` for the arguments.

    Everything between the arguments and the result is fp32 (fp64 for fp64 arguments).
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    heads, key_heads = query.shape[1], key.shape[1]
    grouped = query.to(dtype).unflatten(1, (key_heads, heads // key_heads))  # [T, g, h/g, d]
    scores = torch.einsum("tgrd,sgd->grts", grouped, key.to(dtype)) * scale
    scores = scores.masked_fill(~seen_positions(documents.numbers.view(1, -1), window), float("-inf"))
    if sinks is not None:
        column = sinks.to(dtype).view(key_heads, -1, 1, 1).expand(-1, -1, query.shape[0], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : query.shape[0]]
    read = torch.einsum("grts,sgd->tgrd", weights, value.to(dtype))
    return read.flatten(1, 2).to(query.dtype)
