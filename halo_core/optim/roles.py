"""The role of a parameter, from the class that owns it and its name, and which roles are decayed.

Not for shapes: a role never depends on the number of dimensions, so fused expert tensors and slices keep theirs.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

from torch import nn

Role: TypeAlias = Literal["matrix", "bias", "norm", "scalar", "convolution", "embedding"]

DECAYED: frozenset[Role] = frozenset({"matrix", "convolution", "embedding"})
"""Roles under weight decay: what multiplies hidden states as a map, whose size decay is there to bound.

Biases, norms and scalars are left out: their neutral value is often not zero (a scale is one, a decay rate is stored as
its logarithm), so that a pull to zero changes the model and bounds nothing. transformers' Trainer leaves out biases and
norms and decays scalars: attention sinks, logarithms of decay rates, scales of experts.
Source: `Trainer.get_decay_parameter_names` of transformers; `_no_weight_decay` of the Mamba reference code.
"""

_NORM_NAME = re.compile(r"layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_SCALAR_NAME = re.compile(r"(?:^|_)(?:scale|scalar|sinks?|log|gain|gamma|temperature)$")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def role_of(module_class: type[nn.Module], name: str) -> Role:
    """Return the role of the parameter `name` (full dotted name) owned by a module of class `module_class`."""
    lowered = name.lower()
    if "bias" in lowered:
        return "bias"
    if issubclass(module_class, nn.LayerNorm) or _NORM_NAME.search(lowered):
        return "norm"
    if issubclass(module_class, nn.Embedding):
        return "embedding"
    if issubclass(module_class, _CONVOLUTIONS):
        return "convolution"
    if _SCALAR_NAME.search(lowered.rpartition(".")[2]):
        return "scalar"
    return "matrix"


def roles(model: nn.Module) -> dict[str, Role]:
    """Return the role of every parameter; a tied parameter appears once, under the name torch gives it first."""
    owners = dict(model.named_modules())
    return {name: role_of(type(owners[name.rpartition(".")[0]]), name) for name, _ in model.named_parameters()}
