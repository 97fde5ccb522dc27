"""Data sets with weights: how often an epoch sees a row, exactly, and what the account tells of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halo_core import config as configuration
from halo_core.config import RunConfig
from halo_core.data import Row, Rows, prepare, units_of, weights
from halo_core.errors import Refused

WithTemplate = Callable[[str], Any]
WriteLines = Callable[..., str]


def chat(number: int) -> dict[str, Any]:
    turn = [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": f"answer {number}"}]
    return {"messages": turn * (1 + number % 3)}


@pytest.fixture
def tiny(with_template: WithTemplate) -> Any:
    return with_template("lfm2_training")


@given(count=st.integers(0, 50), weight=st.floats(0.01, 4.0))
@settings(deadline=None, max_examples=60)
def test_weight_is_how_often_a_row_is_seen_to_the_nearest_row(count: int, weight: float) -> None:
    seen = weights.times_seen(count, weight)
    assert abs(int(seen.sum()) - weight * count) <= 0.5 + 1e-9
    assert not count or seen.max() - seen.min() <= 1
    assert list(seen) == list(weights.times_seen(count, weight))


@pytest.mark.parametrize(("weight", "expected"), [(1.0, 1000), (0.1, 100), (2.5, 2500), (0.29, 290), (1.1, 1100)])
def test_parts_that_binary_fractions_miss_are_exact(weight: float, expected: int) -> None:
    assert weights.times_seen(1000, weight).sum() == expected


def test_part_of_a_set_is_spread_over_it() -> None:
    halves = weights.times_seen(1000, 0.5).reshape(10, 100).sum(axis=1)
    assert halves.min() > 30 and halves.max() < 70
    assert weights.times_seen(1000, 0.5)[::2].sum() not in (0, 500), "no pattern of the file is kept or lost as a whole"


def test_rows_are_gathered_in_blocks_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_BLOCK", 5)
    rows = Rows()
    for number in range(9):
        rows.add(Row(row_id=number, input_ids=[number] * (number + 1), supervised=[number % 2 == 0] * (number + 1)))
    which = np.array([8, 0, 0, 3, 8, 1])
    assert list(weights.gathered(rows, which)) == [rows[int(position)] for position in which]
    assert len(list(weights.blocks(rows, which))) > 2


def test_epoch_sees_each_row_as_often_as_its_set_weighs(tiny: Any, write_lines: WriteLines) -> None:
    first = write_lines([chat(number) for number in range(8)], "a.jsonl")
    second = write_lines([chat(number) for number in range(10)], "b.jsonl")
    third = write_lines([chat(number) for number in range(2)], "c.jsonl")
    sets = ({"path": first, "weight": 2.5}, {"path": second, "weight": 0.3}, {"path": third})
    prepared = prepare(RunConfig(datasets=sets), tiny)
    times = Counter(row.row_id for row in prepared.train)
    assert sorted(times[number] for number in range(8)) == [2, 2, 2, 2, 3, 3, 3, 3]
    assert sorted(times[number] for number in range(8, 18)) == [0] * 7 + [1] * 3
    assert [times[number] for number in (18, 19)] == [1, 1]
    whole = {row.row_id: row for row in prepare(RunConfig(datasets=(first, second, third)), tiny).train}
    assert all(row == whole[row.row_id] for row in prepared.train)


def test_account_of_weights_adds_up(tiny: Any, write_lines: WriteLines) -> None:
    first = write_lines([chat(number) for number in range(8)], "a.jsonl")
    second = write_lines([chat(number) for number in range(10)], "b.jsonl")
    config = RunConfig(datasets=({"path": first, "weight": 2.5}, {"path": second, "weight": 0.3}))
    prepared = prepare(config, tiny)
    account = prepared.account.train
    (left_out, dropped), = account.dropped.items()  # fmt: skip
    (reason, repeated), = account.repeated.items()  # fmt: skip
    assert (left_out, dropped.rows) == ("left out by weight 0.3 of datasets[1]", 7)
    assert (reason, repeated.rows) == ("weight 2.5 of datasets[0]", 12)
    assert account.rows_read == account.rows + dropped.rows
    assert len(prepared.train) == account.rows + repeated.rows
    assert account.tokens == sum(len(row.input_ids) for row in prepared.train)
    assert account.supervised_tokens == sum(row.num_targets for row in prepared.train)
    assert account.tokens_read == account.tokens - repeated.tokens + dropped.tokens
    assert account.rows == sum(rows for rows, _ in account.kinds.values())
    assert "repeated: 12 rows more in each epoch" in account.text()
    assert "dropped: 7 rows" in account.text() and "(first: )" not in account.text()
    packed = units_of(RunConfig(packing=True, max_length=200), prepared)
    assert packed.account.train.packing is not None
    assert packed.account.train.packing.tokens == account.tokens


def test_weights_that_leave_nothing_are_refused(tiny: Any, write_lines: WriteLines) -> None:
    sets = ({"path": write_lines([chat(0)]), "weight": 0.2},)
    with pytest.raises(Refused, match="leave none of the 1 rows"):
        prepare(RunConfig(datasets=sets), tiny)


@pytest.mark.parametrize("weight", [0, -1.0, "2", True, float("inf")])
def test_weight_that_is_none_is_refused_from_python_as_well(weight: Any, tiny: Any, write_lines: WriteLines) -> None:
    with pytest.raises(Refused, match="weight is how often"):
        prepare(RunConfig(datasets=({"path": write_lines([chat(0)]), "weight": weight},)), tiny)


def test_evaluation_has_no_weights(tiny: Any, write_lines: WriteLines) -> None:
    path = write_lines([chat(0)])
    entry = ({"path": path, "weight": 2.0},)
    (problem,) = configuration.read(None, given={"eval_dataset": list(entry)}).problems
    assert "exactly once" in problem.why
    with pytest.raises(Refused, match="exactly once"):
        prepare(RunConfig(dataset_name=path, eval_dataset=entry, eval_strategy="steps"), tiny)
