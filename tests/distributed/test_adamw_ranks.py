"""AdamW in bf16 over several processes: given the same gradients, every element rounds as in one process.

Not for training steps: those sum gradients in another order. Gradients here are one known tensor per name and step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from halo_core import registry
from halo_core.checkpoint.pieces import local, piece_of, whole
from halo_core.kernels.adamw.boxes import boxes_of
from halo_core.models.tiny import write_tiny
from halo_core.optim.adamw_bf16 import AdamWBF16, AdamWFP32
from halo_core.optim.build import parameter_groups
from tests.distributed import ranks
from tests.distributed.sharded_models import ALONE, built, fill

MOE = {a.name: a for a in registry.load().architectures()}["lfm2_moe"]
LAYOUTS: dict[str, tuple[Mapping[str, int], int]] = {
    "shard 2": ({"shard": 2}, 2), "shard 4": ({"shard": 4}, 4), "ep 2": ({"ep": 2}, 2),
    "ep 2 x shard 2": ({"shard": 2, "ep": 2}, 4), "ep 2, 2 replicas": ({"replicate": 2, "ep": 2}, 4),
}  # fmt: skip
STEPS = 3
SCALE = 0.37
KINDS = {"bf16": AdamWBF16, "masters": AdamWFP32}
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "seed": 5}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    write_tiny(MOE, folder)
    return folder


def model_of(folder: Path, sizes: Mapping[str, int]) -> tuple[dict[str, Any], Any]:
    """Return the parameters by name, all bf16, and the model."""
    model, _ = built(MOE, folder, sizes, dtype=torch.bfloat16)
    return dict(model.named_parameters()), model


def optimizer_for(model: Any, kind: str) -> Any:
    return KINDS[kind](parameter_groups(model, 0.1), **SETTINGS)


def step_through(parameters: Mapping[str, Any], optimizer: Any, steps: Sequence[int]) -> None:
    for step in steps:
        gradients = {}
        for number, (name, parameter) in enumerate(parameters.items()):
            if (number + step) % 11 == 0:
                continue  # some have none
            gradients[name] = torch.empty_like(parameter, dtype=torch.float32 if number % 2 else None)
            fill(f"step {step} of {name}", gradients[name])
        optimizer.update(gradients, torch.tensor(SCALE))


def tensors_of(parameters: Mapping[str, Any], optimizer: Any) -> dict[str, Tensor]:
    found = {name: parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        found |= {f"{name}/{kind}": value for kind, value in state.items() if isinstance(value, Tensor)}
    return found


def alone(folder: Path, kind: str, steps: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return what one process has after the steps: tensors, and each parameter's own step."""
    parameters, model = model_of(folder, ALONE)
    optimizer = optimizer_for(model, kind)
    step_through(parameters, optimizer, steps)
    tensors = {name: tensor.clone() for name, tensor in tensors_of(parameters, optimizer).items()}
    return tensors, {name: optimizer.state[parameter]["step"] for name, parameter in parameters.items()}


