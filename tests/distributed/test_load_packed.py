"""A source with MXFP4 experts on several processes: each reads its own experts, and all together what one would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Mxfp4Config

from halo_core.checkpoint.export import export
from halo_core.kernels.experts.reference import reference
from halo_core.models import sockets
from halo_core.models.build import build_meta
from halo_core.models.dequantise import DequantisedSlice
from halo_core.models.load import load_weights
from tests.distributed import ranks
from tests.distributed.test_load_sharded import ARCHITECTURES, loaded, with_experts
from tests.packed_sources import write_packed

ARCHITECTURE = ARCHITECTURES["gpt_oss"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packed(ARCHITECTURE, tmp_path_factory.mktemp("packed") / "model", files=2)


def of_transformers(folder: Path) -> dict[str, Tensor]:
    settings = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=settings)
    return dict(model.state_dict())


def unequal(architecture: Any, folder: Path, sizes: dict[str, int], wanted: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that are not `wanted`'s, bit for bit."""
    model = loaded(architecture, folder, sizes, torch.bfloat16)
    found = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = whole.contiguous().view(torch.int16)
    assert found.keys() == wanted.keys()
    return [name for name, tensor in found.items() if not torch.equal(tensor, wanted[name].view(torch.int16))]


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"shard": 2, "ep": 2}, {"shard": 3}], ids=str)
def test_every_tensor_is_bit_for_bit_the_one_that_transformers_dequantises(sizes: dict[str, int], folder: Path) -> None:
    wanted = of_transformers(folder)
    world = int(torch.tensor(list(sizes.values())).prod())
    assert ranks.run(world, unequal, ARCHITECTURE, folder, sizes, wanted) == [[]] * world


def test_experts_too_few_to_divide_are_read_along_their_last_dimension(tmp_path: Path) -> None:
    few = with_experts("gpt_oss", 2)
    folder = write_packed(few, tmp_path / "model")
    wanted = of_transformers(folder)
    assert ranks.run(4, unequal, few, folder, {"shard": 2, "ep": 2}, wanted) == [[]] * 4


def test_each_process_makes_only_its_own_experts_bf16(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    plain = DequantisedSlice.__getitem__

    def watched(self: DequantisedSlice, index: Any) -> Tensor:
        found = plain(self, index)
        made.append(tuple(found.shape))
        return found

    monkeypatch.setattr(DequantisedSlice, "__getitem__", watched)

    def shapes() -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        model = loaded(ARCHITECTURE, folder, {"ep": 2}, torch.bfloat16)
        modules = dict(sockets.experts_modules(model, ARCHITECTURE))
        local = [p.to_local() for module in modules.values() for p in module.parameters() if isinstance(p, DTensor)]
        return sorted(made), sorted(tuple(tensor.shape) for tensor in local if tensor.ndim == 3)

    for read, held in ranks.run(2, shapes):
        assert read == held
        assert {shape[0] for shape in read} == {4}


def test_the_export_of_two_processes_is_that_of_one_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    model = build_meta(ARCHITECTURE, config, dtype=torch.bfloat16, experts=reference)
    load_weights(model, folder, ARCHITECTURE)
    export(model, ARCHITECTURE, folder, tmp_path / "one")

    def write() -> None:
        export(loaded(ARCHITECTURE, folder, {"ep": 2}, torch.bfloat16), ARCHITECTURE, folder, tmp_path / "two")

    ranks.run(2, write)
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []
