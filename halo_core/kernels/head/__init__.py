"""The head: log-probabilities of target tokens from hidden states and the output embedding."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class HeadKernel(Protocol):
    """What every head kernel is; `reference.log_probabilities` specifies it."""

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = ...) -> Tensor:
        """Return log p(target) per row, [T] fp32."""
        ...
