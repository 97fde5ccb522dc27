"""Several processes compute what one does: loss, norm, every gradient, expert outputs, weights after four steps."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_core import registry
from halo_core.expert_parallel.experts import ParallelExperts
from halo_core.models.tiny import write_tiny
from halo_core.testing.cases import shake
from halo_core.testing.compare import REORDERED, differences
from tests.distributed import parity, ranks
from tests.distributed.parity import Expected, Setting

ARCHITECTURES = {a.name: a for a in registry.load().architectures()}
MOE = sorted(name for name, architecture in ARCHITECTURES.items() if architecture.spec.is_moe)

TOLERANCE = 1e-5
"""Absolute, fp32: two orders of the same sums. A norm is compared in units of itself where it is above one: at 40 the
last digit of fp32 is half of this."""

CHANGE = 0.05
"""Largest norm of a difference between two changes of a weight, as a share of the change: what fp32 leaves of changes
a hundred thousand times smaller than the weight."""

EP2, EP4, BOTH = {"ep": 2}, {"ep": 4}, {"shard": 2, "ep": 2}
SETTINGS = (
    Setting(sizes=EP2, starved=True),
    Setting(sizes=EP4, zero3=True, recomputed=True, forced=True),
    Setting(sizes=BOTH, recomputed=True, starved=True, kept=True),
    Setting(sizes=BOTH, zero3=True, forced=True),
    Setting(sizes=EP4, starved=True, deferred=True),
    Setting(sizes=EP2, zero3=True, recomputed=True, forced=True, starved=True),
    Setting(sizes=EP2, recomputed=True, forced=True, accumulation=1, per_device=2),
    Setting(sizes=BOTH, zero3=True, recomputed=True),
)
OF_ARCHITECTURE = ((0, 1, 3, 2), (5, 4, 7, 3), (6, 1, 2, 3), (0, 4, 7, 1), (5, 4, 2, 6))
CASES = [(name, SETTINGS[number]) for name, numbers in zip(MOE, OF_ARCHITECTURE, strict=True) for number in numbers]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a maker of tiny folders whose every tensor is off its neutral value."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("parity") / name
        write_tiny(ARCHITECTURES[name], folder)
        shake(folder)
        return folder

    return make


@cache
def expected(
    name: str, folder: Path, world: int, per_device: int, accumulation: int, forced: bool, starved: bool
) -> Expected:
    """Return what one process computes; settings that only say how several share the work have the same answer."""
    setting = Setting(
        sizes={"ep": world}, per_device=per_device, accumulation=accumulation, forced=forced, starved=starved
    )
    return parity.one_process(ARCHITECTURES[name], folder, setting)


def expected_of(name: str, folder: Path, setting: Setting) -> Expected:
    return expected(
        name, folder, setting.degrees.world, setting.per_device, setting.accumulation, setting.forced, setting.starved
    )


def changes(weights: dict[str, Tensor], folder: Path, name: str) -> dict[str, Tensor]:
    """Return by how much each weight changed."""
    before = start(name, folder)
    return {key: tensor - before[key] for key, tensor in weights.items() if tensor.is_floating_point()}


@cache
def start(name: str, folder: Path) -> dict[str, Tensor]:
    return parity.starting_weights(ARCHITECTURES[name], folder)


def faults(name: str, folder: Path, wanted: Expected, found: list[Expected]) -> list[str]:
    """Return in words what differs between one process and each of several."""
    lines = []
    outputs: dict[str, dict[int, Tensor]] = {}
    for rank, one in enumerate(found):
        for what in ("losses", "norms", "tokens"):
            for step, (ours, theirs) in enumerate(zip(getattr(one, what), getattr(wanted, what), strict=True)):
                unit = max(1.0, theirs) if what == "norms" else 1.0
                if not abs(ours - theirs) <= TOLERANCE * unit:
                    lines.append(f"rank {rank}: {what}[{step}] {ours}, expected {theirs}")
        for path, of_rows in one.outputs.items():
            outputs.setdefault(path, {}).update(of_rows)
    first = found[0]
    lines += [f"gradient {line}" for line in differences(first.gradients, wanted.gradients, REORDERED)]
    lines += [f"weight {line}" for line in differences(first.weights, wanted.weights, TOLERANCE)]
    ours, theirs = changes(first.weights, folder, name), changes(wanted.weights, folder, name)
    for key, change in theirs.items():
        floor = 1e-7 * float(start(name, folder)[key].abs().max()) * change.numel() ** 0.5
        if float((ours[key] - change).norm()) > CHANGE * float(change.norm()) + floor:
            lines.append(f"weight {key} changed otherwise")
    for path, of_rows in wanted.outputs.items():
        flat = {str(row): tensor for row, tensor in of_rows.items()}
        got = {str(row): tensor for row, tensor in outputs[path].items()}
        lines += [f"experts {path} row {line}" for line in differences(got, flat, TOLERANCE)]
    return lines


@pytest.mark.parametrize(("name", "setting"), CASES, ids=lambda part: str(part))
def test_several_processes_compute_what_one_does(name: str, setting: Setting, folder_of: Any) -> None:
    folder = folder_of(name)
    wanted = expected_of(name, folder, setting)
    found = ranks.run(
        setting.degrees.world, parity.several_processes, ARCHITECTURES[name], folder, setting, wanted.rate
    )
    assert faults(name, folder, wanted, found) == []


OTHERS = [
    ("qwen3_moe", Setting(sizes={"replicate": 2, "ep": 2}, recomputed=True, starved=True)),
    ("lfm2_moe", Setting(sizes={"shard": 3}, zero3=True, recomputed=True, starved=True)),  # 8 experts on 3 processes
    ("gemma4", Setting(sizes={"shard": 2}, zero3=True, recomputed=True)),
    ("lfm2", Setting(sizes={"replicate": 2, "shard": 2}, deferred=True)),
]


@pytest.mark.parametrize(("name", "setting"), OTHERS, ids=lambda part: str(part))
def test_so_they_do_with_replicas_and_without_expert_parallelism(name: str, setting: Setting, folder_of: Any) -> None:
    test_several_processes_compute_what_one_does(name, setting, folder_of)


def test_the_settings_cover_every_pair_of_options() -> None:
    def options(setting: Setting) -> set[tuple[str, Any]]:
        return {("mesh", str(setting.sizes)), ("zero3", setting.zero3), ("recomputed", setting.recomputed),
                ("forced", setting.forced), ("starved", setting.starved)}  # fmt: skip

    everything = set().union(*(options(setting) for setting in SETTINGS))
    pairs = {frozenset(pair) for setting in SETTINGS for pair in itertools.combinations(options(setting), 2)}
    wanted = {frozenset((a, b)) for a, b in itertools.combinations(everything, 2) if a[0] != b[0]}
    assert pairs >= wanted
    for numbers in OF_ARCHITECTURE:
        chosen = [SETTINGS[number] for number in numbers]
        assert len({str(setting.sizes) for setting in chosen}) == 3
        for option in ("zero3", "recomputed", "forced", "starved"):
            assert {getattr(setting, option) for setting in chosen} == {True, False}


class WithoutRoutingGradient(ParallelExperts):
    """Loses what routers would learn from."""

    def __call__(self, weights: Any, hidden: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        return super().__call__(weights, hidden, ids, routing.detach())


class FirstExpertOnly(ParallelExperts):
    """Forgets a token's last slot."""

    def __call__(self, weights: Any, hidden: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        return super().__call__(weights, hidden, ids, torch.cat([routing[:, :-1], routing[:, -1:] * 0], dim=1))


def halved(model: Any) -> None:
    """Average the gradients of parameters outside layers over the two processes."""
    model.set_gradient_divide_factor(2.0)


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ({"kernel": WithoutRoutingGradient}, "gradient model.layers.1.mlp.gate.weight"),
        ({"kernel": FirstExpertOnly}, "experts model.layers.1.mlp.experts"),
        ({"alter": halved}, "gradient model.norm.weight"),
    ],
)  # fmt: skip
def test_a_wrong_part_is_noticed(fault: dict[str, Any], seen: str, folder_of: Any) -> None:
    name, setting = "qwen3_moe", Setting(sizes=EP2)
    folder = folder_of(name)
    wanted = expected_of(name, folder, setting)
    found = ranks.run(
        2, lambda: parity.several_processes(ARCHITECTURES[name], folder, setting, wanted.rate, **fault)
    )
    assert any(line.startswith(seen) for line in faults(name, folder, wanted, found))
