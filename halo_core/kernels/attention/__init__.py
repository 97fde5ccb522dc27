"""Causal attention over documents that lie one after the other, by their borders: no mask, no padding, no cache.

Not for finding attention in a model (`halo_core.attention`). `reference.py` is the specification, `flash.py` runs
torch's own flash kernels on CUDA, `wide.py` the heads that those do not take, `choice.py` says which can run.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from halo_core.kernels.documents import Documents


class AttentionKernel(Protocol):
    """What every form of the kernel is. Shapes: T tokens, h query heads, g key heads, d head size.

    query [T, h, d]; key and value [T, g, d], where g divides h and each key head serves h/g neighbouring query heads.
    documents: of the T tokens, on their device; padding belongs to documents of its own. scale: of the scores.
    window: a token sees itself and the window - 1 tokens before it; None sees all of its document up to itself.
    sinks: [h], a score per head that takes part in the softmax and has no value; trainable.
    Returns [T, h, d] in the dtype of `query`.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents,
        *,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return what each token reads of its document, [T, h, d]."""
        ...
