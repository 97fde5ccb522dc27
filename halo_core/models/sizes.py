"""How large a model and its training state are: counted on the meta device, in parameters and bytes.

Not for activations, and not for what a device really allocates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from halo_core.plan import Checked

MOMENTS: dict[str, int] = {"sgd": 0, "adamw_torch": 2, "adamw_torch_fused": 2}
"""How many tensors of a parameter's own shape and dtype each optimizer keeps. Source: torch.optim.SGD, AdamW."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Parameters, and bytes of weights (persistent buffers included), gradients and optimizer state, over all ranks."""

    parameters: int
    trainable: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


def sizes_of(model: nn.Module, *, optim: str) -> Sizes:
    """Return the sizes of a model, on whatever device, under an optimizer. Tied parameters count once."""
    parameters = list(model.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    trained_bytes = sum(parameter.numel() * parameter.itemsize for parameter in trainable)
    held = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return Sizes(
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in trainable),
        weight_bytes=sum(tensor.numel() * tensor.itemsize for tensor in held.values()),
        gradient_bytes=trained_bytes,
        optimizer_bytes=MOMENTS[optim] * trained_bytes,
    )


def sizes_of_plan(checked: Checked) -> Sizes:
    """Return the sizes of a checked plan's model, built on the meta device."""
    from halo_core import runtime
    from halo_core.model_config import TINY
    from halo_core.models.build import build_meta
    from halo_core.models.tiny import tiny_config

    config = checked.config
    model_config = checked.model_config
    if config.model_name_or_path in TINY:
        # The plan knows the tiny model's shape only; its vocabulary is the tiny tokenizer's.
        model_config = tiny_config(checked.architecture).to_dict()
    dtype = runtime.dtype_of(config.dtype, model_config, checked.architecture)
    model = build_meta(checked.architecture, model_config, dtype=dtype)
    return sizes_of(model, optim=config.optim)
