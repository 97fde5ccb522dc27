"""Loading into a model that is cut over processes: each reads its own slices, all together the source's tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import Concatenate

from halo_core import registry
from halo_core.arithmetic import Degrees
from halo_core.kernels.experts.reference import reference
from halo_core.models import load, sockets
from halo_core.models.build import attribute, build_meta
from halo_core.models.load import load_weights
from halo_core.models.tiny import write_tiny
from halo_core.sharding.shard import shard
from halo_core.testing.cases import shake
from halo_core.topology import AXES, Topology, build_meshes
from tests.distributed import load_memory, ranks

ARCHITECTURES = {a.name: a for a in registry.load().architectures()}
MOE = sorted(name for name, architecture in ARCHITECTURES.items() if architecture.spec.is_moe)
SIZES: tuple[dict[str, int], ...] = ({"ep": 4}, {"shard": 2, "ep": 2}, {"replicate": 2, "ep": 2}, {"shard": 3})


def with_experts(name: str, count: int) -> Any:
    """Return an architecture whose tiny model has another number of experts."""
    architecture = ARCHITECTURES[name]
    field = next(f for f in architecture.spec.names.num_experts if f in architecture.spec.tiny)
    return replace(architecture, spec=replace(architecture.spec, tiny={**architecture.spec.tiny, field: count}))


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a maker of tiny folders whose every tensor is off its neutral value."""

    @cache
    def make(name: str, experts: int | None = None) -> Path:
        folder = tmp_path_factory.mktemp("load") / name
        write_tiny(ARCHITECTURES[name] if experts is None else with_experts(name, experts), folder)
        shake(folder)
        return folder

    return make


def cut(architecture: Any, folder: Path, sizes: dict[str, int], dtype: torch.dtype = torch.float32) -> Any:
    """Return this process's part of a model, still on the meta device."""
    degrees = Degrees(**{axis: sizes.get(axis, 1) for axis in AXES})
    topology = Topology(degrees=degrees, rank=dist.get_rank())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = build_meta(architecture, config, dtype=dtype, experts=reference)
    modules = dict(sockets.experts_modules(model, architecture))
    shard(model, architecture, topology, build_meshes(topology, "cpu"), experts=modules)
    return model


def loaded(architecture: Any, folder: Path, sizes: dict[str, int], dtype: torch.dtype = torch.float32) -> Any:
    model = cut(architecture, folder, sizes, dtype)
    load_weights(model, folder, architecture)
    return model


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def unequal(architecture: Any, folder: Path, sizes: dict[str, int], dtype: torch.dtype, wanted: Any) -> list[str]:
    """Return the names of parameters and buffers that are not `wanted`'s, on any process."""
    model = loaded(architecture, folder, sizes, dtype)
    wrong = [name for name, tensor in model.state_dict().items() if not torch.equal(whole(tensor), wanted[name])]
    buffers = dict(model.named_buffers())
    return wrong + [name for name, tensor in buffers.items() if not torch.equal(tensor, wanted[name])]


