"""The reference over many parameters, one after the other, a piece at a time.

Not for speed on a GPU, where it runs only for want of Triton: the noise is drawn on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from halo_core.kernels.adamw import reference
from halo_core.kernels.adamw.noise import drawn
from halo_core.kernels.adamw.parts import Part


def one_by_one(parts: Sequence[Part], scale: Tensor | None) -> None:
    """Step every part by the reference's rule."""
    for part in parts:
        tensors = (part.first, part.second, part.gradient)
        if part.rule == "exact":
            reference.exact(part.weight, *tensors, part.rates, scale)
        elif part.master is not None:
            reference.with_master(part.weight, part.master, *tensors, part.rates, scale)
        else:
            flat = [tensor.view(-1) for tensor in (part.weight, *tensors)]
            for where, words in drawn(part.key, part.step, part.boxes):
                weight, first, second, gradient = (tensor[where] for tensor in flat)
                reference.rounded(weight, first, second, gradient, part.rates, words.to(weight.device), scale)
