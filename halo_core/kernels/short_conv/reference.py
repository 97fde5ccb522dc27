"""The specification of the short convolution in plain torch: a sum over taps, each masked where it would leave its
document. Not for speed. Shapes: B rows, C channels, S positions, K taps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from halo_core.kernels.documents import Documents


def short_conv(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, documents: Documents
) -> Tensor:
    """Return `activation(bias + sum over k of weight[:, k] * inputs[..., s - (K - 1) + k])`, [B, C, S].

    inputs: [B, C, S]. weight: [C, K], its last tap is the position itself. bias: [C]. activation: "silu" or None.
    documents: of the same B rows of S positions; a tap that lies in another document, or before the row, reads zero.
    Summed in fp32 at least, returned in the dtype of `inputs`.
    """
    wide = torch.promote_types(inputs.dtype, torch.float32)
    channels, taps = inputs.to(wide), weight.to(wide)
    numbers, width = documents.numbers, inputs.shape[-1]
    total = channels * taps[:, -1, None]
    for back in range(1, min(taps.shape[-1], width)):
        same = functional.pad(numbers[:, back:] == numbers[:, :-back], (back, 0))  # [B, S]
        earlier = functional.pad(channels[..., :-back], (back, 0))
        total = total + earlier * same[:, None] * taps[:, -1 - back, None]
    if bias is not None:
        total = total + bias.to(wide)[:, None]
    return ACTIVATIONS[activation](total).to(inputs.dtype)


def _as_it_is(channels: Tensor) -> Tensor:
    return channels


ACTIVATIONS: Mapping[str | None, Callable[[Tensor], Tensor]] = MappingProxyType(
    {None: _as_it_is, "silu": functional.silu}
)
"""What may follow the sum."""
