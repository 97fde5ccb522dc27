"""Rows prepared by several processes: the same rows, account and refusals as by one."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from halo_core.config import RunConfig
from halo_core.data import judge, prepare, workers
from halo_core.data.examples import Media, NoKind, RowFault
from halo_core.errors import Refused

WithTemplate = Callable[[str], Any]
WriteLines = Callable[..., str]


def chat(number: int) -> dict[str, Any]:
    """Return a row of one to four turns."""
    turn = [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": f"answer {number}"}]
    return {"messages": turn * (1 + number % 4)}


@pytest.fixture
def tiny(with_template: WithTemplate) -> Any:
    return with_template("lfm2_training")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks of seven records, so that a few rows are several chunks."""
    monkeypatch.setattr(sys.modules["halo_core.data.prepare"], "ROWS_AT_ONCE", 7)


def test_any_number_of_processes_gives_the_same_rows_and_account(
    tiny: Any, write_lines: WriteLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[Any] = []
    started = workers._started
    monkeypatch.setattr(workers, "_started", lambda: processes.append(started()) or processes[-1])
    lines: list[Any] = [chat(number) for number in range(60)]
    lines[11] = {"messages": []}
    lines[25] = "{broken"
    lines[40] = ""
    lines[41] = {**chat(3), "source": "elsewhere"}
    path = write_lines([*lines, *[{"messages": chat(3)["messages"] * 40}]])
    given = {"dataset_name": path, "on_bad_row": "skip", "max_length": 60, "overlong": "truncate"}
    alone = prepare(RunConfig(**given), tiny)
    shared = prepare(RunConfig(**given, dataset_num_proc=2), tiny)
    assert list(shared.train) == list(alone.train)
    assert shared.account == alone.account
    assert len(processes) == 2, "this very process does the work of one"
    assert all(worker.process.poll() is not None and worker.connection.closed for worker in processes)
    assert (alone.account.train.rows_read, alone.account.train.rows) == (60, 58)
    assert list(alone.account.train.dropped) == ["empty list of messages", "broken JSON"]


def test_refusal_of_several_processes_names_the_same_rows(tiny: Any, write_lines: WriteLines) -> None:
    lines: list[Any] = [chat(number) for number in range(40)]
    for number in (3, 20, 33):
        lines[number] = {"messages": [{"role": "user", "content": "alone"}]}
    lines[30] = {"messages": chat(1)["messages"], "images": ["a.png"]}
    texts = []
    for num_proc in (None, 2):
        with pytest.raises(Refused) as caught:
            prepare(RunConfig(dataset_name=write_lines(lines), dataset_num_proc=num_proc, max_length=9), tiny)
        texts.append(caught.value.text())
    assert texts[0] == texts[1]
    assert "3 of 40 training rows cannot be used" in texts[0]
    assert "rows.jsonl:31" in texts[0]


def test_template_that_is_missing_is_refused_by_the_first_row_that_needs_it(
    tokenizer: Any, write_lines: WriteLines
) -> None:
    path = write_lines([chat(number) for number in range(20)])
    with pytest.raises(Refused) as caught:
        prepare(RunConfig(dataset_name=path), tokenizer)
    assert f"{path}:1 is a conversation and the tokenizer has no chat template" in caught.value.text()


def test_tokenizer_that_cannot_travel_is_refused(tiny: Any) -> None:
    tiny.something = lambda: None
    with pytest.raises(Refused) as caught:
        prepare(RunConfig(dataset_num_proc=2), tiny, rows=[chat(1)])
    assert "dataset_num_proc: 2" in caught.value.text() and "set dataset_num_proc: 1" in caught.value.text()
    assert len(prepare(RunConfig(), tiny, rows=[chat(1)]).train) == 1


def test_process_that_dies_is_told_with_its_signal(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = workers._started

    def short_lived() -> Any:
        worker = started()
        worker.process.kill()
        return worker

    monkeypatch.setattr(workers, "_started", short_lived)
    with pytest.raises(Refused) as caught:
        prepare(RunConfig(dataset_num_proc=2), tiny, rows=[chat(number) for number in range(20)])
    assert "signal 9" in caught.value.text() and "lower dataset_num_proc" in caught.value.text()


def test_process_that_dies_before_it_takes_the_tokenizer_is_told_and_the_others_end(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[Any] = []
    started = workers._started

    def short_lived() -> Any:
        if len(processes) == 1:
            monkeypatch.setattr(workers, "_PROGRAM", "import os; os._exit(9)  # {path!r} {handle}")
        processes.append(started())
        return processes[-1]

    monkeypatch.setattr(workers, "_started", short_lived)
    tiny.weighty = b"x" * 5_000_000  # more than a pipe takes before somebody reads
    with pytest.raises(Refused) as caught:
        prepare(RunConfig(dataset_num_proc=2), tiny, rows=[chat(1)])
    assert "exit code 9" in caught.value.text() and "lower dataset_num_proc" in caught.value.text()
    assert len(processes) == 2
    assert all(worker.process.poll() is not None and worker.connection.closed for worker in processes)


@pytest.mark.parametrize(("world", "of_machine", "expected"), [(1, 4, 8), (8, 4, 2), (8, 3, 2), (16, 16, 1)])
def test_processes_of_a_run_share_the_workers_of_their_machine(
    world: int, of_machine: int, expected: int, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(of_machine)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    module = sys.modules["halo_core.data.prepare"]
    monkeypatch.setattr(module.process_group, "world", lambda: world)
    asked: list[int] = []

    def heard(chunks: Any, config: Any, tokenizer: Any, *, num_proc: int, tokenise: Any) -> Any:
        asked.append(num_proc)
        return workers.judged(chunks, config, tokenizer, num_proc=1, tokenise=tokenise)

    monkeypatch.setattr(module, "judged", heard)
    prepare(RunConfig(dataset_num_proc=8), tiny, rows=[chat(1)])
    assert asked == [expected]


@pytest.mark.parametrize("fault", [RowFault("one", "two"), RowFault("one"), NoKind("a", "b"), Media("a", "b")])
def test_fault_travels_whole(fault: RowFault) -> None:
    again = pickle.loads(pickle.dumps(fault))
    assert (type(again), again.reason, again.detail) == (type(fault), fault.reason, fault.detail)
    assert str(again) == fault.text()


def test_no_tokens_are_made_once_the_rows_are_refused(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    called = judge.Judge.__call__

    def heard(self: Any, records: Any, *, tokenise: bool = True) -> Any:
        asked.append(tokenise)
        return called(self, records, tokenise=tokenise)

    monkeypatch.setattr(judge.Judge, "__call__", heard)
    with pytest.raises(Refused):
        prepare(RunConfig(), tiny, rows=[{"messages": []}, *[chat(number) for number in range(20)]])
    assert asked == [True, False, False]


def test_progress_is_told_of_every_row(tiny: Any, write_lines: WriteLines) -> None:
    told: list[Any] = []

    @contextmanager
    def heard(what: str, count: Callable[[], int | None]) -> Iterator[Any]:
        told.append((what, count()))
        yield told.append

    path = write_lines([chat(number) for number in range(10)])
    prepare(RunConfig(dataset_name=path), tiny, waiting=heard)
    assert told == [("training rows", 10), 7, 3]
