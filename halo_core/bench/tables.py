"""What expert parallelism costs and saves, computed from a model's shape: bytes on the wire, bytes of memory.

Not measured: what was measured stands in receipts. Shapes: T tokens of a process, K experts per token, E experts.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halo_core.bench.page import table
from halo_core.expert_parallel.traffic import LayerTraffic, layer_traffic
from halo_core.models import sockets
from halo_core.models.build import build_meta
from halo_core.registry import Architecture, Registry, size, text_config

STATES = 4
"""Tensors of a parameter's size that AdamW trains with: weight, gradient, two moments."""


def layer_bytes(registry: Registry, hub_id: str, *, degrees: Sequence[int], tokens: int) -> str:
    """Return a table of the bytes that leave one process in one layer's forward pass, bf16, at each EP degree.

    tokens: T. Each chooses its K experts evenly at random.
    """
    config, architecture = _published(registry, hub_id)
    names, inner = architecture.spec.names, text_config(architecture.spec, config)
    num_experts, chosen, hidden = (
        size(found, inner) for found in (names.num_experts, names.experts_per_token, names.hidden_size)
    )
    assert num_experts is not None and chosen is not None and hidden is not None
    rows = []
    for degree in degrees:
        ids = [even_choice(tokens, num_experts, chosen, seed=rank) for rank in range(degree)]
        traffic = layer_traffic(ids, num_experts=num_experts, hidden_size=hidden, itemsize=2)
        rows.append((str(degree), *_cells(traffic, degree)))
    columns = ("EP", "one row per token and process", "one row per token and expert", "all-reduce of every token")
    return table(columns, rows).rstrip()


def even_choice(tokens: int, num_experts: int, chosen: int, *, seed: int) -> Tensor:
    """Return [T, K] expert ids, all different in a row, every set of K equally likely."""
    # Raw words, which numpy keeps the same over its versions.
    words = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(tokens * num_experts)
    return torch.from_numpy(words.reshape(tokens, num_experts).argsort(axis=1)[:, :chosen].copy())


def memory(registry: Registry, hub_ids: Iterable[str], *, world: int, degrees: Sequence[int]) -> str:
    """Return a table of the bytes each of `world` processes holds for weights, gradients and AdamW's moments in bf16.

    One row for each of these models that has experts, one column for each EP degree. The last column is EP 1 where
    weights are gathered layer by layer, in forward and again in backward.
    """
    rows = []
    for hub_id in hub_ids:
        config, architecture = _published(registry, hub_id)
        if architecture.spec.is_moe:
            dense, experts, layer = _parameters(config, architecture)
            held = [_held(dense, experts, world, degree) for degree in degrees]
            held.append(2 * (STATES * (dense + experts) // world + 2 * layer))  # the next layer comes beside this one
            rows.append((hub_id, f"{(dense + experts) / 1e9:.1f}", f"{experts / 1e9:.1f}", *_gib(held)))
    columns = (
        "model", "billion parameters", "of experts", *(f"EP {degree}" for degree in degrees), "EP 1, layer by layer",
    )  # fmt: skip
    return table(columns, rows).rstrip()


def _held(dense: int, experts: int, world: int, degree: int) -> int:
    """Return bytes: this process's share of everything, and the weights that are gathered between forward and backward.

    Experts are gathered over the processes that hold the same ones; where there is one such, it holds them already.
    """
    gathered = dense + (experts // degree if degree < world else 0)
    return 2 * (STATES * (dense + experts) // world + gathered)


def _parameters(config: dict[str, Any], architecture: Architecture) -> tuple[int, int, int]:
    """Return the parameters outside experts, those of experts, and those of the largest layer."""
    model = build_meta(architecture, config, dtype=torch.bfloat16)
    experts = sum(p.numel() for _, m in sockets.experts_modules(model, architecture) for p in m.parameters())
    layers = [m for m in model.modules() if type(m).__name__ == architecture.spec.decoder_layer]
    return _count(model) - experts, experts, max(map(_count, layers))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _published(registry: Registry, hub_id: str) -> tuple[dict[str, Any], Architecture]:
    model = registry.published(hub_id)
    assert model is not None, f"no plugin bundles a configuration of {hub_id}"
    package, _, path = model.config.partition(":")
    config = json.loads((importlib.resources.files(package) / path).read_text(encoding="utf-8"))
    return config, next(a for a in registry.architectures() if a.name == model.architecture)


def _cells(traffic: LayerTraffic, degree: int) -> Iterable[str]:
    for number in (traffic.per_destination, traffic.per_pair, traffic.all_reduce):
        ratio = number / traffic.per_destination
        yield f"{number / degree / 2**20:.1f} MiB" + (f" ({ratio:.2f} x)" if number != traffic.per_destination else "")


def _gib(numbers: Iterable[int]) -> Iterable[str]:
    return (f"{number / 2**30:.0f} GiB" for number in numbers)
