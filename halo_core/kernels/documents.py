"""Where the documents of a batch begin and end, in the forms that kernels read.

Not for finding out what a document is: segment ids say that, 0 for padding and 1, 2, ... in each row. B rows of S
positions are read one after the other as T = B*S positions; a document never reaches over the end of its row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

KEYWORD = "halo_documents"
"""The keyword by which a batch's documents travel through a model to whatever keeps them apart, as one argument of
every layer: so they are right when layers are computed again in backward, whatever batches came in between."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """The D documents of a batch of B rows of S positions, in order. A stretch of padding counts as one of its own.

    Then every position belongs to a document and every document has a position, so no kernel meets an empty one and
    none needs to take padding out: what it computes there nobody reads.

    numbers: each position's document, counted over the whole batch from 0, [B, S] int32.
    borders: where each document begins among the T positions, and at last T, [D + 1] int32.
    lengths: tokens of each document, known without asking the device.
    has_several: whether any row holds more than one document besides its padding.
    is_padded: whether any position is padding.
    """

    numbers: Tensor
    borders: Tensor
    lengths: tuple[int, ...]
    has_several: bool
    is_padded: bool

    @property
    def longest(self) -> int:
        """Return the tokens of the longest document or stretch of padding."""
        return max(self.lengths, default=0)

    def to(self, device: torch.device | str) -> Documents:
        """Return the same documents with their tensors on `device`."""
        return replace(self, numbers=self.numbers.to(device), borders=self.borders.to(device))


def find(segment_ids: Tensor) -> Documents:
    """Return the documents of segment ids [B, S]; neighbours of one row with the same id are of one document.

    It waits for the device that `segment_ids` lie on: call it where they are made, on the CPU.
    """
    begins = torch.ones_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    real = segment_ids != 0
    flat = begins.flatten()
    end = torch.tensor([flat.numel()], device=flat.device)
    borders = torch.cat([flat.nonzero().squeeze(-1), end])
    in_a_row = (begins & real).sum(dim=1)
    return Documents(
        numbers=(flat.cumsum(0) - 1).view_as(segment_ids).int(),
        borders=borders.int(),
        lengths=tuple(borders.diff().tolist()),
        has_several=bool((in_a_row > 1).any()),
        is_padded=not bool(real.all()),
    )


def seen_positions(numbers: Tensor, window: int | None = None) -> Tensor:
    """Return whether position [b, i] sees position [b, j], [B, S, S] bool: same document, not later, within the window.

    numbers: each position's document [B, S]. window: how many positions are seen, the own one counted; None for all.
    Every position sees itself, so no row of attention is empty, also where nothing but padding is.
    """
    places = torch.arange(numbers.shape[1], device=numbers.device)
    distance = places.unsqueeze(1) - places
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return (numbers.unsqueeze(2) == numbers.unsqueeze(1)) & near