def differing(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors whose part here is not, bit for bit, that of the expected whole."""
    assert tensors.keys() == expected.keys()
    return [
        name for name, tensor in tensors.items()
        if not torch.equal(local(tensor), expected[name][piece_of(tensor).within(whole(tensor.shape))])
    ]  # fmt: skip


def steps_on_ranks(
    folder: Path, sizes: Mapping[str, int], kind: str, expected: Mapping[str, Tensor]
) -> tuple[list[str], int]:
    """Return what differs on this rank, and how many of its parameters are parts of a tensor."""
    parameters, model = model_of(folder, sizes)
    optimizer = optimizer_for(model, kind)
    step_through(parameters, optimizer, range(STEPS))
    parts = sum(local(parameter).numel() < parameter.numel() for parameter in parameters.values())
    return differing(tensors_of(parameters, optimizer), expected), parts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_rounds_as_in_one_process(source: Path, layout: str) -> None:
    sizes, world = LAYOUTS[layout]
    expected, _ = alone(source, "bf16", range(STEPS))
    for found, parts in ranks.run(world, steps_on_ranks, source, sizes, "bf16", expected):
        assert found == []
        assert parts > 0, "nothing was cut"


def test_other_noise_would_differ_on_some_rank(source: Path) -> None:
    expected, _ = alone(source, "bf16", range(STEPS))
    name = max(expected, key=lambda key: expected[key].numel() if "/" not in key else 0)
    expected[name] = expected[name].clone()
    expected[name].view(torch.int16).flatten()[-1] ^= 1
    found = [wrong for wrong, _ in ranks.run(2, steps_on_ranks, source, {"shard": 2}, "bf16", expected)]
    assert found == [[], [name]], "the last element lies on the last rank alone"


def go_on(
    folder: Path, sizes: Mapping[str, int], kind: str, saved: Mapping[str, Tensor], counts: Mapping[str, int],
    expected: Mapping[str, Tensor],
) -> list[str]:  # fmt: skip
    """Take up what one process saved, in this layout, by `load_state_dict`; return what differs after more steps."""
    parameters, model = model_of(folder, sizes)
    optimizer = optimizer_for(model, kind)

    def part(key: str, like: Tensor) -> Tensor:
        own = torch.empty_like(like, dtype=saved[key].dtype, requires_grad=False)
        local(own).copy_(saved[key][piece_of(like).within(whole(like.shape))])
        return own

    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    for name in names:
        local(parameters[name]).copy_(local(part(name, parameters[name])))
    state = {
        number: {"step": counts[name], **{
            key.rpartition("/")[2]: part(key, parameters[name]) for key in saved if key.rpartition("/")[0] == name
        }}
        for number, name in enumerate(names)
    }  # fmt: skip
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    step_through(parameters, optimizer, range(STEPS, 2 * STEPS))
    return differing(tensors_of(parameters, optimizer), expected)


@pytest.mark.parametrize(("kind", "layout"), [("bf16", "ep 2 x shard 2"), ("masters", "shard 2")])
def test_state_of_one_process_goes_on_in_another_layout(source: Path, kind: str, layout: str) -> None:
    sizes, world = LAYOUTS[layout]
    saved, counts = alone(source, kind, range(STEPS))
    expected, _ = alone(source, kind, range(2 * STEPS))
    assert ranks.run(world, go_on, source, sizes, kind, saved, counts, expected) == [[]] * world
    assert len(set(counts.values())) > 1, "parameters that had no gradient are some steps behind"


def offsets_in_every_layout() -> dict[str, int]:
    """Check, for layouts of many kinds, that boxes say where each element here lies; return the boxes of each."""
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    cases: dict[str, tuple[Any, Sequence[Any], tuple[int, ...]]] = {
        "even": (flat, [Shard(0)], (8, 3)), "uneven": (flat, [Shard(0)], (6, 5)), "empty": (flat, [Shard(0)], (2, 3)),
        "columns": (flat, [Shard(1)], (3, 10, 4)), "last": (flat, [Shard(2)], (2, 3, 9)),
        "whole": (flat, [Replicate()], (5, 2)), "vector": (flat, [Shard(0)], (13,)),
        "scalar": (flat, [Replicate()], ()), "replica": (square, [Replicate(), Shard(0)], (7, 2)),
        "twice": (square, [Shard(0), Shard(0)], (12, 5)), "both dims": (square, [Shard(0), Shard(1)], (5, 6, 2)),
        "middle and last": (square, [Shard(1), Shard(2)], (3, 4, 6)),
        "strided": (square, [Shard(0), _StridedShard(0, split_factor=2)], (16, 3)),
        "experts": (square, [_StridedShard(0, split_factor=2), Shard(0)], (8, 3, 2)),
        "strided columns": (square, [Replicate(), _StridedShard(1, split_factor=3)], (4, 12)),
    }  # fmt: skip
    counts = {}
    for name, (mesh, placements, shape) in cases.items():
        numbers = torch.arange(torch.Size(shape).numel()).view(shape)
        held = distribute_tensor(numbers, mesh, placements, src_data_rank=None)
        boxes = boxes_of(held)
        own = held.to_local().reshape(-1)
        found = torch.full_like(own, -1)
        for box in boxes:
            steps = torch.arange(box.length)
            found[(box.local.unsqueeze(-1) + steps).flatten()] = (box.offset.unsqueeze(-1) + steps).flatten()
        assert torch.equal(found, own), name
        assert sum(box.local.numel() * box.length for box in boxes) == own.numel(), name
        counts[name] = len(boxes)
    with pytest.raises(NotImplementedError, match="Partial"):
        boxes_of(DTensor.from_local(torch.ones(4), flat, [Partial()]))
    assert dist.get_world_size() == 4
    return counts


def test_boxes_say_where_each_element_lies_in_every_layout() -> None:
    first, *_, last = ranks.run(4, offsets_in_every_layout)
    assert first["strided"] == 2 and first["strided columns"] == 3, "several boxes"
    assert first["empty"] == 1 and last["empty"] == 0
    assert all(first[name] == 1 for name in first if "strided" not in name)

