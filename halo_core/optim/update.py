"""The one door from gradients to an optimizer's step, whether it takes them by name or from `parameter.grad`.

Not for making gradients, nor for the clip coefficient: `halo_core.trainer.gradients`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from halo_core.optim.adamw_bf16 import local


@runtime_checkable
class TakesGradients(Protocol):
    """An optimizer that takes gradients of any floating dtype by name, and multiplies them itself."""

    def update(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        """Step the parameters of these names by their gradients times `scale` (None: 1)."""
        ...


def update(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    scale: Tensor | None,
) -> None:
    """Step `parameters` by `gradients`, both by name; a parameter without a gradient is left as it is.

    scale: a scalar on the device that multiplies every gradient, or None. Nothing waits for its value.

    An optimizer with an `update` of its own gets both as they are: an fp32 sum over micro-batches reaches its
    arithmetic unrounded, and `scale` multiplies there. Any other is one of torch's, which reads `parameter.grad`:
    gradients are multiplied in place and rounded to the dtype of their parameter first.
    """
    if isinstance(optimizer, TakesGradients):
        optimizer.update(gradients, scale)
        return
    if scale is not None:
        scale_in_place(gradients.values(), scale)
    for name, gradient in gradients.items():
        parameter = parameters[name]
        if parameter.grad is not gradient:
            parameter.grad = gradient.to(parameter.dtype)
    optimizer.step()


def scale_in_place(gradients: Iterable[Tensor], scale: Tensor) -> None:
    """Multiply gradients by a scalar; of one that is cut over processes, this process's piece."""
    for gradient in gradients:
        local(gradient.detach()).mul_(scale)
