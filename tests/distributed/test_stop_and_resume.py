"""Three epochs by the real loop, stopped at several steps: the rows go on bit for bit, at one layout the weights too.

Not for files (`test_checkpoint_layouts.py`) nor for what a changed run is refused for (`test_checkpoint_resume.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_core import process_group, registry
from halo_core.checkpoint import agreement, find
from halo_core.checkpoint.find_together import find_together
from halo_core.checkpoint.identity import Identity, data_of, plain
from halo_core.checkpoint.save import stored_weights
from halo_core.config.keys import RunConfig
from halo_core.data.collate import collate
from halo_core.data.order import StepOrder, total_steps
from halo_core.data.rows import Row
from halo_core.data.units import Pack
from halo_core.errors import Refused
from halo_core.methods.sft import Sft
from halo_core.models.hidden import Head, last_hidden
from halo_core.models.tiny import write_tiny
from halo_core.optim.build import build_optimizer
from halo_core.optim.schedule import build_schedule
from halo_core.topology import Topology
from halo_core.trainer import run_folder
from halo_core.trainer.interrupts import Interrupts
from halo_core.trainer.loop import fit
from halo_core.trainer.stopped import Interrupted
from tests.distributed import ranks
from tests.distributed.sharded_models import built, degrees

MOE = {a.name: a for a in registry.load().architectures()}["lfm2_moe"]
ALONE, EP2, BOTH = {"ep": 1}, {"ep": 2}, {"shard": 2, "ep": 2}
ROWS, PACKS, EACH_STEP, LAST = 13, 3, 4, 9
"""Ten units, so three steps an epoch, the last of them short: two units."""
CLOSE = 1e-5
"""Absolute, fp32, after nine steps of AdamW at 1e-3 with a large epsilon: the same sums in another order."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Of each step from 1, or from the one after the checkpoint: the row ids by rank; and the last weights, whole."""

    row_ids: dict[int, list[tuple[int, ...]]]
    weights: dict[str, Tensor]

    def rows_of(self, step: int) -> list[int]:
        return sorted(row for own in self.row_ids[step] for row in own)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    write_tiny(MOE, folder)
    return folder


def units(vocabulary: int) -> list[Row | Pack]:
    """Return uneven rows, some of them in packs of two."""
    generator = torch.Generator().manual_seed(11)
    lengths = [3 + 2 * (number % 4) for number in range(ROWS)]
    rows = [Row(row_id=number, input_ids=torch.randint(0, vocabulary, (length,), generator=generator).tolist(),
                supervised=[False, *[True] * (length - 1)]) for number, length in enumerate(lengths)]
    packs = [Pack(rows=(rows[place], rows[place + 1])) for place in range(0, 2 * PACKS, 2)]
    return [*packs, *rows[2 * PACKS :]]


def run(
    source: Path, sizes: Mapping[str, int], folder: Path, *, resume_from: Path | None = None,
    stop_at: int | None = None, **changes: Any,
) -> Ran:  # fmt: skip
    """Run as a command does, from the checkpoint on where one is given; stop_at: a signal comes in that step."""
    topology = Topology(degrees=degrees(sizes), rank=process_group.rank())
    config = replace(
        RunConfig(per_device_train_batch_size=1, gradient_accumulation_steps=EACH_STEP // topology.data_ranks,
                  num_train_epochs=3.0, learning_rate=1e-3, adam_epsilon=1e-4, lr_scheduler_type="cosine",
                  save_strategy="no", optim="adamw_torch", seed=5, output_dir=str(folder),
                  resume_from_checkpoint=str(resume_from) if resume_from else None),
        **changes,
    )  # fmt: skip
    model, sharded = built(MOE, source, sizes)
    taken = units(model.config.vocab_size)
    order = StepOrder(len(taken), config.per_device_train_batch_size, topology.data_ranks,
                      config.gradient_accumulation_steps, config.seed)
    total = total_steps(order, max_steps=config.max_steps, num_train_epochs=config.num_train_epochs)
    identity = Identity(config=plain(vars(config)), plan={"degrees": plain(vars(degrees(sizes)))}, data=data_of(taken),
                        environment={})
    checkpoint = find_together(config.resume_from_checkpoint, folder)
    if checkpoint is not None:
        find.check(checkpoint, identity)
    agreement.once_per_folder(
        folder, lambda: run_folder.open_folder(folder, config=identity.config, plan={}, environment={}) and None)
    row_ids: dict[int, list[tuple[int, ...]]] = {}
    interrupts = Interrupts()

    def heard(report: Any) -> None:
        row_ids[report.step] = agreement.gathered(report.row_ids)
        if report.step == stop_at and process_group.rank() == 0:
            interrupts.request("SIGTERM")

    with nullcontext() if stop_at is None else pytest.raises(Interrupted, match=f"checkpoint-{stop_at}"):
        fit(model=model, model_hidden=last_hidden, head=Head(model, MOE), method=Sft(collate_rows=collate), rows=taken,
            evaluation=None, order=order, pad_id=0, optimizer=build_optimizer(model, config),
            schedule=build_schedule(config, total), total_steps=total, config=config,
            folder=run_folder.RunFolder(path=folder), identity=identity, device=torch.device("cpu"),
            interrupts=interrupts, on_step=heard, checkpoint=checkpoint, sharded=sharded,
            data_rank=topology.data_rank)
    weights = {name: whole(tensor) for name, tensor in stored_weights(model).items()}
    return Ran(row_ids=row_ids, weights=weights)


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def straight_and_resumed(
    source: Path, sizes: Mapping[str, int], folder: Path, stops: tuple[int, ...], signal_at: int | None, beside: bool
) -> tuple[Ran | None, list[str]]:
    """Run straight on, and from the checkpoint of every stop again; return the straight run and what differs."""
    straight = run(source, sizes, folder / "straight", save_strategy="steps", save_steps=1, save_async=beside)
    faults = []
    for stop in stops:
        again = run(source, sizes, folder / f"after-{stop}", resume_from=folder / "straight" / f"checkpoint-{stop}")
        if again.row_ids != {step: straight.row_ids[step] for step in range(stop + 1, LAST + 1)}:
            faults.append(f"after {stop}: other rows")
        faults += [f"after {stop}: {name}" for name, tensor in straight.weights.items()
                   if not torch.equal(tensor, again.weights[name])]
    if signal_at is not None:
        stopped = run(source, sizes, folder / "stopped", stop_at=signal_at, save_async=beside)
        rest = run(source, sizes, folder / "stopped", resume_from=folder / "stopped" / f"checkpoint-{signal_at}")
        if {**stopped.row_ids, **rest.row_ids} != straight.row_ids:
            faults.append("stopped by a signal: other rows")
        faults += [f"stopped by a signal: {name}" for name, tensor in straight.weights.items()
                   if not torch.equal(tensor, rest.weights[name])]
    return (straight if process_group.rank() == 0 else None), faults


