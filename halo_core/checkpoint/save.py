"""Writes a resume point: weights, optimizer state, random state, and what the run is.

Not for exporting a model to others. Nothing is pickled: safetensors and JSON only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halo_core.checkpoint import atomic, randomness, tensors
from halo_core.checkpoint.find import FORMAT, STATE
from halo_core.checkpoint.identity import Identity

WEIGHTS, OPTIMIZER, RANDOM = "weights.safetensors", "optimizer.safetensors", "random.safetensors"


def save(
    output_dir: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Mapping[str, Any],
    identity: Identity,
) -> Path:
    """Write `output_dir/checkpoint-<step>` and return it; it is there completely or not at all.

    progress: what the loop wants back on resume, in values that JSON knows.

    Raises:
        SaveFailed: too little space, or the file system refused; earlier checkpoints are untouched.
    """
    folder = output_dir / f"checkpoint-{step}"
    weights = stored_weights(model)
    moments, scalars = optimizer_state(model, optimizer)
    random_tensors, random_rest = randomness.captured()
    state = {
        "format": FORMAT,
        "step": step,
        "progress": dict(progress),
        "optimizer": {"class": type(optimizer).__name__, "scalars": scalars},
        "random": random_rest,
        "identity": vars(identity),
    }
    needed = sum(tensors.num_bytes(part) for part in (weights, moments, random_tensors))
    with atomic.publishing(folder, needed=needed) as writer:
        writer.file(WEIGHTS, tensors.chunks(weights))
        writer.file(OPTIMIZER, tensors.chunks(moments))
        writer.file(RANDOM, tensors.chunks(random_tensors))
        writer.file(STATE, [json.dumps(state, indent=1).encode()])
    return folder


def stored_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by their state-dict name, a tied tensor once."""
    parameters = dict(model.named_parameters())
    every_name = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in every_name}
    return {**parameters, **buffers}


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return the optimizer's tensors as `<kind>/<parameter name>`, and its plain values per parameter name."""
    moments: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                moments[f"{kind}/{name}"] = value
            else:
                scalars.setdefault(name, {})[kind] = value
    # Sorted: a restored optimizer lists its state in another order, and equal states are to be equal files.
    return dict(sorted(moments.items())), scalars
