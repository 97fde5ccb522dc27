"""Attention within documents by the flash kernels that torch carries for CUDA, with windows and trainable sinks.

Not for fp32, for heads wider than these kernels take, nor for other devices: `choice.py` says what runs here. Shapes:
T tokens, h query heads, g key heads, d head size, D documents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halo_core.kernels.documents import Documents

SHORTEST = 2
"""The least that is said to be the longest document.

For one token a document the kernel regroups query heads and hands back its log-sums in another order.
"""


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

    A sink is exact with a kernel that knows none. With the kernel's log-sum `l` over the scores of a token, the sum
    with the sink `s` is `l' = logaddexp(l, s)`, so the result is the kernel's times `exp(l - l')`; the kernel's own
    backward pass, given that result and `l'` for its own, yields the gradients of the scores as they are with the sink.
    """
    longest = max(documents.longest, SHORTEST)
    result: Tensor = _Flash.apply(query, key, value, sinks, documents.borders, longest, scale, window)
    return result


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        borders: Tensor,
        longest: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        out, log_sums, random_state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, borders, borders, longest, longest, 0.0, True, False, scale=scale, **_window(window)
        )
        if log_sums.shape != (query.shape[1], query.shape[0]):
            raise NotImplementedError(
                f"torch {torch.__version__} returns log-sums of shape {tuple(log_sums.shape)} for packed rows, "
                f"where {(query.shape[1], query.shape[0])} is read"
            )
        if sinks is not None:
            out, log_sums = with_sinks(out, log_sums, sinks)
        context.save_for_backward(query, key, value, sinks, borders, out, log_sums, random_state, unused)
        context.longest, context.scale, context.window = longest, scale, window
        return out

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, borders, out, log_sums, random_state, unused = context.saved_tensors
        gradient = gradients[0].contiguous()
        longest = context.longest
        to_query, to_key, to_value = torch.ops.aten._flash_attention_backward(
            gradient, query, key, value, out, log_sums, borders, borders, longest, longest, 0.0, True,
            random_state, unused, scale=context.scale, **_window(context.window),
        )  # fmt: skip
        to_sinks = None if sinks is None else sinks_gradient(gradient, out, log_sums, sinks)
        return to_query, to_key, to_value, to_sinks, None, None, None, None


def with_sinks(out: Tensor, log_sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (result, log-sums) with sinks [h] from those without: out [T, h, d] is changed, log_sums [h, T] is not."""
    whole = torch.logaddexp(log_sums, sinks.to(log_sums.dtype).unsqueeze(1))
    # Multiplied in the log-sums' dtype and rounded once: the product is made in fp32 before it is stored.
    out.mul_(torch.exp(log_sums - whole).t().unsqueeze(-1))
    return out, whole


def sinks_gradient(gradient: Tensor, out: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks [h]: gradient and out [T, h, d], log_sums [h, T], the latter two with the sinks."""
    products = gradient.to(log_sums.dtype).mul_(out).sum(dim=-1)  # [T, h]
    weight = torch.exp(sinks.to(log_sums.dtype).unsqueeze(1) - log_sums)  # [h, T]
    return -(weight * products.t()).sum(dim=1).to(sinks.dtype)


def _window(window: int | None) -> dict[str, int | None]:
    if window is None:
        return {"window_size_left": None, "window_size_right": None}
    return {"window_size_left": window - 1, "window_size_right": 0}
