"""The support matrix, cell by cell: what is printed Supported is shown, what is printed Unsupported refuses.

Not for the kit itself, which is shown able to fail in `test_kit.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from halo_core import config as configuration
from halo_core import registry, support
from halo_core.config import active_features
from halo_core.support import Cell
from halo_core.testing.cells import (
    ASKS,
    assert_refused,
    smallest_config,
    supported_cells,
    unsupported_cells,
)
from halo_core.testing.conformance import PROOFS, Suite, unproven
from halo_core.verdict import Supported

REGISTRY = registry.load()
ARCHITECTURES = {architecture.name: architecture for architecture in REGISTRY.architectures()}
NOT_BUILT = [
    cell for architecture in ARCHITECTURES.values() for feature in support.FEATURES
    if (cell := architecture.cell(feature)).word == "not built yet"
]
NEVER_ASKED = {"sft", "balancing:none", "fsdp"}
"""Always part of a run, the absence of something, and asked for by the number of processes."""

IN_FRESH_PROCESS = """
import json, sys
from pathlib import Path
from halo_core import registry
from halo_core.testing.cells import assert_refused

joined = registry.load()
architectures = {architecture.name: architecture for architecture in joined.architectures()}
for name, feature in json.loads(sys.argv[1]):
    assert_refused(joined, architectures[name], feature, Path(sys.argv[2]))
heavy = sorted({"torch", "transformers", "safetensors", "datasets"} & set(sys.modules))
assert not heavy, f"refusing imported {heavy}"
"""


def name_of(cell: Cell) -> str:
    return f"{cell.architecture}-{cell.feature}"


@pytest.mark.parametrize("cell", supported_cells(REGISTRY), ids=name_of)
def test_supported_cell_equals_transformers_alone(cell: Cell, suite: Suite, tmp_path: Path) -> None:
    suite.prove(cell, tmp_path)


@pytest.mark.parametrize("cell", unsupported_cells(REGISTRY), ids=name_of)
def test_unsupported_cell_refuses_with_its_reason_and_is_honest(cell: Cell, suite: Suite, tmp_path: Path) -> None:
    suite.prove(cell, tmp_path)


def test_every_cell_that_is_not_built_refuses_with_its_reason(tmp_path: Path) -> None:
    for cell in NOT_BUILT:
        assert_refused(REGISTRY, ARCHITECTURES[cell.architecture], cell.feature, tmp_path)
    assert len(NOT_BUILT) > len(ARCHITECTURES)


def test_refusals_come_without_torch_and_without_weights(tmp_path: Path) -> None:
    one_each = {cell.architecture: cell for cell in [*NOT_BUILT, *unsupported_cells(REGISTRY)]}
    asked = json.dumps([(cell.architecture, cell.feature) for cell in one_each.values()])
    done = subprocess.run(
        [sys.executable, "-c", IN_FRESH_PROCESS, asked, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(one_each) == len(ARCHITECTURES)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"config.json"}


def test_every_built_feature_has_a_proof() -> None:
    answers = [answer for architecture in ARCHITECTURES.values() for answer, _ in architecture.answers.values()]
    on_cpu = {answer.feature for answer in answers if answer.verdict == Supported(proof="cpu")}
    assert set(PROOFS) == {mechanism.feature for mechanism in support.MECHANISMS if mechanism.built} & on_cpu


def test_nothing_is_printed_that_could_not_be_shown() -> None:
    assert unproven(REGISTRY) == []


def test_every_feature_can_be_asked_for(tmp_path: Path) -> None:
    architecture = next(iter(ARCHITECTURES.values()))
    assert set(ASKS) == set(support.FEATURES)
    for feature in set(ASKS) - NEVER_ASKED:
        given = smallest_config(architecture, feature, tmp_path)
        read = configuration.read(None, given=given)
        assert not read.problems, read.problems
        assert feature in [asked for _, _, asked in active_features(read.config)]


def test_both_kinds_of_architecture_and_every_built_family_have_cells() -> None:
    shown = {cell.architecture for cell in supported_cells(REGISTRY)}
    assert shown == set(ARCHITECTURES)
    assert {architecture.family for architecture in ARCHITECTURES.values()} == set(REGISTRY.families)
    assert {architecture.spec.is_moe for architecture in ARCHITECTURES.values()} == {True, False}
