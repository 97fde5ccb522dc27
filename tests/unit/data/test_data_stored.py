"""Rows as files: a folder prepared once, the cache of ordinary runs, and what is refused or made anew."""

from __future__ import annotations

import datetime
import errno
import json
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halo_core.config import RunConfig
from halo_core.data import Prepared, SplitAccount, cache, prepare, stored, units_of
from halo_core.data.offline import check_folder, prepare_into
from halo_core.data.rows import Row, Rows
from halo_core.data.weights import Block
from halo_core.errors import Refused

WithTemplate = Callable[[str], Any]
WriteLines = Callable[..., str]


def chat(number: int, turns: int = 1) -> dict[str, Any]:
    """Return a row of some turns."""
    turn = [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": f"answer {number}"}]
    return {"messages": turn * turns}


@pytest.fixture
def tiny(with_template: WithTemplate) -> Any:
    return with_template("lfm2_training")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the cache, a new one, which keeps even few rows."""
    monkeypatch.setenv("HALO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "SMALLEST", 1)
    return tmp_path / "cache" / "data"


def same(one: Prepared, other: Prepared) -> None:
    """Assert that two preparations hold the same rows and tell the same of them."""
    assert list(one.train) == list(other.train)
    assert one.account.train == other.account.train
    assert one.account.evaluation == other.account.evaluation
    assert (one.evaluation is None) == (other.evaluation is None)
    if one.evaluation is not None and other.evaluation is not None:
        assert list(one.evaluation) == list(other.evaluation)


def refusal(config: RunConfig, tokenizer: Any) -> str:
    with pytest.raises(Refused) as caught:
        prepare(config, tokenizer)
    return caught.value.text()


# --- arrays --------------------------------------------------------------------------------------------------------


@given(rows=st.lists(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=9), max_size=9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=20)
def test_rows_come_back_from_files_as_they_were(rows: list[list[tuple[int, bool]]], tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    shutil.rmtree(folder, ignore_errors=True)
    expected = [
        Row(row_id=3 * number, input_ids=[token for token, _ in row], supervised=[flag for _, flag in row])
        for number, row in enumerate([[(1, True)], *rows])
    ]
    writer, memory = stored.RowsWriter(folder), Rows()
    for row in expected:
        writer.add(row)
        memory.add(row)
    files = writer.close()
    assert list(stored.mapped(folder)) == expected
    assert np.load(folder / "input_ids.npy").dtype == np.int32, "numpy reads the files by itself"
    whole = stored.RowsWriter(tmp_path / "whole")
    whole.extend(Block(row_ids=memory.row_ids, lengths=memory.lengths, input_ids=memory.tokens,
                       supervised=memory.flags))  # fmt: skip
    assert whole.close() == files


# --- a folder prepared once ------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    max_length=st.integers(26, 90),
    overlong=st.sampled_from(["drop", "truncate"]),
    packing=st.booleans(),
    weight=st.sampled_from([None, 0.5, 2.0, 1.7]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=15)
def test_run_from_a_prepared_folder_sees_the_rows_of_a_run_from_the_files(
    sizes: list[int], max_length: int, overlong: str, packing: bool, weight: float | None, tiny: Any, tmp_path: Path
) -> None:
    file, out = tmp_path / "rows.jsonl", tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    rows = [chat(0), *(chat(number, turns) for number, turns in enumerate(sizes)), chat(1), chat(2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named: dict[str, Any] = {"dataset_name": str(file)} if weight is None else {
        "datasets": ({"path": str(file), "weight": weight}, {"path": str(file)}),
    }  # fmt: skip
    kept = {"max_length": max_length, "overlong": overlong, "packing": packing}
    direct = prepare(RunConfig(**named, **kept), tiny)
    account = prepare_into(out, RunConfig(**named, **kept), tiny)
    read = prepare(RunConfig(dataset_name=str(out), **kept), tiny)
    same(read, direct)
    assert account.train == direct.account.train
    assert isinstance(read.train.tokens.base, np.memmap) or isinstance(read.train.tokens, np.memmap)
    if packing:
        config = RunConfig(dataset_name=str(out), **kept)
        assert list(units_of(config, read).train) == list(units_of(config, direct).train)


def test_evaluation_rows_are_prepared_with_the_others(tiny: Any, write_lines: WriteLines, tmp_path: Path) -> None:
    held = write_lines([chat(7)], "held.jsonl")
    given = {"eval_dataset": held, "eval_strategy": "steps"}
    config = RunConfig(dataset_name=write_lines([chat(0), chat(1)]), **given)
    prepare_into(tmp_path / "out", config, tiny)
    direct = prepare(config, tiny)
    Path(held).unlink()
    same(prepare(RunConfig(dataset_name=str(tmp_path / "out"), **given), tiny), direct)
    only = prepare(RunConfig(dataset_name=str(tmp_path / "out")), tiny)
    assert only.evaluation is None
    other = write_lines([chat(8), chat(9)], "other.jsonl")
    asked = prepare(RunConfig(dataset_name=str(tmp_path / "out"), eval_dataset=other, eval_strategy="steps"), tiny)
    assert asked.evaluation is not None
    assert len(asked.evaluation) == 2 and asked.account.train == direct.account.train


def test_evaluation_rows_that_a_folder_lacks_are_refused(tiny: Any, write_lines: WriteLines, tmp_path: Path) -> None:
    prepare_into(tmp_path / "out", RunConfig(dataset_name=write_lines([chat(0)])), tiny)
    text = refusal(RunConfig(dataset_name=str(tmp_path / "out"), eval_strategy="steps"), tiny)
    assert "eval_strategy: steps" in text and "was prepared without evaluation rows" in text


def test_folder_of_another_configuration_is_refused_with_both_values(
    tiny: Any, write_lines: WriteLines, tmp_path: Path, with_template: WithTemplate
) -> None:
    out = str(tmp_path / "out")
    prepare_into(tmp_path / "out", RunConfig(dataset_name=write_lines([chat(0)]), max_length=50), tiny)
    text = refusal(RunConfig(dataset_name=out, max_length=60, overlong="truncate", assistant_only_loss=False), tiny)
    for key, now, before in (("max_length", "60", "50"), ("overlong", "truncate", "drop"),
                             ("assistant_only_loss", "false", "true")):  # fmt: skip
        assert f"{key}: {now}" in text
        assert f"were prepared with {key}: {before}" in text
        assert f"set {key}: {before}, or prepare the rows again: halo data prepare" in text
    cuts = RunConfig(dataset_name=out, max_length=50, packing=True, packing_strategy="bfd_split")
    assert "packing: true" in refusal(cuts, tiny)
    free = {"per_device_train_batch_size": 3, "seed": 7, "packing": True, "dataset_num_proc": 5, "learning_rate": 1.0}
    assert len(prepare(RunConfig(dataset_name=out, max_length=50, **free), tiny).train) == 1
    text = refusal(RunConfig(dataset_name=out, max_length=50), with_template("lfm2"))
    assert "rendered with another chat template" in text and "model_name_or_path" not in text
    tiny.add_tokens(["<another>"])
    assert "were made with another tokenizer" in refusal(RunConfig(dataset_name=out, max_length=50), tiny)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda out: (out / "training" / "ends.npy").unlink(), "ends.npy is missing"),
        (lambda out: (out / "prepared.json").write_text("{"), "prepared.json cannot be read"),
        (lambda out: (out / "prepared.json").write_text('{"format": 99}'), "has format 99"),
        (lambda out: (out / "training" / "input_ids.npy").open("ab").write(b"x"), "bytes instead of"),
        (lambda out: _flip(out / "training" / "supervised.npy"), "its checksum is another one"),
    ],
)
def test_folder_that_is_not_whole_is_refused(
    damage: Callable[[Path], object], told: str, tiny: Any, write_lines: WriteLines, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    prepare_into(out, RunConfig(dataset_name=write_lines([chat(0), chat(1)])), tiny)
    damage(out)
    text = refusal(RunConfig(dataset_name=str(out)), tiny)
    assert told in text and "halo data prepare" in text


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


def test_nothing_is_left_behind_where_rows_are_refused(tiny: Any, write_lines: WriteLines, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="empty list of messages"):
        prepare_into(tmp_path / "out", RunConfig(dataset_name=write_lines([{"messages": []}])), tiny)
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl"}


def test_folder_is_never_written_over(tiny: Any, write_lines: WriteLines, tmp_path: Path) -> None:
    config = RunConfig(dataset_name=write_lines([chat(0)]))
    prepare_into(tmp_path / "out", config, tiny)
    with pytest.raises(Refused, match="something is there already"):
        prepare_into(tmp_path / "out", config, tiny)
    with pytest.raises(Refused, match="already"):
        prepare_into(tmp_path / "again", RunConfig(dataset_name=str(tmp_path / "out")), tiny)
    text = refusal(RunConfig(datasets=({"path": str(tmp_path / "out")},)), tiny)
    assert "datasets[0]" in text and "name it by dataset_name alone" in text


def test_what_appears_at_the_folder_meanwhile_stays(
    tiny: Any, write_lines: WriteLines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write_json = stored.write_json

    def meanwhile(path: Path, value: Any) -> None:
        out.mkdir(exist_ok=True)
        (out / "precious.txt").write_text("mine")
        write_json(path, value)

    monkeypatch.setattr(stored, "write_json", meanwhile)
    with pytest.raises(Refused, match="something is there already"):
        prepare_into(out, RunConfig(dataset_name=write_lines([chat(0)])), tiny)
    assert [path.name for path in out.iterdir()] == ["precious.txt"]
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "out"}


def test_empty_folder_stays_until_the_rows_are_there(
    tiny: Any, write_lines: WriteLines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    config = RunConfig(dataset_name=write_lines([chat(0)]))
    monkeypatch.chdir(out)
    check_folder(Path())
    assert out.is_dir()
    prepare_into(Path(), config, tiny)
    assert len(prepare(RunConfig(dataset_name=str(out)), tiny).train) == 1


def test_folder_that_cannot_be_looked_into_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(Refused, match="the folder cannot be written"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("dataset_train_split", "validation"), ("dataset_config", "b"), ("dataset_test_split", "dev")]
)
def test_other_part_of_a_data_set_than_the_folder_was_made_of_is_refused(
    key: str, value: str, tiny: Any, write_lines: WriteLines, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    path = write_lines([chat(0)])
    evaluated = {"eval_strategy": "epoch", "eval_dataset": path}
    prepare_into(out, RunConfig(dataset_name=path, **evaluated), tiny)
    plain = RunConfig(dataset_name=str(out), **evaluated)
    assert len(prepare(plain, tiny).train) == 1, "a run that gives none takes the folder's"
    text = refusal(RunConfig(dataset_name=str(out), **evaluated, **{key: value}), tiny)
    before = {"dataset_train_split": "train", "dataset_config": "null", "dataset_test_split": "test"}[key]
    assert f"{key}: {value}" in text and f"were prepared with {key}: {before}" in text
    assert "halo data prepare" in text
    elsewhere = write_lines([chat(5)], "train.jsonl")
    others = RunConfig(dataset_name=str(out), eval_strategy="no", eval_dataset=elsewhere, **{key: value})
    if key != "dataset_train_split":
        assert len(prepare(others, tiny).train) == 1, "the key may be about an eval_dataset of the run's own"


# --- the cache -------------------------------------------------------------------------------------------------------


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def from_cache(prepared: Prepared) -> bool:
    return any("come tokenised from the cache" in note for note in prepared.account.notes)


def test_second_start_takes_the_rows_from_the_cache(tiny: Any, write_lines: WriteLines, cached: Path) -> None:
    config = RunConfig(dataset_name=write_lines([chat(number) for number in range(9)]), max_length=40)
    first = prepare(config, tiny, may_cache=True)
    second = prepare(config, tiny, may_cache=True)
    assert (from_cache(first), from_cache(second)) == (False, True)
    same(first, second)
    assert len(entries(cached)) == 1


def test_everything_that_rows_follow_from_is_in_the_name(
    tiny: Any, write_lines: WriteLines, cached: Path, with_template: WithTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [chat(number) for number in range(9)]
    path = write_lines(rows)
    plain = {"dataset_name": path}

    def is_new(tokenizer: Any = tiny, **given: Any) -> bool:
        return not from_cache(prepare(RunConfig(**{**plain, **given}), tokenizer, may_cache=True))

    assert is_new()
    for other in ({"max_length": 40}, {"overlong": "truncate"}, {"assistant_only_loss": False},
                  {"on_bad_row": "skip"}, {"packing": True, "packing_strategy": "wrapped"}):  # fmt: skip
        assert is_new(**other), other
    for free in ({"seed": 3}, {"dataset_num_proc": 1}, {"packing": True}, {"per_device_train_batch_size": 2}):
        assert not is_new(**free), free
    write_lines([*rows[:-1], chat(99)])
    assert is_new(), "the contents count, not the file's name"
    write_lines(rows)
    assert not is_new()
    assert is_new(datasets=({"path": path, "weight": 2.0},), dataset_name=None)
    monkeypatch.setattr(cache.made_from, "_code", lambda: "another version of this code")
    assert is_new()
    monkeypatch.undo()
    monkeypatch.setenv("HALO_CACHE", str(cached.parent))
    assert is_new(with_template("lfm2"))


def test_cache_that_is_not_wanted_or_cannot_know_is_not_used(
    tiny: Any, write_lines: WriteLines, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [chat(number) for number in range(9)]
    prepare(RunConfig(dataset_name=write_lines(rows), dataset_cache=False), tiny, may_cache=True)
    prepare(RunConfig(dataset_name=write_lines(rows)), tiny)
    prepare(RunConfig(), tiny, rows=rows, may_cache=True)
    monkeypatch.setattr(cache, "SMALLEST", 10)
    prepare(RunConfig(dataset_name=write_lines(rows)), tiny, may_cache=True)
    assert entries(cached) == []


def test_template_that_writes_the_date_is_kept_for_the_day(
    with_template: WithTemplate, write_lines: WriteLines, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = with_template(
        "{{ strftime_now('%Y') }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    config = RunConfig(dataset_name=write_lines([chat(1)]))
    prepare(config, tokenizer, may_cache=True)
    assert from_cache(prepare(config, tokenizer, may_cache=True))

    class Tomorrow(datetime.date):
        @classmethod
        def today(cls) -> datetime.date:
            return datetime.date(2999, 1, 1)

    monkeypatch.setattr(cache.made_from.datetime, "date", Tomorrow)
    assert not from_cache(prepare(config, tokenizer, may_cache=True))


def test_rows_of_training_and_of_evaluation_have_entries_of_their_own(
    tiny: Any, write_lines: WriteLines, cached: Path
) -> None:
    path = write_lines([chat(number) for number in range(9)])
    config = RunConfig(dataset_name=path, dataset_test_split="train", eval_strategy="epoch")
    for _ in range(2):
        account = prepare(config, tiny, may_cache=True).account
        assert account.evaluation is not None
        assert (account.train.name, account.evaluation.name) == ("training", "evaluation")
    assert len(entries(cached)) == 2


def test_entry_that_is_whole_is_left_alone(cached: Path) -> None:
    rows = Rows()
    for number in range(200):
        rows.add(Row(row_id=number, input_ids=[number, 1], supervised=[False, True]))
    assert cache.keep("entry", rows, account_of_200()) == ""
    before = (cached / "entry").stat().st_ino
    assert cache.keep("entry", rows, account_of_200()) == ""
    assert (cached / "entry").stat().st_ino == before
    assert entries(cached) == ["entry"]


def test_target_that_others_moved_away_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "entry"
    rename = Path.rename
    fails = [OSError(errno.ENOTEMPTY, "Directory not empty")]

    def raced(self: Path, target: Path) -> Path:
        if fails:
            raise fails.pop()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", raced)
    with stored.published(folder, replaces=True) as partial:
        (partial / "x").write_text("new")
    assert (folder / "x").read_text() == "new"


def test_process_without_a_home_runs_without_a_cache(
    tiny: Any, write_lines: WriteLines, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    path = write_lines([chat(1)])
    kind = type("Homeless", (type(Path()),), {"expanduser": homeless})
    monkeypatch.setattr(cache, "Path", kind)
    account = prepare(RunConfig(dataset_name=path), tiny, may_cache=True).account
    assert any("not kept for the next start: there is no home folder" in note for note in account.notes)


@pytest.mark.parametrize("name", ["input_ids.npy", "rows.json"])
def test_damaged_entry_is_made_anew(name: str, tiny: Any, write_lines: WriteLines, cached: Path) -> None:
    config = RunConfig(dataset_name=write_lines([chat(number) for number in range(9)]))
    first = prepare(config, tiny, may_cache=True)
    (entry,) = entries(cached)
    _flip(cached / entry / name) if name != "rows.json" else (cached / entry / name).write_text("{")
    again = prepare(config, tiny, may_cache=True)
    assert not from_cache(again)
    same(again, first)
    assert from_cache(prepare(config, tiny, may_cache=True))
    assert entries(cached) == [entry]


def test_cache_that_cannot_be_written_is_told_and_the_run_goes_on(
    tiny: Any, write_lines: WriteLines, cached: Path
) -> None:
    cached.parent.mkdir()
    cached.write_text("a file where the folder should be")
    prepared = prepare(RunConfig(dataset_name=write_lines([chat(1)])), tiny, may_cache=True)
    assert len(prepared.train) == 1
    assert any("are not kept for the next start" in note for note in prepared.account.notes)


def _keep_again_and_again(folder: Path, barrier: Any, outcomes: Any) -> None:
    rows = Rows()
    for number in range(200):
        rows.add(Row(row_id=number, input_ids=[number, 1], supervised=[False, True]))
    account = account_of_200()
    barrier.wait()
    sound = 0
    for _ in range(40):
        with stored.published(folder, replaces=True) as partial:
            stored.write_rows(partial, rows, account)
        try:
            read, _ = stored.read_rows(folder)
            assert list(read) == list(rows)
            sound += 1
        except stored.Damaged as damage:  # caught between the other's two renames: missing, never half there
            if "missing" not in str(damage):
                raise
    outcomes.put(sound)


def account_of_200() -> Any:
    return SplitAccount(name="training", sources={"a": 200}, rows_read=200, blank_lines=0, rows=200, tokens_read=400,
                        tokens=400, supervised_tokens=200)  # fmt: skip


def test_two_processes_at_once_leave_one_whole_entry(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, outcomes = context.Barrier(2), context.Queue()
    folder = tmp_path / "entry"
    processes = [
        context.Process(target=_keep_again_and_again, args=(folder, barrier, outcomes)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    found = [outcomes.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert all(sound > 0 for sound in found)
    assert entries(tmp_path) == ["entry"], "nothing lies aside"
    assert len(stored.read_rows(folder)[0]) == 200
