"""Whole runs on packs and on flattened batches beside the same run on the same rows, each alone in its batch.

Not for one forward pass of packed documents, nor for which rows share a pack: the loop, its log and the export are
compared here, for one process or several.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from halo_core.registry import Registry
from halo_core.testing.cases import Case
from halo_core.testing.compare import REORDERED, assert_same
from halo_core.testing.several import ROWS, trained

SEEN = ROWS[:14]
"""The rows of a run here: of unequal length, 10 to 24 tokens."""

MAX_LENGTH = 37
"""Tokens of a pack: odd, and one to three of the rows."""

CLOSE = 1e-5
"""Largest relative difference of losses and gradient norms, fp32: the same sums in another order."""

STEPS = 2

ALONE: Mapping[str, Any] = MappingProxyType(
    {"max_length": MAX_LENGTH, "per_device_train_batch_size": 1, "gradient_accumulation_steps": len(SEEN)}
)
"""Every row by itself, nothing padded, all rows in each step. A step of whole epochs has the same rows whatever shares
a batch with what, and the loss is a mean over all their tokens, so how they are grouped must not matter."""

FLAT: Mapping[str, Any] = MappingProxyType(
    {"padding_free": True, "per_device_train_batch_size": 5, "gradient_accumulation_steps": -(-len(SEEN) // 5)}
)
"""Five rows flattened to one; the last micro-batch of an epoch holds four."""

PACKED: Mapping[str, Any] = MappingProxyType(
    {"packing": True, "per_device_train_batch_size": 3, "gradient_accumulation_steps": len(SEEN) // 3}
)
"""Three packs of unlike lengths, padded to the longest; accumulation for more packs than there are."""


def prove_packing(registry: Registry, case: Case) -> None:
    """A run on packs, padded or flattened, is the run on the same rows, each alone: losses, norms, weights."""
    assert_equals_rows_alone(registry, case, [PACKED, {**PACKED, "padding_free": True}])


def prove_padding_free(registry: Registry, case: Case) -> None:
    """A run on flattened batches of rows is the run on the same rows, each alone: losses, norms, weights."""
    assert_equals_rows_alone(registry, case, [FLAT])


def assert_equals_rows_alone(
    registry: Registry, case: Case, runs: list[Mapping[str, Any]], *, world: int = 1
) -> list[list[dict[str, float]]]:
    """Check losses, gradient norms, counts and exported weights of runs with these keys by `world` processes against
    one process that takes every row alone; return the rows of their logs.

    Raises:
        AssertionError: naming what differs.
    """
    common = {"max_steps": STEPS, "max_length": MAX_LENGTH}
    logs = []
    with TemporaryDirectory() as place:
        expected_rows, expected = trained(registry, case, {**ALONE, **common}, 1, Path(place) / "alone", SEEN)
        assert all(row["padding_tokens"] == 0 and row["documents"] == len(SEEN) for row in expected_rows)
        for number, keys in enumerate(runs):
            rows, found = trained(registry, case, {**common, **keys}, world, Path(place) / str(number), SEEN)
            what = f"{case.architecture.name} with {', '.join(f'{key}: {value}' for key, value in keys.items())}"
            assert len(rows) == len(expected_rows) == STEPS
            for row, wanted in zip(rows, expected_rows, strict=True):
                for key in ("tokens", "supervised_tokens", "documents"):
                    assert row[key] == wanted[key], f"{what}: {row[key]} {key} in step {row['step']}, not {wanted[key]}"
                for key in ("loss", "grad_norm"):
                    gap = abs(row[key] - wanted[key])
                    assert gap <= CLOSE * abs(wanted[key]), (
                        f"{what}: {key} of step {row['step']} is {row[key]}, and {wanted[key]} with each row alone"
                    )
            assert_same(what, found, expected, REORDERED)
            logs.append(rows)
    return logs
