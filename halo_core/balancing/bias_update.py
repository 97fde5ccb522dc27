"""Load balancing without a loss: after each optimizer step a selection bias moves one step towards equal load.

Not for choosing which tensor that is (a family's fact) nor for finding it in a model. Shapes: L MoE layers, E experts,
K experts per token, T tokens.

Source: "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class BiasUpdate:
    """Counts, layer by layer, which experts real tokens chose in training, and moves the biases.

    biases: path of a layer's experts -> its selection bias [E] fp32, changed in place; all of one size.
    rate: the size of a step. total: sums integer counts [L, E] over all ranks that see other rows.
    """

    def __init__(
        self, biases: Mapping[str, Tensor], rate: float, total: Callable[[Tensor], Tensor] = lambda counts: counts
    ) -> None:
        sizes = {(bias.shape, bias.dtype, bias.device) for bias in biases.values()}
        if len(sizes) != 1 or any(bias.dtype != torch.float32 for bias in biases.values()):
            raise ValueError(f"selection biases must be fp32 and of one size on one device, these are {sizes}")
        self._biases = dict(biases)
        self._rate = rate
        self._total = total
        first = next(iter(biases.values()))
        self._counts = torch.zeros(len(biases), len(first), dtype=torch.int64, device=first.device)  # [L, E]
        self._real: Tensor | None = None

    def listener(self, path: str) -> Callable[[Tensor], None]:
        """Return what a layer calls with the expert ids [T, K] of each forward pass."""
        counts = self._counts[list(self._biases).index(path)]

        def heard(ids: Tensor) -> None:
            if self._real is not None:
                # Added by index and not selected by mask: a mask would make the host wait for the device.
                counts.scatter_add_(0, ids.reshape(-1), self._real.repeat_interleave(ids.shape[-1]))

        return heard

    @contextmanager
    def counting(self, real: Tensor) -> Iterator[None]:
        """Count the choices made inside; `real` [B, S] is true where a token is no padding.

        Whatever happens outside, such as an evaluation or a recomputation in backward, is not counted.
        """
        self._real = real.reshape(-1).to(self._counts.device, torch.int64)
        try:
            yield
        finally:
            self._real = None

    def step(self) -> Tensor:
        """Move every bias by `rate` up where an expert had fewer tokens than the mean and down where it had more.

        Returns the counts [L, E] over all ranks since the last step, which begin anew.
        """
        counts = self._total(self._counts.clone())
        # sign(mean - count), in integers, so that every rank and every split of the batch decides alike.
        direction = torch.sign(counts.sum(dim=-1, keepdim=True) - counts * counts.shape[-1])
        for bias, moved in zip(self._biases.values(), direction, strict=True):
            bias.add_(moved.to(bias.dtype), alpha=self._rate)
        self._counts.zero_()
        return counts
