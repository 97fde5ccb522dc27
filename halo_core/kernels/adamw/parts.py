"""What a kernel needs to step one parameter: this process's tensors, where they lie in the whole, and the numbers.

Not for state over steps: the optimizer keeps it and makes these anew for each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from halo_core.kernels.adamw.boxes import Box
from halo_core.kernels.adamw.rates import Rates

Rule: TypeAlias = Literal["exact", "rounded", "master"]
"""`exact`: all fp32. `rounded`: all bf16, rounded by chance. `master`: a bf16 weight beside fp32 master and moments."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """This process's elements of one parameter: tensors of one shape, in row-major order without gaps.

    weight: bf16 or fp32; first, second: the moments, of the weight's dtype, or fp32 beside a master; master: fp32 or
    None; gradient: bf16 or fp32. key: of the noise. step: counted from 1. boxes: where the elements lie.
    """

    weight: Tensor
    first: Tensor
    second: Tensor
    master: Tensor | None
    gradient: Tensor
    rates: Rates
    key: int
    step: int
    boxes: Sequence[Box]

    @property
    def rule(self) -> Rule:
        """Return how the weight is stepped."""
        if self.master is not None:
            return "master"
        return "exact" if self.weight.dtype == torch.float32 else "rounded"


class Kernel(Protocol):
    """Steps every part in place. scale: what gradients are multiplied by in fp32, a scalar on their device, or None."""

    def __call__(self, parts: Sequence[Part], scale: Tensor | None) -> None:
        """Step the parts."""
        ...
