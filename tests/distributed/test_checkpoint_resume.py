"""A run stopped and gone on with: bit-equal at the same layout, the same rows and nearly the same sums at another.

Not for files: see `test_checkpoint_layouts.py`. The second half is about which changes of layout are another run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from halo_core import process_group, registry
from halo_core.checkpoint import resume
from halo_core.checkpoint.find_together import find_together
from halo_core.checkpoint.identity import LAYOUT, Identity, differences
from halo_core.checkpoint.save import save, stored_weights
from halo_core.config.keys import KEYS
from halo_core.data.collate import collate
from halo_core.data.order import split
from halo_core.methods.sft import Sft
from halo_core.models.hidden import Head, last_hidden
from halo_core.models.tiny import write_tiny
from halo_core.topology import Topology
from halo_core.trainer.step import run_step
from tests.distributed import ranks
from tests.distributed.parity import Setting, rows_of
from tests.distributed.sharded_models import ALONE, built, degrees

MOE = {a.name: a for a in registry.load().architectures()}["lfm2_moe"]
SFT = Sft(collate_rows=collate)
EP4, EP2, BOTH = {"ep": 4}, {"ep": 2}, {"shard": 2, "ep": 2}
LAST, ROWS = 3, 4
CLOSE = 1e-5
"""Absolute, fp32, after steps of AdamW at 1e-3: the same sums in another order."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    write_tiny(MOE, folder)
    return folder


