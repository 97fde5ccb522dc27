"""The batch: what one forward pass of one rank is given, as one frozen object of tensors.

Not for making it out of rows (`collate.py`), nor for choosing the rows (`order.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halo_core.kernels.documents import Documents

IGNORED = -100
"""The target of a position from which nothing is learnt. Source: the default `ignore_index` of torch's losses."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch; every tensor is [B, S].

    `input_ids` int64. `targets` int64 are already shifted: `targets[b, s]` is the token to be predicted from position
    `s`, or `IGNORED`. `weights` fp32 multiply a target's loss: 0 where the target is ignored. `position_ids` int64
    count from 0 within a document. `segment_ids` int64 name the document of a position, from 1; 0 is padding.
    `row_ids` are the ids of the rows in the data set, document by document in order. `documents` say where they begin
    and end, found where the batch was made, so that no forward waits for the device to learn it.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    position_ids: torch.Tensor
    segment_ids: torch.Tensor
    row_ids: tuple[int, ...]
    documents: Documents

    @property
    def tokens(self) -> int:
        """The number of real tokens, padding left out."""
        return int((self.segment_ids > 0).sum())

    @property
    def padding_tokens(self) -> int:
        """The number of positions that only fill."""
        return self.segment_ids.numel() - self.tokens

    @property
    def num_documents(self) -> int:
        """The number of documents: rows, or pieces of rows that packing has cut."""
        return len(self.row_ids)

    @property
    def supervised_tokens(self) -> int:
        """The number of targets from which something is learnt."""
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device | str) -> Batch:
        """Return the same batch with its tensors on `device`."""
        return Batch(
            input_ids=self.input_ids.to(device),
            targets=self.targets.to(device),
            weights=self.weights.to(device),
            position_ids=self.position_ids.to(device),
            segment_ids=self.segment_ids.to(device),
            row_ids=self.row_ids,
            documents=self.documents.to(device),
        )
