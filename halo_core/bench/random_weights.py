"""Gives a model on the meta device random weights in memory, whole or cut over processes, without any file.

Not for training anything that should learn. Each module is made whole for a moment by the model's own initialisation
under a seed of its own, and every process keeps its piece: the same seed gives the same model in every layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from halo_core.checkpoint.pieces import local, piece_of

FALLBACK = 0.02
"""Standard deviation of what the model's own initialisation leaves alone."""


@torch.no_grad()
def fill(model: PreTrainedModel, device: torch.device, *, seed: int) -> None:
    """Give every parameter and buffer of `model` memory on `device` and a value.

    model: on the meta device; parameters may be cut over processes already.

    Raises:
        RuntimeError: naming a buffer that the model's own initialisation does not compute.
    """
    model.to_empty(device=device)
    model.tie_weights(recompute_mapping=False)
    made: set[int] = set()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for path, module, owner in _modules(model, "", model):
            torch.manual_seed(_seed(seed, path))
            _fill(path, module, owner, device, made)


def _fill(path: str, module: nn.Module, owner: PreTrainedModel, device: torch.device, made: set[int]) -> None:
    """Make one module's own tensors whole, let its model initialise them, and keep this process's piece of each."""
    kept = {name: p for name, p in module._parameters.items() if p is not None and id(p) not in made}
    for name, parameter in kept.items():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        module._parameters[name] = nn.Parameter(whole, requires_grad=False)
    try:
        before = {name: tensor._version for name, tensor in _own(module)}
        owner._init_weights(module)
        untouched = [name for name, tensor in _own(module) if name in before and tensor._version == before[name]]
        for name in untouched:
            if name in kept:
                module._parameters[name].normal_(std=FALLBACK)
            elif name in module._buffers:
                raise RuntimeError(f"{type(owner).__name__} does not compute the buffer {path}.{name}")
        for name, parameter in kept.items():
            piece = piece_of(parameter)
            box = tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.shape, strict=True))
            local(parameter).copy_(module._parameters[name][box])
    finally:
        module._parameters.update(kept)
    for parameter in kept.values():
        made.add(id(parameter))
        parameter._is_hf_initialized = True  # an initialisation that reaches into a child module passes it by


def _modules(model: nn.Module, path: str, owner: Any) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield (path, module, the transformers model whose initialisation it is), children first, each module once."""
    for name, child in model.named_children():
        inner = child if isinstance(child, PreTrainedModel) else owner
        yield from _modules(child, f"{path}.{name}" if path else name, inner)
    yield path, model, owner


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _seed(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {path}".encode(), digest_size=7).digest(), "little")
