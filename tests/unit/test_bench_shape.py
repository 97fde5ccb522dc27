"""The shapes that benchmarks train: published configurations cut to fewer layers still build, layer for layer."""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

import numpy as np
import pytest
import torch

from halo_core import registry
from halo_core.bench import random_rows, shape
from halo_core.errors import Refused
from halo_core.models.build import build_meta
from halo_core.registry import Architecture

REGISTRY = registry.load()
ARCHITECTURES = {architecture.name: architecture for architecture in REGISTRY.architectures()}
PUBLISHED = {model.hub_id: model for family in REGISTRY.families.values() for model in family.spec.published}
KEPT = 3


def published(hub_id: str) -> tuple[dict[str, Any], Architecture]:
    package, _, path = PUBLISHED[hub_id].config.partition(":")
    text = (importlib.resources.files(package) / path).read_text(encoding="utf-8")
    return json.loads(text), ARCHITECTURES[PUBLISHED[hub_id].architecture]


def layers_of(config: dict[str, Any], architecture: Architecture) -> list[torch.nn.Module]:
    model = build_meta(architecture, config, dtype=torch.bfloat16)
    return [module for module in model.modules() if type(module).__name__ == architecture.spec.decoder_layer]


@pytest.mark.parametrize("hub_id", sorted(PUBLISHED))
def test_a_cut_model_has_the_first_layers_of_the_whole_one(hub_id: str) -> None:
    config, architecture = published(hub_id)
    kept, whole = (layers_of(shape.cut(config, architecture, number), architecture) for number in (KEPT, None))
    assert len(whole) > len(kept) == KEPT
    # A class may want its last layer to be of one kind, and makes it so in a cut model too.
    for cut, original in zip(kept[:-1], whole, strict=False):
        assert {name: p.shape for name, p in cut.named_parameters()} == {
            name: p.shape for name, p in original.named_parameters()
        }


@pytest.mark.parametrize("hub_id", sorted(PUBLISHED))
def test_nothing_else_of_a_configuration_changes(hub_id: str) -> None:
    config, architecture = published(hub_id)
    before = json.dumps(config)
    cut = shape.cut(config, architecture, KEPT)
    assert json.dumps(config) == before, "the given one is left alone"
    inner, original = (registry.text_config(architecture.spec, one) for one in (cut, config))
    changed = {key for key in original if inner.get(key) != original[key]}
    names = set(architecture.spec.names.num_layers)
    assert changed & names
    assert changed - names <= {"layer_types", "quantization_config"}
    assert set(config) - set(cut) <= {"quantization_config"}


def test_tables_by_layer_number_are_cut() -> None:
    config = {"num_hidden_layers": 4, "per_layer": {"1": "a", "3": "b"}, "rope": {"type": "c"}, "tokens": [1, 2]}
    cut = shape.cut(config, ARCHITECTURES["qwen3"], 2)
    assert cut == {"num_hidden_layers": 2, "per_layer": {"1": "a"}, "rope": {"type": "c"}, "tokens": [1, 2]}


@pytest.mark.parametrize(("layers", "why"), [(0, "from 1 to 4"), (5, "from 1 to 4")])
def test_more_layers_than_there_are_and_none_are_refused(layers: int, why: str) -> None:
    with pytest.raises(Refused, match=why):
        shape.cut({"num_hidden_layers": 4}, ARCHITECTURES["qwen3"], layers)


def test_rows_are_full_random_and_the_same_each_time() -> None:
    rows = random_rows.make(6, length=50, vocab_size=40, seed=1)
    tokens = np.array([row.input_ids for row in rows])
    assert tokens.shape == (6, 50)
    assert set(tokens.flatten()) == set(range(40))
    assert len({tuple(row) for row in tokens.tolist()}) == 6
    assert all(all(row.supervised) for row in rows)
    again, other = (random_rows.make(6, length=50, vocab_size=40, seed=seed) for seed in (1, 2))
    assert [row.input_ids for row in rows] == [row.input_ids for row in again]
    assert rows[0].input_ids != other[0].input_ids
    assert rows[0].input_ids[:4] == [7, 6, 5, 18], "the same on every machine and numpy"
