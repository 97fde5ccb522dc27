"""The numbers of one parameter's step, computed on the host in double precision and rounded once.

Not for schedules: the rate of a step is given.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a step multiplies by; every number is one that fp32 holds.

    decay: 1 - lr * weight_decay. beta1, beta2 and what is left of them to one. step_size: lr over the first moment's
    bias correction. second_root: one over the root of the second moment's. eps is added to the corrected root.
    """

    decay: float
    beta1: float
    rest1: float
    beta2: float
    rest2: float
    step_size: float
    second_root: float
    eps: float


def rates(
    *, step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> Rates:
    """Return the numbers of a parameter's step, counted from 1."""
    beta1, beta2 = betas
    return Rates(
        decay=fp32(1.0 - lr * weight_decay),
        beta1=fp32(beta1), rest1=fp32(1.0 - beta1),
        beta2=fp32(beta2), rest2=fp32(1.0 - beta2),
        step_size=fp32(lr / (1.0 - beta1**step)),
        second_root=fp32(1.0 / math.sqrt(1.0 - beta2**step)),
        eps=fp32(eps),
    )  # fmt: skip


def fp32(value: float) -> float:
    """Return the number that fp32 holds nearest to `value`."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
