"""How large a model and its training state are: counted on the meta device, in parameters and bytes.

Not for activations, and not for what a device really allocates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from halo_core.optim.groups import trained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from halo_core.plan import Checked


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Parameters, and bytes over all ranks.

    Bytes of weights (persistent buffers included), gradients as backward leaves them, fp32 sums of gradients over
    micro-batches, and optimizer state.
    """

    parameters: int
    trainable: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    sum_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class _Precision:
    optim: str
    bf16: bool
    gradient_accumulation_steps: int
    grad_accumulation_dtype: str


def sizes_of(
    model: nn.Module,
    *,
    optim: str,
    bf16: bool = False,
    gradient_accumulation_steps: int = 1,
    grad_accumulation_dtype: str = "float32",
) -> Sizes:
    """Return the sizes of a model, on whatever device, under these keys. Tied parameters count once."""
    parameters = list(model.parameters())
    rows = trained(
        model,
        _Precision(
            optim=optim, bf16=bf16, gradient_accumulation_steps=gradient_accumulation_steps,
            grad_accumulation_dtype=grad_accumulation_dtype,
        ),
    )  # fmt: skip
    held = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return Sizes(
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(row.elements for row in rows),
        weight_bytes=sum(tensor.numel() * tensor.itemsize for tensor in held.values()),
        gradient_bytes=sum(row.elements * row.gradient for row in rows),
        optimizer_bytes=sum(row.elements * row.state for row in rows),
        sum_bytes=sum(row.elements * row.sums for row in rows),
    )


def sizes_of_plan(checked: Checked, model: PreTrainedModel | None = None) -> Sizes:
    """Return the sizes of a checked plan's model, or of `model` if it was built already."""
    config = checked.config
    return sizes_of(
        model_of_plan(checked) if model is None else model,
        optim=config.optim,
        bf16=config.bf16,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        grad_accumulation_dtype=config.grad_accumulation_dtype,
    )


def model_of_plan(checked: Checked) -> PreTrainedModel:
    """Return a checked plan's model on the meta device, without sockets: for counting."""
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
    return build_meta(checked.architecture, model_config, dtype=dtype, fp32_router=config.fp32_router)
