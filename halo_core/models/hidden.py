"""From a batch to last hidden states, and from those to log-probabilities of the targets.

Not for losses. The model's own logits and loss are never computed: `Head` is a kernel over the head's weight.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from halo_core.attention import socket as attention
from halo_core.kernels.documents import KEYWORD, Documents
from halo_core.kernels.head import HeadKernel, chunked
from halo_core.models import mixers
from halo_core.models.masks import FULL, SLIDING, masks_apart, padding_mask
from halo_core.registry import Architecture
from halo_core.sharding.entrance import decoder_of


class TokenBatch(Protocol):
    """What a forward pass reads of a batch; tensors are [B, S] int64, a segment id of 0 marks padding."""

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

    @property
    def documents(self) -> Documents:
        """Return where the documents lie, found in the segment ids before the device was asked for anything."""
        ...


def last_hidden(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Return the decoder's last hidden states, after its final norm, [B, S, H].

    A row may hold several documents: none sees another in any layer.

    Raises:
        NotImplementedError: it does, and some layer of this model would not keep them apart.
    """
    output = decoder_of(model)(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **_sight(model, batch)
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def _sight(model: PreTrainedModel, batch: TokenBatch) -> dict[str, Any]:
    """Return the arguments that say what each position may see."""
    found = batch.documents
    bound, attended = mixers.of(model), attention.of(model) is not None
    elsewhere = {*(bound.layer_types if bound is not None else ()), *((FULL, SLIDING) if attended else ())}
    wants_every = attended or (bound is not None and bound.every_batch)
    arguments: dict[str, Any] = {KEYWORD: found} if wants_every or (found.has_several and elsewhere) else {}
    if found.has_several:
        arguments["attention_mask"] = masks_apart(model.config, found, _dtype_of(model), elsewhere)
    elif not attended:
        arguments["attention_mask"] = padding_mask(batch.segment_ids, found)
    return arguments


def _dtype_of(model: PreTrainedModel) -> torch.dtype:
    weight: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    return weight.dtype


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
