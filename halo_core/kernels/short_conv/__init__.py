"""A causal convolution over a few positions, channel by channel, that never reads another document.

`reference.py` specifies it.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from halo_core.kernels.documents import Documents


class ShortConvKernel(Protocol):
    """What every short convolution is; `reference.short_conv` specifies it."""

    def __call__(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, documents: Documents
    ) -> Tensor:
        """Return the convolved channels, [B, C, S] in the dtype of `inputs`."""
        ...
