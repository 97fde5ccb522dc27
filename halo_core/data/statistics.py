"""What the lengths of rows mean for a run: their histogram, packing at several lengths, padding, steps.

Not for printing (`cli/data.py`); numbers alone, from the lengths and the very functions that a run uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from halo_core.config import RunConfig
from halo_core.data.order import epoch_order
from halo_core.data.packing import cut, lay_out, splits


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


def packed(lengths: np.ndarray, max_length: int, strategy: str) -> Packed:
    """Return what packing at `max_length` gives; rows too long for whole packing are left out and counted."""
    fitting = lengths if splits(strategy) else lengths[lengths <= max_length]
    packs = len(lay_out(cut(fitting, max_length, strategy), max_length)) if len(fitting) else 0
    return Packed(
        max_length=max_length,
        packs=packs,
        filled=int(fitting.sum()) / (packs * max_length) if packs else 0.0,
        too_long=int(np.count_nonzero(lengths > max_length)),
    )


def layouts(lengths: np.ndarray, config: RunConfig, data_ranks: int) -> list[Layout]:
    """Return padding, padding-free and packing (where there is a max_length) at the run's batch size.

    lengths [rows] int64: of the kept rows. data_ranks: processes that see different rows.
    """
    seed = config.seed if config.data_seed is None else config.data_seed
    per_device = config.per_device_train_batch_size
    rows_per_step = per_device * data_ranks * config.gradient_accumulation_steps

    def steps(units: int) -> int:
        return math.ceil(units / rows_per_step)

    def padding(units: np.ndarray) -> float:
        return padding_share(units[epoch_order(len(units), seed, 0)], per_device)

    found = [
        Layout(name="padding", units=len(lengths), steps=steps(len(lengths)), padding=padding(lengths)),
        Layout(name="padding_free: true", units=len(lengths), steps=steps(len(lengths)), padding=0.0),
    ]
    if config.max_length is not None:
        fitting = lengths if splits(config.packing_strategy) else lengths[lengths <= config.max_length]
        layout = lay_out(cut(fitting, config.max_length, config.packing_strategy), config.max_length)
        filled = np.add.reduceat(layout.pieces.lengths, layout.borders[:-1]) if len(layout) else np.zeros(0, np.int64)
        found.append(
            Layout(name="packing: true", units=len(layout), steps=steps(len(layout)), padding=padding(filled))
        )  # fmt: skip
    return found


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