def everywhere(sizes: Mapping[str, int], function: Any, *arguments: Any) -> list[Any]:
    world = degrees(sizes).world
    return [function(*arguments)] if world == 1 else ranks.run(world, function, *arguments)


@pytest.fixture(scope="module")
def finished(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Ran, list[str]]]:
    """Return, by layout, the folder of its runs, the straight one, and what differs in the others."""
    made = {}
    for sizes, stops, signal_at, beside in (
        (ALONE, (2, 7), None, False), (EP2, (7,), 5, True), (BOTH, (4,), None, True)
    ):  # fmt: skip
        folder = tmp_path_factory.mktemp("runs")
        outcomes = everywhere(sizes, straight_and_resumed, source, sizes, folder, stops, signal_at, beside)
        made[str(sizes)] = (folder, outcomes[0][0], [fault for _, faults in outcomes for fault in faults])
    return made


@pytest.mark.parametrize("sizes", [ALONE, EP2, BOTH], ids=str)
def test_at_the_same_layout_every_stop_goes_on_bit_for_bit(
    finished: dict[str, tuple[Path, Ran, list[str]]], sizes: Mapping[str, int]
) -> None:
    assert finished[str(sizes)][2] == []


def test_every_layout_takes_the_rows_of_one_process_each_row_once_an_epoch(
    finished: dict[str, tuple[Path, Ran, list[str]]]
) -> None:
    _, alone, _ = finished[str(ALONE)]
    for sizes in (EP2, BOTH):
        _, ran, _ = finished[str(sizes)]
        assert [ran.rows_of(step) for step in range(1, LAST + 1)] == [
            alone.rows_of(step) for step in range(1, LAST + 1)]
        assert distance(ran, alone) < CLOSE
    for epoch in range(3):
        seen = [row for step in range(3 * epoch + 1, 3 * epoch + 4) for row in alone.rows_of(step)]
        assert sorted(seen) == list(range(ROWS))
    assert alone.row_ids[1] != alone.row_ids[4]


@pytest.mark.parametrize(("before", "after", "stop"), [(EP2, ALONE, 4), (ALONE, EP2, 7), (BOTH, EP2, 5)], ids=str)
def test_at_another_layout_the_rows_go_on_bit_for_bit_and_the_weights_nearly(
    source: Path, finished: dict[str, tuple[Path, Ran, list[str]]], tmp_path: Path,
    before: Mapping[str, int], after: Mapping[str, int], stop: int,
) -> None:  # fmt: skip
    folder, straight, _ = finished[str(before)]
    resumed = everywhere(after, resumed_at, source, after, tmp_path, folder / "straight" / f"checkpoint-{stop}")[0]
    assert sorted(resumed.row_ids) == list(range(stop + 1, LAST + 1))
    for step in resumed.row_ids:
        assert resumed.rows_of(step) == straight.rows_of(step)
    assert distance(resumed, straight) < CLOSE


def resumed_at(source: Path, sizes: Mapping[str, int], folder: Path, checkpoint: Path) -> Ran:
    return run(source, sizes, folder, resume_from=checkpoint)


def distance(first: Ran, second: Ran) -> float:
    assert first.weights.keys() == second.weights.keys() and len(first.weights) > 30
    return max(float((tensor - second.weights[name]).abs().max()) for name, tensor in first.weights.items())


def test_another_seed_and_another_batch_are_refused_before_weights_are_read(
    source: Path, finished: dict[str, tuple[Path, Ran, list[str]]], tmp_path: Path
) -> None:
    folder, straight, _ = finished[str(ALONE)]
    at = folder / "straight" / "checkpoint-4"
    with pytest.raises(Refused, match="set gradient_accumulation_steps: 2"):
        run(source, ALONE, tmp_path, resume_from=at, per_device_train_batch_size=2)
    with pytest.raises(Refused, match="seed: 6"):
        run(source, ALONE, tmp_path, resume_from=at, seed=6)
    other = run(source, ALONE, tmp_path, resume_from=at, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert [other.rows_of(step) for step in range(5, 10)] == [straight.rows_of(step) for step in range(5, 10)]
    state = json.loads((at / "state.json").read_text())
    assert state["progress"]["epoch"] == pytest.approx(1 + 1 / 3, abs=0.1)
