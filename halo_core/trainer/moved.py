"""The check that training changes the weights at all.

Not for judging progress: it fires only when every single parameter is bit for bit what it was.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from halo_core import process_group
from halo_core.sharding.norm import local
from halo_core.trainer.stopped import StepFault

STEPS = 3
"""Steps with a rate above zero after which something must have changed."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MovedCheck:
    """Remembers one integer per parameter and compares it after `STEPS` steps with a rate above zero."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._before = bit_sums(self._parameters)
        self._steps = 0

    def after_step(self, learning_rate: float, grad_norm: float) -> None:
        """Count a step; compare once.

        Raises:
            StepFault: after `STEPS` steps no parameter has changed.
        """
        if learning_rate == 0.0 or self._steps == STEPS:
            return
        self._steps += 1
        if self._steps == STEPS and not process_group.any_rank(bit_sums(self._parameters) != self._before):
            why = ("every gradient is zero" if grad_norm == 0.0 else
                   f"the updates at learning_rate {learning_rate} are smaller than the weights' dtype can hold")
            raise StepFault(what=f"no weight changed in {STEPS} steps: {why}",
                            remedy="check that the right tokens are supervised" if grad_norm == 0.0
                            else "raise learning_rate, or set bf16: true, which rounds by chance, or dtype: float32")


def bit_sums(parameters: Mapping[str, Tensor]) -> list[int]:
    """Return, per parameter, the sum of its elements read as integers; of one cut over processes, of the part here."""
    sums = [local(tensor.detach()).view(_BITS[tensor.dtype.itemsize]).sum(dtype=torch.int64).cpu()
            for tensor in parameters.values()]
    return [int(total) for total in sums]
