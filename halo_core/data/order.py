"""Which rows a step sees: the order of every epoch and its split over steps, micro-batches and ranks.

Not for the rows themselves; everything here is a pure function of numbers, so a resumed run needs the step alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class StepOrder:
    """The rows of every step of a run over `num_rows` rows.

    A step takes the next `per_device * data_ranks * accumulation` rows of its epoch's order, in micro-batches that are
    split over the ranks by position. The last window of an epoch is kept although it is short: it has fewer
    micro-batches, the same number on every rank, and a rank may get an empty one. Steps count from 1, as in the log.
    """

    num_rows: int
    per_device: int
    data_ranks: int
    accumulation: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("num_rows", "per_device", "data_ranks", "accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def rows_per_step(self) -> int:
        """The number of rows of a full step, all ranks together."""
        return self.per_device * self.data_ranks * self.accumulation

    @property
    def steps_per_epoch(self) -> int:
        """The number of optimizer steps of one epoch, the short last one included."""
        return math.ceil(self.num_rows / self.rows_per_step)

    def epoch_of(self, step: int) -> float:
        """Return how many epochs are done once `step` (from 1) is done; 0 steps are 0 epochs."""
        return step / self.steps_per_epoch

    def window(self, step: int) -> list[int]:
        """Return the row indices of the whole global batch of `step` (from 1), in order."""
        if step < 1:
            raise ValueError(f"steps count from 1, not {step}")
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        start = position * self.rows_per_step
        order = epoch_order(self.num_rows, self.seed, epoch)
        return [int(index) for index in order[start : start + self.rows_per_step]]

    def micro_batches(self, step: int, rank: int = 0) -> list[list[int]]:
        """Return the row indices of each micro-batch of `step` (from 1) on data rank `rank` (from 0).

        The list has the same length on every rank; a micro-batch may be empty on some.
        """
        return split(self.window(step), self.per_device, self.data_ranks, rank)


def evaluation_batches(num_rows: int, per_device: int, data_ranks: int = 1, rank: int = 0) -> list[list[int]]:
    """Return the row indices of each evaluation batch of data rank `rank`: file order, every row on one rank, once.

    The list has the same length on every rank; the last batch may be short, or empty on some ranks.
    """
    return split(range(num_rows), per_device, data_ranks, rank)


def total_steps(order: StepOrder, *, max_steps: int = -1, num_train_epochs: float = 1.0) -> int:
    """Return the number of optimizer steps of a run: `max_steps` where positive, else as many as the epochs need.

    `num_train_epochs` may be a fraction; the steps are rounded up. Source: transformers' Trainer, so that the
    schedule of a run has the same length there and here.
    """
    if max_steps > 0:
        return max_steps
    return math.ceil(num_train_epochs * order.steps_per_epoch)


@lru_cache(maxsize=4)
def epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the permutation [num_rows] int64 of epoch `epoch` (from 0), read-only.

    Rows are sorted by the raw 64-bit words of a PCG64 keyed by a hash of (seed, epoch): numpy keeps raw words the
    same over its versions, which it does not promise for `shuffle` or `permutation`.
    """
    key = hashlib.blake2b(f"row order, seed {seed}, epoch {epoch}".encode(), digest_size=16).digest()
    words = np.random.PCG64(np.random.SeedSequence(int.from_bytes(key, "little"))).random_raw(num_rows)
    order = np.argsort(words, kind="stable")
    order.setflags(write=False)
    return order


def split(window: Sequence[int], per_device: int, data_ranks: int, rank: int) -> list[list[int]]:
    """Return the micro-batches of `rank`: the window in runs of per_device * data_ranks, each run split by position."""
    if not 0 <= rank < data_ranks:
        raise ValueError(f"rank must be from 0 to {data_ranks - 1}, not {rank}")
    run = per_device * data_ranks
    first = rank * per_device
    return [list(window[start : start + run][first : first + per_device]) for start in range(0, len(window), run)]
