"""Gradients between backward and optimizer: fp32 accumulation, one global norm, how far to clip, what is not finite.

Not for loss arithmetic (`step.py`), nor for handing them over (`halo_core.optim.update`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

CLIP_EPSILON = 1e-6
"""Source: `torch.nn.utils.clip_grad_norm_`."""


@contextmanager
def fp32_accumulation(parameters: Mapping[str, Parameter], num_backwards: int) -> Iterator[dict[str, Tensor]]:
    """Yield a dictionary that fills with fp32 gradient sums of the parameters narrower than fp32.

    With one backward nothing accumulates and the dictionary stays empty. Otherwise each such gradient moves into
    the fp32 sum as soon as it is complete, so that no full set of narrow gradients is held beside the sums.
    """
    sums: dict[str, Tensor] = {}

    def mover(name: str) -> Callable[[Tensor], None]:
        def move(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            if name in sums:
                sums[name].add_(gradient)
            else:
                sums[name] = gradient.to(torch.float32)
            parameter.grad = None

        return move

    narrow = {} if num_backwards == 1 else {
        name: parameter for name, parameter in parameters.items()
        if parameter.requires_grad and parameter.dtype.itemsize < torch.float32.itemsize
    }
    handles = [
        parameter.register_post_accumulate_grad_hook(mover(name))  # type: ignore[no-untyped-call]
        for name, parameter in narrow.items()
    ]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()


def gathered(parameters: Mapping[str, Parameter], sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return every gradient of the step: the fp32 sum where there is one, the parameter's own otherwise."""
    found = {}
    for name, parameter in parameters.items():
        gradient = sums.get(name, parameter.grad)
        if gradient is not None:
            found[name] = gradient
    return found


def global_norm(gradients: Mapping[str, Tensor]) -> Tensor:
    """Return the 2-norm over all gradients together, a fp64 scalar; zero when there is none.

    fp64, because over a quarter of a million elements fp32 sums were off by a hundred thousandth (CPU).
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients.values()]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return `max_norm / (norm + 1e-6)`, at most 1, on the device of `norm`, that of all gradients everywhere."""
    return torch.clamp(max_norm / (norm + CLIP_EPSILON), max=1.0)


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with an infinity or a NaN, or None."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            return name
    return None
