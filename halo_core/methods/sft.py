"""Supervised fine-tuning: the negative log-probability of each supervised token, times its weight.

Not for choosing which tokens are supervised: that is decided where rows are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halo_core.methods.method import Head, TokenBatch

TERM = "token_loss"


@dataclass(frozen=True, kw_only=True)
class Sft:
    """Supervised fine-tuning. `collate_rows(rows, pad_id)` pads rows and shifts targets."""

    collate_rows: Callable[[Sequence[Any], int], TokenBatch]
    name: str = "sft"
    columns: tuple[str, ...] = ("messages", "prompt", "text")

    def collate(self, rows: Sequence[Any], pad_id: int) -> TokenBatch:
        """Return rows as one padded batch."""
        return self.collate_rows(rows, pad_id)

    def denominators(self, batch: TokenBatch) -> dict[str, float]:
        """Return the sum of target weights: the number of supervised tokens when every weight is 1."""
        return {TERM: float(batch.weights.sum(dtype=torch.float64))}

    def sums(self, batch: TokenBatch, head: Head) -> dict[str, Tensor]:
        """Return the weighted sum of negative log-probabilities, a fp32 scalar."""
        return {TERM: -(head(batch.targets) * batch.weights).sum()}
