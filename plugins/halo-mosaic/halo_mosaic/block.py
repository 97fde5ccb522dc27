"""Routes a Mosaic block through Halo's experts function; not for the model itself, which knows nothing of Halo.

The block has no experts socket of transformers, so `facts.py` names `bind` as its wrapper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halo_core.kernels.experts.weights import ExpertsKernel, ExpertWeights
from halo_mosaic.model import squared_relu

if TYPE_CHECKING:
    from halo_mosaic.model import MosaicMixture


def bind(block: MosaicMixture, experts: ExpertsKernel) -> None:
    """Let this block compute its experts by `experts`; its router and its parameters stay where they are."""

    def forward(hidden: Tensor) -> Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        _, routing, ids = block.router(tokens)
        return experts(stacked(block), tokens, ids, routing).view_as(hidden)

    block.forward = forward


def stacked(block: MosaicMixture) -> ExpertWeights:
    """Return the experts' weights as one view: [E, M, H] and [E, H, M], gradients flow back to each expert's own.

    Built at each call and never kept: loading and sharding replace parameters after the block was bound.
    """
    inner, outer = [tile.inner for tile in block.tiles], [tile.outer for tile in block.tiles]
    return ExpertWeights(
        gate_up=torch.stack([layer.weight for layer in inner]),
        down=torch.stack([layer.weight for layer in outer]),
        gate_up_bias=torch.stack([layer.bias for layer in inner]),
        down_bias=torch.stack([layer.bias for layer in outer]),
        activation=squared_relu, is_transposed=False, is_concatenated=True, has_bias=True, has_gate=False,
    )