def of_transformers(architecture: Any, folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the state and every buffer of the model that transformers itself loads."""
    model = attribute(architecture.spec.model_class).from_pretrained(folder, dtype=dtype)
    return {**model.state_dict(), **dict(model.named_buffers())}


@pytest.mark.parametrize(("name", "sizes"), [(name, SIZES[i % 4]) for i, name in enumerate([*MOE, *MOE[:3]])])
def test_every_tensor_is_the_one_that_transformers_loads(name: str, sizes: dict[str, int], folder_of: Any) -> None:
    architecture, folder = ARCHITECTURES[name], folder_of(name)
    dtype = torch.bfloat16 if sizes == {"ep": 4} else torch.float32
    wanted = of_transformers(architecture, folder, dtype)
    world = int(torch.tensor(list(sizes.values())).prod())
    assert ranks.run(world, unequal, architecture, folder, sizes, dtype, wanted) == [[]] * world


@pytest.mark.parametrize("name", ["lfm2_moe", "gpt_oss"])
def test_experts_too_few_to_divide_are_cut_along_their_last_dimension(name: str, folder_of: Any) -> None:
    architecture, folder = with_experts(name, 2), folder_of(name, 2)
    sizes = {"shard": 2, "ep": 2}

    def cuts() -> tuple[list[str], set[int]]:
        wanted = of_transformers(architecture, folder, torch.float32)
        model = cut(architecture, folder, sizes)
        first = next(module for _, module in sockets.experts_modules(model, architecture))
        placed = {parameter.placements[0].dim - parameter.ndim for parameter in first.parameters()}
        return unequal(architecture, folder, sizes, torch.float32, wanted), placed

    assert ranks.run(4, cuts) == [([], {-1})] * 4


def test_more_processes_than_can_share_the_experts_are_refused(folder_of: Any) -> None:
    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(5, loaded, ARCHITECTURES["lfm2_moe"], folder_of("lfm2_moe"), {"shard": 5})
    assert "Refused" in caught.value.text
    assert "8 experts" in caught.value.text and "5 processes" in caught.value.text


def test_tied_embedding_and_head_are_one_parameter_before_and_after_loading(folder_of: Any) -> None:
    def tied() -> tuple[bool, bool, int]:
        model = cut(ARCHITECTURES["lfm2_moe"], folder_of("lfm2_moe"), {"ep": 2})
        before = model.lm_head.weight is model.model.embed_tokens.weight
        load_weights(model, folder_of("lfm2_moe"), ARCHITECTURES["lfm2_moe"])
        vocabulary = [p for p in model.parameters() if p.shape[0] == model.config.vocab_size]
        return before, model.lm_head.weight is model.model.embed_tokens.weight, len(vocabulary)

    folder_of("lfm2_moe")
    assert ranks.run(2, tied) == [(True, True, 1)] * 2


def damaged(source: Path, target: Path, edit: Any) -> Path:
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    state = load_file(source / "model.safetensors")
    edit(state)
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return target


def refusal(name: str, folder: Path) -> str:
    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(2, loaded, ARCHITECTURES[name], folder, {"ep": 2})
    _, _, said = caught.value.text.rpartition("halo_core.errors.Refused: ")
    return said


def test_a_missing_expert_of_another_process_is_refused_by_its_name(folder_of: Any, tmp_path: Path) -> None:
    gone = "model.layers.2.feed_forward.experts.7.w3.weight"
    folder = damaged(folder_of("lfm2_moe"), tmp_path / "damaged", lambda state: state.pop(gone))
    assert gone in refusal("lfm2_moe", folder)


def test_a_head_that_the_files_hold_apart_from_its_embedding_is_refused(folder_of: Any, tmp_path: Path) -> None:
    def untie(state: dict[str, Tensor]) -> None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"] + 1

    folder = damaged(folder_of("lfm2_moe"), tmp_path / "untied", untie)
    assert "tie_word_embeddings: false" in refusal("lfm2_moe", folder)


def test_a_conversion_whose_slices_are_no_slice_of_the_whole_is_found_before_reading(
    folder_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = load.get_model_conversion_mapping

    def joined_along_the_experts(model: Any) -> Any:
        found = known(model)
        for entry in found:
            for operation in getattr(entry, "operations", ()):
                if isinstance(operation, Concatenate):
                    operation.dim = 0
        return found

    monkeypatch.setattr("halo_core.models.layout.get_model_conversion_mapping", joined_along_the_experts)
    monkeypatch.setattr(load, "read_layout", lambda *given: layout_of(*given))
    monkeypatch.setattr(load, "check_inverse", lambda *given: None)
    from halo_core.models.layout import Group, Layout

    def layout_of(model: Any, files: Any, architecture: Any) -> Layout:
        converter = next(entry for entry in joined_along_the_experts(model) if hasattr(entry, "operations"))
        name = "model.layers.1.feed_forward.experts.gate_up_proj"
        return Layout(groups=(Group(targets=(name,), members={}, converter=converter),), untrained=frozenset())

    with pytest.raises(ranks.RankFailed, match=r"NotImplementedError.*is cut along"):
        ranks.run(2, loaded, ARCHITECTURES["lfm2_moe"], folder_of("lfm2_moe"), {"ep": 2})


MEGABYTE = 1 << 20


def test_loading_half_a_gigabyte_holds_a_shard_and_two_layers_of_experts_at_most(tmp_path: Path) -> None:
    """Anonymous memory of a fresh process, one of two: what is mapped from files costs nothing that others need."""
    load_memory.write(tmp_path / "model")
    ended = subprocess.run(
        [sys.executable, load_memory.__file__, tmp_path / "model"], stdout=subprocess.PIPE, text=True, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = json.loads(ended.stdout.splitlines()[-1])
    told = {key: f"{value / MEGABYTE:.0f} MiB" for key, value in found.items()}
    assert found["file"] >= 500 * MEGABYTE
    assert found["peak"] <= found["shard"] + 2 * found["layer"], told
    assert found["peak"] >= found["shard"] // 2, f"the measurement does not see what is loaded: {told}"
