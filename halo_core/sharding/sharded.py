"""What a training step asks of a model that is cut over processes: sums over them, and when to let go of weights.

Not for cutting (`shard.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from halo_core.sharding import norm
from halo_core.topology import Meshes


@dataclass(frozen=True, kw_only=True, eq=False)
class Sharded:
    """A model that `shard` has cut. Every method but `micro_batch` and `settle` is a collective of all processes."""

    model: Any
    meshes: Meshes
    reshard_after_backward: bool
    defer_grad_sync: bool

    def micro_batch(self, *, is_last: bool) -> None:
        """Say, before each micro-batch's forward, whether it is the last one of its step."""
        model: FSDPModule = self.model
        model.set_requires_gradient_sync(is_last or not self.defer_grad_sync)
        model.set_reshard_after_backward(is_last or self.reshard_after_backward)

    def settle(self) -> None:
        """Let go of gathered weights after forward passes that no backward followed: parameters are shards again."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def totals(self, values: Sequence[float], device: torch.device) -> list[float]:
        """Return each value summed over the processes with different rows, the same floats on every process.

        Between hosts where the group can, so that this waits for no work of `device`.
        """
        on_host = torch.device("cpu") in self.meshes.data._device_types
        total = torch.tensor(values, dtype=torch.float64, device="cpu" if on_host else device)
        dist.all_reduce(total, group=self.meshes.data)
        return total.tolist()

    def loss_and_norm(self, loss: Tensor, gradients: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss of all rows and the 2-norm of all gradients together, fp64 both.

        loss: this process's rows' share of it, a scalar.
        """
        loss = loss.detach().double()
        squares = norm.squares(gradients, loss.device)
        dist.all_reduce(loss, group=self.meshes.data)
        dist.all_reduce(squares)
        return loss, squares.sqrt()

    def first_not_finite(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Return the first name, anywhere, with an infinity or a NaN."""
        device = next((norm.local(tensor).device for tensor in tensors.values()), torch.device("cpu"))
        return norm.first_not_finite(tensors, device)
