"""Attention within documents, one document after the other, by torch's scaled dot product attention.

Not for the usual head sizes, which flash kernels take: this is for the layers of a model whose heads are wider, so
that a long row of short documents still costs what the documents cost, and no mask of every pair is made.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from halo_core.kernels.attention import reference
from halo_core.kernels.documents import Documents, seen_positions
from halo_core.kernels.documents import find as find_documents


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

    With sinks each document goes through the reference.
    """
    # Given fewer key heads than query heads, torch leaves its fast kernels; given as many, it keeps them.
    copies = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
    parts = (tensor.split(documents.lengths) for tensor in (query, key, value))
    return torch.cat([_one(*three, scale=scale, window=window, sinks=sinks) for three in zip(*parts, strict=True)])


def _one(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Return what the tokens of one document read, [L, h, d]; all three arguments are [L, h, d]."""
    length = query.shape[0]
    if sinks is not None:
        whole = find_documents(torch.ones(1, length, dtype=torch.int64)).to(query.device)
        return reference.attend(query, key, value, whole, scale=scale, window=window, sinks=sinks)
    mask = None
    if window is not None and window < length:
        mask = seen_positions(torch.zeros(1, length, dtype=torch.int32, device=query.device), window)
    asking, offered, told = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    read = scaled_dot_product_attention(asking, offered, told, attn_mask=mask, is_causal=mask is None, scale=scale)
    return read.squeeze(0).transpose(0, 1)
