"""The way into a model's decoder, whether the model is cut over processes or not. Not for making that way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ENTRANCE = "halo_decoder"
"""The attribute of a cut model by which its decoder is called: the way through its outermost unit, which gathers
weights that the decoder does not hold itself."""


def decoder_of(model: Any) -> Callable[..., Any]:
    """Return what to call for a forward pass to the last hidden states."""
    entrance: Callable[..., Any] | None = vars(model).get(ENTRANCE)
    return model.get_decoder() if entrance is None else entrance
