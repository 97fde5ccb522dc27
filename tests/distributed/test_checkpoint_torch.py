"""torch.distributed.checkpoint reads a checkpoint of a run in any layout, and what it writes in safetensors is read.

Not for a run's own reading: see `test_checkpoint_layouts.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import distribute_tensor

from halo_core import registry
from halo_core.checkpoint.identity import Identity
from halo_core.checkpoint.parts_note import OFFSETS, PARTS
from halo_core.checkpoint.pieces import local
from halo_core.checkpoint.save import save, stored_weights
from halo_core.checkpoint.stored import StoredTensors
from halo_core.errors import Refused
from halo_core.models.safetensors_files import metadata_of, read_file
from halo_core.models.tiny import write_tiny
from tests.distributed import ranks
from tests.distributed.sharded_models import ALONE, built, degrees, marked, marked_optimizer, moments, wrong

MOE = {a.name: a for a in registry.load().architectures()}["lfm2_moe"]
EP4, EP2, BOTH, SHARDED = {"ep": 4}, {"ep": 2}, {"shard": 2, "ep": 2}, {"shard": 4}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    write_tiny(MOE, folder)
    return folder


def everywhere(sizes: Mapping[str, int], function: Any, *arguments: Any) -> list[Any]:
    world = degrees(sizes).world
    return [function(*arguments)] if world == 1 else ranks.run(world, function, *arguments)


def write(source: Path, sizes: Mapping[str, int], output_dir: Path) -> None:
    model = marked(MOE, source, sizes)
    identity = Identity(config={}, plan={}, data={}, environment={})
    save(output_dir, step=1, model=model, optimizer=marked_optimizer(model), progress={}, identity=identity)


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for sizes in (ALONE, BOTH, EP4):
        folders[str(sizes)] = tmp_path_factory.mktemp("written")
        everywhere(sizes, write, source, sizes, folders[str(sizes)])
    return folders


def read_by_torch(source: Path, sizes: Mapping[str, int], folder: Path) -> tuple[list[str], int]:
    """Return names that torch read wrongly into tensors of this layout, and the number of tensors read."""
    model, _ = built(MOE, source, sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        state = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(0.0), **state}
    tensors = {**stored_weights(model), **moments(model, optimizer)}
    state = {name: tensor.detach() for name, tensor in tensors.items()}
    steps = {f"step/{name}": torch.tensor(0.0) for name, _ in model.named_parameters()}
    dcp.load({**state, **steps}, storage_reader=HuggingFaceStorageReader(str(folder / "checkpoint-1")))
    assert {float(step) for step in steps.values()} == {1.0}
    return wrong(tensors), len(tensors)


@pytest.mark.parametrize(
    ("before", "after"), [(BOTH, SHARDED), (BOTH, EP2), (EP4, ALONE), (EP4, BOTH), (ALONE, EP2)], ids=str
)
def test_torch_reads_weights_and_moments_into_tensors_of_another_layout(
    source: Path, written: dict[str, Path], before: Mapping[str, int], after: Mapping[str, int]
) -> None:
    for faults, count in everywhere(after, read_by_torch, source, after, written[str(before)]):
        assert faults == [] and count > 100


def test_a_wrong_offset_is_seen_so_the_comparison_can_fail(
    source: Path, written: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    for path in (written[str(EP4)] / "checkpoint-1").glob("*.safetensors"):
        data = path.read_bytes()
        if path.name.startswith("weights-rank-0"):
            swapped = data.replace(rb'\"saved_offsets\": [0, 0, 0]', rb'\"saved_offsets\": [2, 0, 0]')
            assert swapped != data and len(swapped) == len(data)
            data = swapped
        elif path.name.startswith("weights-rank-1"):
            data = data.replace(rb'\"saved_offsets\": [2, 0, 0]', rb'\"saved_offsets\": [0, 0, 0]')
        (folder / path.name).write_bytes(data)
    assert any("experts" in name for name in read_by_torch(source, ALONE, tmp_path)[0])


def test_every_file_says_where_its_parts_begin_in_torchs_words(written: dict[str, Path]) -> None:
    for path in (written[str(EP4)] / "checkpoint-1").glob("[wo]*.safetensors"):
        file = read_file(path)
        metadata = metadata_of(file.head)
        parts = json.loads(metadata[PARTS])
        assert metadata["DCP_VERSION"] == "1.0" and metadata["format"] == "pt"
        assert parts.keys() == {tensor.key for tensor in file.tensors}
        assert all(len(parts[tensor.key][OFFSETS]) == len(tensor.shape) for tensor in file.tensors)


def whole_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"even": torch.randn(8, 3, generator=generator), "uneven": torch.randn(5, 2, generator=generator).bfloat16(),
            "alike": torch.randn(4, generator=generator)}


def written_by_torch(folder: Path) -> bool:
    """Write tensors with torch's own writer, cut over the processes; return whether our reader gives parts of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = {name: distribute_tensor(tensor, mesh, [Replicate() if name == "alike" else Shard(0)])
           for name, tensor in whole_tensors().items()}
    dcp.save(cut, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    dist.barrier()
    other = {name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(tensor.ndim - 1)])
             for name, tensor in whole_tensors().items()}
    with StoredTensors(sorted(folder.glob("*.safetensors"))) as stored:
        for name, tensor in other.items():
            stored.fill(name, tensor)
    expected = {name: distribute_tensor(tensor, mesh, [Shard(tensor.ndim - 1)])
                for name, tensor in whole_tensors().items()}
    return all(torch.equal(local(other[name]), local(expected[name])) for name in other)


def test_what_torch_wrote_is_read_whole_and_in_another_layout(tmp_path: Path) -> None:
    assert ranks.run(2, written_by_torch, tmp_path) == [True, True]
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 2
    with StoredTensors(files) as stored:
        for name, tensor in whole_tensors().items():
            assert torch.equal(stored.whole(name), tensor)


def test_files_of_two_saves_that_disagree_about_a_tensor_are_refused(
    written: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    path = written[str(ALONE)] / "checkpoint-1" / "weights.safetensors"
    name = next(iter(load_file(path)))
    save_file({name: torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(Refused, match=f"its files disagree about {name}"):
        StoredTensors([path, tmp_path / "other.safetensors"])
