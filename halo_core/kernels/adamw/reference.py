"""AdamW in plain torch, one operation after the other: the specification, and what runs without a GPU.

Not for many parameters at once. Every operation rounds once, to fp32: no multiplication is fused with an addition, so
the fused kernel can give the same bits.

Source: Loshchilov and Hutter, "Decoupled weight decay regularization" (2019), as `torch.optim.AdamW` computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halo_core.kernels.adamw.rates import Rates

HALF = 16
"""Bits of an fp32 number below the last one that bf16 keeps."""
NOISE = (1 << HALF) - 1


def exact(
    weight: Tensor, first: Tensor, second: Tensor, gradient: Tensor, rates: Rates, scale: Tensor | None = None
) -> None:
    """Step `weight` and its moments in place, all fp32 and of one shape.

    gradient: bf16 or fp32, cast to fp32 before anything else. scale: what it is then multiplied by, a scalar.
    """
    stepped = _stepped(weight, first, second, gradient, rates, scale)
    for old, new in zip((weight, first, second), stepped, strict=True):
        old.copy_(new)


def rounded(
    weight: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    rates: Rates,
    words: Tensor,
    scale: Tensor | None = None,
) -> None:
    """Step `weight` and its moments in place, all bf16 and of one shape; computed in fp32.

    The weight and the second moment are rounded up or down by chance, so that they are right in the mean; the first
    moment to the nearest. The weight moves by this step's moments as they are before they are rounded.

    words: int64 of that shape, 32 random bits each. gradient and scale: as in `exact`.
    """
    new_weight, new_first, new_second = _stepped(
        weight.float(), first.float(), second.float(), gradient, rates, scale
    )
    weight.copy_(by_chance(new_weight, words & NOISE))
    first.copy_(to_nearest(new_first))
    second.copy_(by_chance(new_second, words >> HALF))


def with_master(
    weight: Tensor,
    master: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    rates: Rates,
    scale: Tensor | None = None,
) -> None:
    """Step `master` and its moments in place, all fp32, and give the bf16 `weight` the master's nearest value."""
    exact(master, first, second, gradient, rates, scale)
    weight.copy_(to_nearest(master))


def by_chance(values: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 `values` as bf16, rounded away from zero with the probability that is right in the mean.

    noise: int64 from 0 to 65535 of the same shape. A value beyond the largest bf16 may become infinite, as it may when
    rounded to the nearest. Infinities stay; whatever is no number stays none.
    """
    return _cut(values, noise)


def to_nearest(values: Tensor) -> Tensor:
    """Return fp32 `values` as the nearest bf16, of two equally near ones the even."""
    return _cut(values, (NOISE >> 1) + ((_bits(values) >> HALF) & 1))


def _stepped(
    weight: Tensor, first: Tensor, second: Tensor, gradient: Tensor, rates: Rates, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weight and both moments after the step, fp32."""
    gradient = gradient.float()
    if scale is not None:
        gradient = gradient * scale.float()
    first = first * rates.beta1 + gradient * rates.rest1
    second = second * rates.beta2 + gradient * gradient * rates.rest2
    # By way of fp64: torch's fp32 root on a CPU is one bit off for a fifth of all numbers (2.13, AVX-512).
    root = second.double().sqrt().float() * rates.second_root + rates.eps
    return weight * rates.decay - first / root * rates.step_size, first, second


def _bits(values: Tensor) -> Tensor:
    """Return the 32 bits of fp32 numbers, as int64 from 0."""
    return values.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def _cut(values: Tensor, up: Tensor) -> Tensor:
    """Return the upper half of the bits of `values` plus `up`, as bf16.

    A value that is no number is left alone: its bits would overflow into those of zero. What arithmetic makes of such
    values has its highest bits set, so the upper half says it still.
    """
    bits = torch.where(values == values, _bits(values) + up, _bits(values))
    upper = (bits >> HALF) & NOISE
    return torch.where(upper >= 1 << (HALF - 1), upper - (1 << HALF), upper).to(torch.int16).view(torch.bfloat16)
