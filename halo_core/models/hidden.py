"""From a batch to last hidden states, and from those to log-probabilities of the targets.

Not for losses. The model's own logits and loss are never computed: `Head` is a kernel over the head's weight.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from halo_core.kernels.head import HeadKernel, chunked
from halo_core.registry import Architecture
from halo_core.sharding.entrance import decoder_of


class TokenBatch(Protocol):
    """What a forward pass reads of a batch; all three are [B, S] int64, a segment id of 0 marks padding."""

    @property
    def input_ids(self) -> Tensor:
        """Return the tokens."""
        ...

    @property
    def position_ids(self) -> Tensor:
        """Return each token's position in its document."""
        ...

    @property
    def segment_ids(self) -> Tensor:
        """Return each token's document, counted from 1 in its row."""
        ...


def last_hidden(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Return the decoder's last hidden states, after its final norm, [B, S, H]."""
    output = decoder_of(model)(
        input_ids=batch.input_ids,
        attention_mask=padding_mask(batch.segment_ids),
        position_ids=batch.position_ids,
        use_cache=False,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def padding_mask(segment_ids: Tensor) -> Tensor | None:
    """Return the mask of real tokens [B, S] int64, or None when every token is real.

    None, and not ones: only without a mask does transformers take its fast paths. A row of nothing but padding
    counts as real: attention over no token at all is not a number, and nobody reads that row.
    """
    real = segment_ids != 0
    has_several, is_full = torch.stack([(segment_ids > 1).any(), real.all()]).tolist()  # one wait for the device
    if has_several:
        raise NotImplementedError("several documents in one row need masks of their own")
    if is_full:
        return None
    return (real | ~real.any(dim=1, keepdim=True)).long()


class Head:
    """The model's output head: hidden states and targets in, log-probabilities of the targets out."""

    def __init__(
        self, model: PreTrainedModel, architecture: Architecture, kernel: HeadKernel = chunked.log_probabilities
    ) -> None:
        name = architecture.spec.head.softcap
        self._kernel = kernel
        self._output = model.get_output_embeddings()
        self._softcap: float | None = None if name is None else getattr(model.config, name)
        if getattr(self._output, "bias", None) is not None:
            raise NotImplementedError("the head of this model has a bias, which the head kernel does not add")

    def __call__(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return log-probabilities [..., ] fp32 for hidden [..., H] and targets [...]; 0 where a target is ignored.

        The weight is read at each call: it may be tied, sharded or replaced.
        """
        rows = self._kernel(
            hidden.reshape(-1, hidden.shape[-1]), self._output.weight, targets.reshape(-1), self._softcap
        )
        return rows.view(targets.shape)

    @property
    def weight(self) -> torch.nn.Parameter:
        """Return the head's weight [V, H]."""
        parameter: torch.nn.Parameter = self._output.weight
        return parameter
