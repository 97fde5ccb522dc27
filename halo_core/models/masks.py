"""What a batch's rows let each attention layer see: nothing of padding, nothing of another document, nothing later.

Not for layers that mix tokens otherwise (`mixers.py`), nor for attention kernels that read borders of documents
themselves. transformers finds packed documents by itself only in some models and only without a mask, so the core says
it to all of them. Shapes: B rows, S positions.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from transformers import PretrainedConfig

from halo_core.kernels.documents import Documents, seen_positions

FULL, SLIDING = "full_attention", "sliding_attention"
"""transformers' names for a layer that sees everything before it, and for one that sees `sliding_window` positions."""


def padding_mask(segment_ids: Tensor, documents: Documents) -> Tensor | None:
    """Return the mask of real tokens [B, S] int64 for rows of one document each, or None when every token is real.

    None, and not ones: only without a mask does transformers take its fast paths. A row of nothing but padding
    counts as real: attention over no token at all is not a number, and nobody reads that row.
    """
    if not documents.is_padded:
        return None
    real = segment_ids != 0
    return (real | ~real.any(dim=1, keepdim=True)).long()


def masks_apart(
    config: PretrainedConfig, documents: Documents, dtype: torch.dtype, elsewhere: Collection[str] = ()
) -> Tensor | dict[str, Tensor | None] | None:
    """Return what a model with this configuration takes as `attention_mask` for rows of several documents.

    A model of one kind of layer takes that kind's mask [B, 1, S, S], another a dictionary of them by layer type.
    dtype: of hidden states. elsewhere: layer types that keep documents apart by other means; they get None.

    Raises:
        NotImplementedError: for a layer type or an attention implementation that nothing here keeps apart.
    """
    masks = {}
    for kind in dict.fromkeys(layer_types(config)):
        masks[kind] = None if kind in elsewhere else _mask(config, kind, documents, dtype)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def layer_types(config: PretrainedConfig) -> list[str]:
    """Return transformers' name for the kind of each layer; a model without such names has one kind only."""
    named: list[str] | None = getattr(config, "layer_types", None)
    if named:
        return list(named)
    return [FULL if getattr(config, "sliding_window", None) is None else SLIDING] * config.num_hidden_layers


def _mask(config: PretrainedConfig, kind: str, documents: Documents, dtype: torch.dtype) -> Tensor:
    if kind not in (FULL, SLIDING):
        raise NotImplementedError(f"nothing keeps documents apart in layers of type {kind}")
    seen = seen_positions(documents.numbers, config.sliding_window if kind == SLIDING else None).unsqueeze(1)
    implementation = config._attn_implementation
    if implementation == "sdpa":
        return seen
    if implementation == "eager":
        hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=seen.device)
        return torch.where(seen, torch.zeros_like(hidden), hidden)
    raise NotImplementedError(f"nothing keeps documents apart under attention {implementation}")
