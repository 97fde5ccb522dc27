"""The interface of a training method: which columns it reads, how rows become a batch, and its terms.

Not for arithmetic over a step: the loop sums every denominator over the global batch and divides once.
Shapes: B rows, S tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor

Head: TypeAlias = Callable[[Tensor], Tensor]
"""targets [B, S] int64 -> log-probability of each target [B, S] fp32, 0 where the target is ignored."""


class TokenBatch(Protocol):
    """What a method and the loop read of a batch."""

    @property
    def targets(self) -> Tensor:
        """Return what each position should predict: [B, S] int64, already shifted, ignored positions marked."""

    @property
    def weights(self) -> Tensor:
        """Return the weight of each target: [B, S] fp32, 0 where the target is ignored."""

    @property
    def row_ids(self) -> tuple[int, ...]:
        """Return the number in the data of each row, or of the row a piece is cut from, in the order of the batch."""

    @property
    def tokens(self) -> int:
        """Return the count of real tokens."""

    @property
    def padding_tokens(self) -> int:
        """Return the count of positions that only fill."""

    @property
    def supervised_tokens(self) -> int:
        """Return the count of targets to be learnt."""

    def to(self, device: Any) -> TokenBatch:
        """Return the batch on a device."""


class Method(Protocol):
    """A training method.

    A term is a pair (sum, denominator). The loss of a step is, over terms, the sum over its micro-batches divided
    by the denominator of the whole global batch, so accumulation and the number of processes change nothing.
    """

    @property
    def name(self) -> str:
        """Return the method's name as configured."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns of a data set that it can read; any one of them is enough."""

    def collate(self, rows: Sequence[Any], pad_id: int) -> TokenBatch:
        """Return rows as one padded batch."""

    def denominators(self, batch: TokenBatch) -> dict[str, float]:
        """Return each term's share of the global denominator; needs no forward."""

    def sums(self, batch: TokenBatch, head: Head) -> dict[str, Tensor]:
        """Return each term summed over the batch, as fp32 scalars with a gradient."""
