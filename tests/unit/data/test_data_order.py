"""The order of rows over steps, micro-batches and ranks. Not for what a row holds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halo_core.data.order import StepOrder, evaluation_batches, total_steps

SHAPES = {
    "num_rows": st.integers(1, 60),
    "per_device": st.integers(1, 5),
    "data_ranks": st.integers(1, 4),
    "accumulation": st.integers(1, 5),
    "seed": st.integers(0, 2**40),
}


def rows_of_step(order: StepOrder, step: int) -> list[int]:
    """Return the rows of a step as they lie: micro-batch by micro-batch, rank by rank."""
    per_rank = [order.micro_batches(step, rank) for rank in range(order.data_ranks)]
    return [row for micro in zip(*per_rank, strict=True) for part in micro for row in part]


@given(**SHAPES, epoch=st.integers(0, 3))
def test_every_epoch_sees_every_row_exactly_once(epoch: int, **shape: int) -> None:
    order = StepOrder(**shape)
    first = epoch * order.steps_per_epoch + 1
    seen = [row for step in range(first, first + order.steps_per_epoch) for row in rows_of_step(order, step)]
    assert sorted(seen) == list(range(shape["num_rows"]))


@given(**SHAPES)
def test_global_batches_depend_on_the_product_alone(**shape: int) -> None:
    order = StepOrder(**shape)
    whole = StepOrder(shape["num_rows"], order.rows_per_step, 1, 1, shape["seed"])
    assert whole.steps_per_epoch == order.steps_per_epoch
    for step in range(1, 2 * order.steps_per_epoch + 1):
        assert rows_of_step(order, step) == whole.micro_batches(step)[0]


@given(**SHAPES)
def test_ranks_have_equally_many_micro_batches(**shape: int) -> None:
    order = StepOrder(**shape)
    for step in range(1, order.steps_per_epoch + 1):
        counts = {len(order.micro_batches(step, rank)) for rank in range(order.data_ranks)}
        assert len(counts) == 1
        assert 1 <= counts.pop() <= shape["accumulation"]


def test_short_last_window_has_fewer_micro_batches() -> None:
    order = StepOrder(num_rows=6, per_device=1, data_ranks=1, accumulation=4, seed=3)
    assert order.steps_per_epoch == 2
    assert [len(order.micro_batches(step)) for step in (1, 2, 3, 4)] == [4, 2, 4, 2]
    assert order.epoch_of(3) == 1.5


def test_seven_rows_on_four_ranks_leave_some_ranks_an_empty_micro_batch() -> None:
    order = StepOrder(num_rows=7, per_device=2, data_ranks=4, accumulation=1, seed=0)
    sizes = [[len(rows) for rows in order.micro_batches(1, rank)] for rank in range(4)]
    assert order.steps_per_epoch == 1
    assert sizes == [[2], [2], [2], [1]]
    three = [evaluation_batches(3, 2, 4, rank) for rank in range(4)]
    assert three == [[[0, 1]], [[2]], [[]], [[]]]


@given(num_rows=st.integers(1, 50), per_device=st.integers(1, 5), data_ranks=st.integers(1, 4))
def test_evaluation_sees_every_row_once_in_file_order(num_rows: int, per_device: int, data_ranks: int) -> None:
    per_rank = [evaluation_batches(num_rows, per_device, data_ranks, rank) for rank in range(data_ranks)]
    assert [row for batch in zip(*per_rank, strict=True) for part in batch for row in part] == list(range(num_rows))


def test_epochs_and_seeds_give_other_orders_and_a_repeat_gives_the_same() -> None:
    def order(seed: int, step: int) -> list[int]:
        return StepOrder(200, 200, 1, 1, seed).window(step)

    assert order(1, 1) == order(1, 1)
    windows = [order(1, 1), order(1, 2), order(2, 1), order(2, 2)]
    assert all(one != other for one, other in itertools.combinations(windows, 2))
    assert all(window != sorted(window) for window in windows)


def test_order_is_the_one_of_every_earlier_run() -> None:
    """A resumed run of an older version must see these rows: the numbers are part of the format of a checkpoint."""
    assert StepOrder(10, 10, 1, 1, 42).window(1) == [3, 2, 8, 7, 6, 4, 9, 0, 5, 1]
    assert StepOrder(10, 10, 1, 1, 42).window(2) == [9, 7, 2, 8, 6, 1, 3, 4, 0, 5]


def test_every_row_comes_first_about_equally_often() -> None:
    firsts = [StepOrder(5, 1, 1, 1, seed).micro_batches(1)[0][0] for seed in range(1000)]
    counts = [firsts.count(row) for row in range(5)]
    # 200 expected, standard deviation 12.6: five of them hold for any order that is not biased.
    assert all(abs(count - 200) < 63 for count in counts), counts


@pytest.mark.parametrize(
    ("max_steps", "epochs", "expected"),
    [(-1, 1.0, 3), (-1, 3.0, 9), (-1, 0.5, 2), (-1, 1.1, 4), (7, 3.0, 7), (0, 2.0, 6)],
)
def test_total_steps_follow_max_steps_then_epochs(max_steps: int, epochs: float, expected: int) -> None:
    order = StepOrder(num_rows=10, per_device=2, data_ranks=1, accumulation=2, seed=0)
    assert total_steps(order, max_steps=max_steps, num_train_epochs=epochs) == expected


def test_steps_and_ranks_out_of_range_are_bugs_that_raise() -> None:
    order = StepOrder(4, 1, 2, 1, 0)
    with pytest.raises(ValueError, match="count from 1"):
        order.micro_batches(0)
    with pytest.raises(ValueError, match="rank must be from 0 to 1"):
        order.micro_batches(1, 2)
    with pytest.raises(ValueError, match="num_rows must be at least 1"):
        StepOrder(0, 1, 1, 1, 0)
