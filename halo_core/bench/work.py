"""Which random rows each step of a measurement trains: rows of one length, or rows of many lengths, packed or not.

Not for tokens (`random_rows.py`) nor for times (`measure.py`). Steps count from 1: warm-up, then those that are timed,
then one whose bytes are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halo_core.bench import random_rows
from halo_core.config import RunConfig
from halo_core.data import units
from halo_core.data.order import StepOrder
from halo_core.data.units import Unit
from halo_core.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained. parts: step -> the micro-batches of this process. timed: number of steps that are timed.

    rows: how many rows the timed steps train, all processes together.
    """

    parts: Callable[[int], list[list[Unit]]]
    timed: int
    rows: int


def of_one_length(config: RunConfig, topology: Topology, *, vocab_size: int, warmup: int, steps: int) -> Work:
    """Return steps over rows of exactly `max_length` tokens; none of them comes twice."""
    assert config.max_length is not None, "the length of rows is given"
    count = (warmup + steps + 1) * _order(config, topology, 1).rows_per_step
    rows = random_rows.make(count, length=config.max_length, seed=config.seed, vocab_size=vocab_size)
    parts = _parts(rows, _order(config, topology, len(rows)), topology)
    return Work(parts=parts, timed=steps, rows=steps * _order(config, topology, 1).rows_per_step)


def of_many_lengths(
    config: RunConfig, topology: Topology, *, vocab_size: int, warmup: int, rows: int, mean_length: int
) -> Work:
    """Return steps that train `rows` rows of `mean_length` tokens in the mean, each once, in as many as that takes.

    The rows are the same however they are laid out: one by one, packed, flattened. Warm-up has rows of its own.
    """
    assert config.max_length is not None, "the length of rows is given"
    each = []
    for seed in (config.seed, config.seed + 1):
        made = random_rows.make(
            rows, length=config.max_length, mean_length=mean_length, seed=seed, vocab_size=vocab_size
        )
        laid: Sequence[Unit] = made
        if config.packing:
            laid, _ = units.pack(made, config.max_length, config.packing_strategy)
        order = _order(config, topology, len(laid))
        each.append((order, _parts(laid, order, topology)))
    (order, timed), (_, other) = each

    def parts(step: int) -> list[list[Unit]]:
        is_timed = warmup < step <= warmup + order.steps_per_epoch
        return timed(step - warmup) if is_timed else other(step)

    return Work(parts=parts, timed=order.steps_per_epoch, rows=rows)


def _order(config: RunConfig, topology: Topology, count: int) -> StepOrder:
    return StepOrder(
        num_rows=count, per_device=config.per_device_train_batch_size, data_ranks=topology.data_ranks,
        accumulation=config.gradient_accumulation_steps, seed=config.seed,
    )  # fmt: skip


def _parts(laid: Sequence[Unit], order: StepOrder, topology: Topology) -> Callable[[int], list[list[Unit]]]:
    def parts(step: int) -> list[list[Unit]]:
        return [[laid[index] for index in part] for part in order.micro_batches(step, topology.data_rank)]

    return parts
