"""What the lengths of rows mean for a run: their histogram, packing at several lengths, padding, steps.

Not for printing (`cli/data.py`); numbers alone, from the rows and the very functions that a run uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from halo_core.config import RunConfig
from halo_core.data.order import StepOrder, epoch_order
from halo_core.data.packing import Layout as PackLayout
from halo_core.data.packing import cut, lay_out, splits
from halo_core.data.rows import Rows
from halo_core.data.units import pack


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Rows of `low` to `high` tokens, both included."""

    low: int
    high: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Packing at one `max_length`: packs, the part of them that is filled, and rows too long for it."""

    max_length: int
    packs: int
    filled: float
    too_long: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to make batches: rows or packs of an epoch, its steps, and the part of all positions that is padding."""

    name: str
    units: int
    steps: int
    padding: float


def histogram(lengths: np.ndarray, bins: int = 12) -> list[Bin]:
    """Return the rows by length in at most `bins` equally wide ranges, from the shortest row to the longest."""
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, math.ceil((high - low + 1) / bins))
    counts = np.bincount((lengths - low) // width, minlength=math.ceil((high - low + 1) / width))
    return [
        Bin(low=low + number * width, high=low + (number + 1) * width - 1, rows=int(count))
        for number, count in enumerate(counts)
    ]


def lengths_to_try(lengths: np.ndarray, max_length: int | None) -> list[int]:
    """Return the values of max_length to compare: the run's own (else the longest row) by powers of two around it."""
    own = max_length or int(lengths.max())
    return sorted({max(2, int(own * factor)) for factor in (0.25, 0.5, 1, 2, 4)})


def packed(rows: Rows, max_length: int, strategy: str) -> Packed:
    """Return what packing at `max_length` gives; rows too long for whole packing are left out and counted."""
    layout = _packs(rows, max_length, strategy)
    packs = len(layout)
    return Packed(
        max_length=max_length,
        packs=packs,
        filled=int(layout.pieces.lengths.sum()) / (packs * max_length) if packs else 0.0,
        too_long=int(np.count_nonzero(rows.lengths > max_length)),
    )


def layouts(rows: Rows, config: RunConfig, data_ranks: int) -> list[Layout]:
    """Return padding, padding-free and packing (where there is a max_length) at the run's batch size.

    rows: the kept ones. data_ranks: processes that see different rows.
    """
    lengths = rows.lengths
    seed = config.seed if config.data_seed is None else config.data_seed
    per_device = config.per_device_train_batch_size

    def steps(units: int) -> int:
        order = StepOrder(num_rows=units, per_device=per_device, data_ranks=data_ranks,
                          accumulation=config.gradient_accumulation_steps, seed=seed)  # fmt: skip
        return order.steps_per_epoch

    def padding(units: np.ndarray) -> float:
        return padding_share(units[epoch_order(len(units), seed, 0)], per_device)

    found = [
        Layout(name="padding", units=len(lengths), steps=steps(len(lengths)), padding=padding(lengths)),
        Layout(name="padding_free: true", units=len(lengths), steps=steps(len(lengths)), padding=0.0),
    ]
    if config.max_length is not None:
        layout = _packs(rows, config.max_length, config.packing_strategy)
        if len(layout):
            filled = np.add.reduceat(layout.pieces.lengths, layout.borders[:-1])
            found.append(
                Layout(name="packing: true", units=len(layout), steps=steps(len(layout)), padding=padding(filled))
            )  # fmt: skip
    return found


def _packs(rows: Rows, max_length: int, strategy: str) -> PackLayout:
    """Return the packs that a run at this `max_length` has."""
    if splits(strategy):
        return pack(rows, max_length, strategy)[0].layout
    lengths = rows.lengths
    return lay_out(cut(lengths[lengths <= max_length], max_length, strategy), max_length)


def padding_share(lengths: np.ndarray, per_device: int) -> float:
    """Return the part of all positions that is padding, where runs of `per_device` units are padded to their longest.

    lengths [units]: in the order of an epoch.
    """
    positions = 0
    for begin in range(0, len(lengths), per_device):
        own = lengths[begin : begin + per_device]
        positions += int(own.max()) * len(own)
    return 1.0 - int(lengths.sum()) / positions if positions else 0.0


def quantiles(lengths: np.ndarray, at: Sequence[float] = (0.5, 0.9, 0.99)) -> list[int]:
    """Return the lengths below or at which these parts of the rows lie."""
    return [int(value) for value in np.quantile(lengths, at, method="inverted_cdf")]