def train(
    source: Path, sizes: Mapping[str, int], output_dir: Path | None = None, save_at: int | None = None
) -> dict[str, Tensor]:
    """Train to the last step, going on from a checkpoint where there is one; return whole weights and moments.

    save_at: save there and end.
    """
    model, sharded = built(MOE, source, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    checkpoint = None if output_dir is None or save_at is not None else find_together(True, output_dir)
    first = 0
    if checkpoint is not None:
        resume.load_weights(checkpoint, model)
        resume.load_optimizer(checkpoint, model, optimizer)
        first = checkpoint.step
    head = Head(model, MOE)
    topology = Topology(degrees=degrees(sizes), rank=process_group.rank())
    accumulation = ROWS // topology.data_ranks
    for step in range(first, save_at or LAST):
        window = rows_of(Setting(sizes={"ep": 1}, accumulation=ROWS), step, model.config.vocab_size)
        assert len(window) == ROWS
        parts = split(window, 1, topology.data_ranks, topology.data_rank)
        assert len(parts) == accumulation
        run_step(
            model=model, model_hidden=last_hidden, head=head, method=SFT, optimizer=optimizer, sharded=sharded,
            batches=[SFT.collate(part, 0) for part in parts], max_grad_norm=1.0, device=torch.device("cpu"),
        )  # fmt: skip
    if save_at is not None:
        assert output_dir is not None
        identity = Identity(config={}, plan={}, data={}, environment={})
        save(output_dir, step=save_at, model=model, optimizer=optimizer, progress={}, identity=identity)
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {f"{kind}/{names[p]}": value for p, entry in optimizer.state.items() for kind, value in entry.items()}
    return {name: whole(tensor) for name, tensor in {**stored_weights(model), **state}.items()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


@pytest.fixture(scope="module")
def uninterrupted(source: Path) -> dict[str, Tensor]:
    return ranks.run(1, train, source, ALONE)[0]


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    assert first.keys() == second.keys() and len(first) > 100
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("sizes", [BOTH, EP2], ids=str)
def test_at_the_same_layout_a_resumed_run_is_the_run_never_stopped_bit_for_bit(
    source: Path, tmp_path: Path, sizes: Mapping[str, int]
) -> None:
    world = degrees(sizes).world
    straight = ranks.run(world, train, source, sizes)
    ranks.run(world, train, source, sizes, tmp_path, 2)
    resumed = ranks.run(world, train, source, sizes, tmp_path)
    for one, other in zip(straight, resumed, strict=True):
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(("before", "after"), [(EP4, EP2), (EP2, ALONE), (ALONE, BOTH)], ids=str)
def test_at_another_layout_the_rows_go_on_and_the_weights_agree(
    source: Path, uninterrupted: dict[str, Tensor], tmp_path: Path, before: Mapping[str, int], after: Mapping[str, int]
) -> None:
    ranks.run(degrees(before).world, train, source, before, tmp_path, 2)
    resumed = ranks.run(degrees(after).world, train, source, after, tmp_path)[0]
    assert distance(resumed, uninterrupted) < CLOSE


def test_a_resumed_run_without_its_moments_differs_so_the_comparison_can_fail(
    source: Path, uninterrupted: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.run(2, train, source, EP2, tmp_path, 2)
    monkeypatch.setattr(resume, "load_optimizer", lambda checkpoint, model, optimizer: None)
    assert distance(ranks.run(2, train, source, EP2, tmp_path)[0], uninterrupted) > 10 * CLOSE


def identity(sizes: Mapping[str, int], batch: int, accumulation: int, **config: Any) -> Identity:
    settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, **config}
    return Identity(config=settings, plan={"degrees": vars(degrees(sizes))}, data={}, environment={})


def test_other_processes_with_the_same_rows_a_step_are_the_same_run_and_told() -> None:
    problems, notes = differences(
        identity(EP4, 2, 1, expert_parallel_size=4, ep_dispatcher="auto"),
        identity(EP2, 1, 4, expert_parallel_size=2, ep_dispatcher="all_to_all"),
    )
    assert problems == []
    assert notes == [
        "8 rows a step as before, split into 4 micro-batches on 2 processes instead of 1 micro-batches on 4 "
        "processes: results may differ in their last bits",
        "ep_dispatcher was auto and is all_to_all: results may differ in their last bits",
        "expert_parallel_size was 4 and is 2: results may differ in their last bits",
        "the mesh was ep 4 and is ep 2, so that random numbers such as dropout's begin anew: results may differ in "
        "their last bits",
    ]


def test_the_same_processes_in_another_mesh_keep_their_random_numbers() -> None:
    problems, notes = differences(identity(EP4, 2, 1), identity(BOTH, 2, 1))
    assert problems == []
    assert notes == ["the mesh was ep 4 and is shard 2 x ep 2: results may differ in their last bits"]


@pytest.mark.parametrize(
    ("before", "after", "remedy"),
    [
        (identity(EP4, 2, 1), identity(EP2, 2, 1), "set gradient_accumulation_steps: 2"),
        (identity(EP4, 2, 1), identity(ALONE, 2, 1), "set gradient_accumulation_steps: 4"),
        (identity(EP4, 1, 1), identity(EP2, 4, 1),
         "set per_device_train_batch_size: 2 and gradient_accumulation_steps: 1"),
        (identity(EP4, 3, 1), identity(EP2, 4, 1),
         "set per_device_train_batch_size: 3 and gradient_accumulation_steps: 2"),
        (identity(EP2, 1, 1), identity(EP4, 1, 1),
         "2 rows do not divide among 4 processes: start a number of them that divides 2, and set "
         "per_device_train_batch_size and gradient_accumulation_steps so that all three multiply to it"),
        (Identity(config={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, plan={}, data={},
                  environment={}), identity(EP2, 2, 2), "set gradient_accumulation_steps: 1"),
    ],
)  # fmt: skip
def test_other_rows_a_step_are_refused_with_the_value_that_restores_them(
    before: Identity, after: Identity, remedy: str
) -> None:
    (problem,), _ = differences(before, after)
    assert problem.key == "gradient_accumulation_steps" and problem.remedy == remedy
    assert "rows, and the checkpoint was made with" in problem.why


def test_processes_that_share_their_rows_do_not_count_as_more_rows() -> None:
    problems, _ = differences(identity(EP4, 2, 1), identity({"cp": 2, "ep": 4}, 2, 1))
    assert problems == []


def test_keys_of_the_layout_are_keys() -> None:
    assert set(KEYS) >= LAYOUT
    assert not dist.is_initialized()
