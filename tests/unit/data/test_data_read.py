"""Files, folders, saved sets, hub names and lists: what is read, and what is said where reading fails."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from halo_core import hub
from halo_core.config import RunConfig
from halo_core.data import prepare
from halo_core.errors import Refused

TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)

WriteLines = Callable[..., str]
Prepare = Callable[..., Any]


def chat(number: int) -> dict[str, Any]:
    """Return a row with its number in question and answer."""
    return {
        "messages": [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    }


@pytest.fixture
def prepared(with_template: Callable[[str], Any]) -> Prepare:
    """Return a function that prepares the data of a configuration under a small template."""
    tokenizer = with_template(TEMPLATE)
    return lambda rows=None, **given: prepare(RunConfig(**given), tokenizer, rows=rows)


@pytest.fixture
def refusal(prepared: Prepare) -> Callable[..., str]:
    """Return a function that prepares and returns the text of the refusal."""

    def refused(rows: Any = None, **given: Any) -> str:
        with pytest.raises(Refused) as caught:
            prepared(rows, **given)
        return caught.value.text()

    return refused


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write rows in the format that the path's ending names."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet"])
def test_every_file_format_gives_the_same_rows(ending: str, tmp_path: Path, prepared: Prepare) -> None:
    rows = [chat(number) for number in range(5)]
    expected = prepared(rows)
    read = prepared(dataset_name=written(tmp_path / f"rows{ending}", rows))
    assert list(read.train) == list(expected.train)
    assert [row.row_id for row in read.train] == [0, 1, 2, 3, 4]


def test_csv_cells_are_text_whatever_they_look_like(tmp_path: Path, prepared: Prepare) -> None:
    rows = [{"prompt": "2+2, and\na line", "completion": "4"}, {"prompt": "3+3", "completion": "6"}]
    read = prepared(dataset_name=written(tmp_path / "rows.csv", rows))
    assert list(read.train) == list(prepared(rows).train)


def test_table_fills_missing_fields_with_nulls_and_they_are_left_out(tmp_path: Path, prepared: Prepare) -> None:
    rows = [chat(1), {"messages": [{"role": "user", "content": "a", "name": "Ann"}, chat(2)["messages"][1]]}]
    read = prepared(dataset_name=written(tmp_path / "rows.parquet", rows))
    assert list(read.train) == list(prepared(rows).train)


def test_folder_of_files_is_read_by_split(tmp_path: Path, prepared: Prepare, refusal: Callable[..., str]) -> None:
    written(tmp_path / "train-1.jsonl", [chat(1)])
    written(tmp_path / "train-0.parquet", [chat(0)])
    written(tmp_path / "test.jsonl", [chat(7)])
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "dataset_infos.json").write_text("{}")
    read = prepared(dataset_name=str(tmp_path), eval_strategy="steps")
    assert list(read.train) == list(prepared([chat(0), chat(1)]).train)
    assert list(read.evaluation) == list(prepared([chat(7)]).train)
    text = refusal(dataset_name=str(tmp_path), dataset_train_split="validation")
    assert "dataset_train_split: validation" in text
    assert "train, test" in text or "test, train" in text


def test_saved_data_set_is_read_with_and_without_splits(
    tmp_path: Path, prepared: Prepare, refusal: Callable[..., str]
) -> None:
    rows = datasets.Dataset.from_list([chat(0), chat(1)])
    rows.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict(train=rows, held=rows.select([1])).save_to_disk(str(tmp_path / "split"))
    expected = list(prepared([chat(0), chat(1)]).train)
    assert list(prepared(dataset_name=str(tmp_path / "plain")).train) == expected
    read = prepared(dataset_name=str(tmp_path / "split"), eval_strategy="steps", dataset_test_split="held")
    assert list(read.train) == expected
    assert list(read.evaluation) == list(prepared([chat(1)]).train)
    text = refusal(dataset_name=str(tmp_path / "split"), eval_strategy="steps")
    assert "dataset_test_split: test" in text
    assert "train, held" in text


def test_rows_in_memory_may_be_a_data_set_or_a_generator(prepared: Prepare) -> None:
    rows = [chat(0), chat(1)]
    expected = list(prepared(rows).train)
    assert list(prepared(datasets.Dataset.from_list(rows)).train) == expected
    assert list(prepared(row for row in rows).train) == expected


def test_listed_data_sets_are_joined_in_their_order(tmp_path: Path, write_lines: WriteLines, prepared: Prepare) -> None:
    first = write_lines([chat(0)], "a.jsonl")
    second = write_lines([{**chat(1), "text": "other"}], "b.jsonl")
    read = prepared(datasets=[first, {"path": second, "split": "train", "columns": ["messages"]}])
    assert list(read.train) == list(prepared([chat(0), chat(1)]).train)
    assert read.account.train.sources == {first: 1, second: 1}
    assert not read.account.train.notes


def test_wrong_entries_of_a_list_are_told_all_at_once(write_lines: WriteLines, refusal: Callable[..., str]) -> None:
    text = refusal(
        datasets=[
            {"path": write_lines([chat(0)])},
            "no.jsonl",
            {"path": "x.jsonl", "spilt": "train"},
            {"split": "train"},
            3,
        ]
    )
    assert "datasets[1]: no.jsonl" in text
    assert "spilt" in text
    assert text.count("an entry without a path") == 2


def test_naming_rows_twice_or_not_at_all_is_refused(write_lines: WriteLines, refusal: Callable[..., str]) -> None:
    path = write_lines([chat(0)])
    assert "both name the training rows" in refusal(dataset_name=path, datasets=[path])
    assert "no rows to train on" in refusal()
    assert "rows: []" in refusal([])
    assert "rows row 1: not an object: the row is str" in refusal(["hello"])


def test_missing_file_names_its_neighbours(write_lines: WriteLines, refusal: Callable[..., str]) -> None:
    path = write_lines([chat(0)], "train.jsonl")
    text = refusal(dataset_name=path.replace("train.", "trian."))
    assert "dataset_name" in text
    assert "no such file" in text
    assert f"did you mean {path}?" in text


def test_unknown_ending_lists_those_that_are_read(tmp_path: Path, refusal: Callable[..., str]) -> None:
    (tmp_path / "rows.txt").write_text("text")
    text = refusal(dataset_name=str(tmp_path / "rows.txt"))
    assert ".txt are not read" in text
    assert ".jsonl, .json, .parquet, .csv" in text


@pytest.mark.parametrize("content", ["", "\n\n", "[]"])
@pytest.mark.parametrize("ending", [".jsonl", ".json"])
def test_empty_file_is_refused(content: str, ending: str, tmp_path: Path, refusal: Callable[..., str]) -> None:
    path = tmp_path / f"rows{ending}"
    path.write_text(content)
    text = refusal(dataset_name=str(path))
    if content == "":
        assert "the file is empty" in text
    elif (content, ending) == ("[]", ".jsonl"):
        assert "not an object" in text
    else:
        assert "the file holds no row" in text


def test_folder_without_data_and_files_that_are_not_what_they_say(tmp_path: Path, refusal: Callable[..., str]) -> None:
    assert "the folder has no file" in refusal(dataset_name=str(tmp_path))
    (tmp_path / "rows.parquet").write_text("not a table")
    assert "cannot be read as .parquet" in refusal(dataset_name=str(tmp_path))
    (tmp_path / "list.json").write_text('[{"text": "a"},\n {"text": ')
    assert "cannot be read as .json" in refusal(dataset_name=str(tmp_path / "list.json"))
    (tmp_path / "one.json").write_text(json.dumps({"data": [chat(0)]}, indent=2))
    assert "one object over several lines" in refusal(dataset_name=str(tmp_path / "one.json"))
    (tmp_path / "wide.jsonl").write_text(json.dumps(chat(0)), encoding="utf-16")
    assert "UTF-16" in refusal(dataset_name=str(tmp_path / "wide.jsonl"))


def test_hub_set_that_cannot_be_read_is_refused_with_the_reason(
    refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "obstacle", lambda: None)
    text = refusal(dataset_name="someone/some-rows")
    assert "dataset_name: someone/some-rows" in text
    assert "as a hub data set it cannot be read" in text
    assert "local file" in text


def test_hub_that_cannot_be_reached_is_told_without_the_retries_of_its_client(
    refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(*given: Any, **named: Any) -> None:
        raise AssertionError("it was asked all the same")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "obstacle", lambda: "the hub cannot be reached (no route)")
    assert "the hub cannot be reached (no route)" in refusal(dataset_name="someone/some-rows")


def test_hub_set_in_the_cache_is_read_without_the_hub(
    prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "someone___some-rows").mkdir()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **named: datasets.Dataset.from_list([chat(1)]))
    monkeypatch.setattr(hub, "obstacle", lambda: "the hub cannot be reached (no route)")
    assert prepared(dataset_name="someone/some-rows").account.train.rows == 1


def test_what_is_neither_file_nor_folder_is_told_as_that(refusal: Callable[..., str]) -> None:
    assert "it is neither a file nor a folder" in refusal(dataset_name="/dev/null")


@pytest.mark.parametrize("column", ["text", "messages"])
def test_half_a_character_is_a_fault_of_its_row_alone(
    column: str, tmp_path: Path, refusal: Callable[..., str], prepared: Prepare
) -> None:
    whole = chat(0) if column == "messages" else {"text": "question 0"}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(whole) + "\n" + json.dumps(whole).replace("question", "\\ud83d"))
    text = refusal(dataset_name=str(file))
    assert "1 of 2 training rows" in text and f"{file}:2: half a character: \\ud83d stands alone" in text
    assert prepared(dataset_name=str(file), on_bad_row="skip").account.train.rows == 1


def test_hub_set_is_asked_for_by_name_config_and_split(monkeypatch: pytest.MonkeyPatch, prepared: Prepare) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(path: str, name: str | None, *, split: str) -> datasets.Dataset:
        asked.append((path, name, split))
        return datasets.Dataset.from_list([chat(len(asked))])

    monkeypatch.setattr(hub, "obstacle", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    read = prepared(
        dataset_name="someone/rows", dataset_config="small", dataset_train_split="train[:1]", eval_strategy="epoch"
    )
    assert asked == [("someone/rows", "small", "train[:1]"), ("someone/rows", "small", "test")]
    assert list(read.train) == list(prepared([chat(1)]).train)
    assert len(read.evaluation) == 1
    assert read.account.train.sources == {"someone/rows": 1}


def test_evaluation_without_rows_is_refused_and_not_asked_for_is_said(
    write_lines: WriteLines, prepared: Prepare, refusal: Callable[..., str]
) -> None:
    path, held = write_lines([chat(0)], "a.jsonl"), write_lines([chat(1)], "held.jsonl")
    text = refusal(dataset_name=path, eval_strategy="steps")
    assert "eval_dataset" in text
    assert "eval_strategy: no" in text
    assert "eval_dataset" in refusal([chat(0)], eval_strategy="steps")
    assert "has one split, train" in refusal(dataset_name=path, dataset_train_split="half")
    read = prepared(dataset_name=path, eval_dataset=held)
    assert read.evaluation is None
    assert "eval_dataset is not read" in read.account.text()
    read = prepared(dataset_name=path, eval_dataset=held, eval_strategy="steps")
    assert list(read.evaluation) == list(prepared([chat(1)]).train)


def test_all_missing_files_are_in_one_refusal(refusal: Callable[..., str]) -> None:
    text = refusal(dataset_name="no.jsonl", eval_dataset="neither.jsonl", eval_strategy="steps")
    assert "dataset_name: no.jsonl" in text
    assert "eval_dataset: neither.jsonl" in text


# --- lines that cannot be read -------------------------------------------------------------------------------------


def test_cut_line_and_blank_line_are_told_by_their_line(write_lines: WriteLines, refusal: Callable[..., str]) -> None:
    lines: list[Any] = [chat(number) for number in range(10)]
    lines[3] = json.dumps(lines[3])[:30]
    lines[4] = ""
    path = write_lines(lines)
    text = refusal(dataset_name=path)
    assert f"{path}:4: broken JSON: Expecting property name enclosed in double quotes at column 31" in text
    assert "1 of 9 training rows" in text
    assert f"{path}:5" not in text


def test_skipped_rows_are_counted_with_their_reasons(write_lines: WriteLines, prepared: Prepare) -> None:
    lines: list[Any] = [chat(number) for number in range(10)]
    lines[3] = json.dumps(lines[3])[:30]
    lines[4] = ""
    lines[7] = {"messages": []}
    path = write_lines(lines)
    read = prepared(dataset_name=path, on_bad_row="skip")
    account = read.account.train
    assert [row.row_id for row in read.train] == [0, 1, 2, 4, 5, 7, 8]
    assert (account.rows_read, account.rows, account.blank_lines) == (9, 7, 1)
    assert {reason: dropped.rows for reason, dropped in account.dropped.items()} == {
        "broken JSON": 1,
        "empty list of messages": 1,
    }
    assert f"broken JSON (first: {path}:4)" in read.account.text()
    assert "blank lines passed over: 1" in read.account.text()


def test_byte_order_mark_windows_line_ends_and_a_missing_last_line_end_are_accepted(
    tmp_path: Path, prepared: Prepare
) -> None:
    rows = [chat(0), chat(1)]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(json.dumps(row) for row in rows).encode())
    assert list(prepared(dataset_name=str(path)).train) == list(prepared(rows).train)
    path.write_bytes(b"\xef\xbb\xbf\n" + json.dumps(rows[0]).encode())
    assert list(prepared(dataset_name=str(path)).train) == list(prepared(rows[:1]).train)


def test_half_written_last_line_says_so(tmp_path: Path, refusal: Callable[..., str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(chat(0)) + "\n" + json.dumps(chat(1))[:25])
    assert f"{path}:2: broken JSON: the last line is cut off" in refusal(dataset_name=str(path))


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("[1, 2]", "not an object: the row is list"),
        ("nul", "broken JSON"),
        ({"messages": "hello"}, 'messages is text ("hello"), expected a list'),
        ({"messages": []}, "empty list of messages"),
        ({"messages": ["hello"]}, "messages[0] is text"),
        ({"messages": [{"content": "a"}]}, "a message without role: messages[0] has content"),
        ({"messages": [{"from": "human", "value": "a"}]}, "write role and content"),
        ({"messages": [{"role": "asistant", "content": "a"}]}, "did you mean assistant?"),
        ({"messages": [{"role": 3, "content": "a"}]}, "unknown role: messages[0].role is 3"),
        ({"messages": [{"role": "user", "content": 12}]}, "messages[0].content is a number (12), expected text"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0] is text"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0].content is an object"),
        ({"messages": [{"role": "user"}]}, "a message without content: messages[0]"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no assistant message: the roles are user"),
        ({"messages": [{"role": "system", "content": "a"}]}, "no assistant message: the roles are system"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]},
            "empty assistant message: messages[1]",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]},
            "messages[1].weight is 0",
        ),
        ({"messages": chat(0)["messages"], "tools": "{"}, "tools is text but not JSON"),
        ({"messages": chat(0)["messages"], "chat_template_kwargs": 1}, "chat_template_kwargs is a number (1)"),
        ({"prompt": "a"}, "prompt without completion"),
        ({"prompt": "a", "completion": ""}, "empty text: completion"),
        ({"prompt": "a", "completion": 5}, "prompt is text"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}, "expected two texts or two lists"),
        ({"text": ["a"]}, "text is a list"),
        ({"text": "  "}, "empty text: text"),
    ],
)
def test_bad_row_is_told_by_line_and_reason(
    row: Any, told: str, write_lines: WriteLines, refusal: Callable[..., str], prepared: Prepare
) -> None:
    path = write_lines([chat(0), row])
    text = refusal(dataset_name=path)
    assert f"{path}:2: " in text
    assert told in text
    assert "1 of 2 training rows cannot be used" in text
    assert "on_bad_row: skip" in text
    kept = prepared(dataset_name=path, on_bad_row="skip")
    assert [row.row_id for row in kept.train] == [0]
    assert kept.account.train.rows_read == 2
    assert sum(dropped.rows for dropped in kept.account.train.dropped.values()) == 1


def test_number_as_content_is_told_and_a_list_of_text_parts_is_accepted(
    write_lines: WriteLines, refusal: Callable[..., str], prepared: Prepare
) -> None:
    rows = [chat(number) for number in range(8)]
    rows[6] = {"messages": [{"role": "user", "content": 12}, {"role": "assistant", "content": "a"}]}
    parts = [{"type": "text", "text": "question "}, {"type": "text", "text": "7"}]
    rows[7]["messages"][0]["content"] = parts
    path = write_lines(rows)
    text = refusal(dataset_name=path)
    assert f"{path}:7: wrong type: messages[0].content is a number (12)" in text
    assert f"{path}:8" not in text
    kept = prepared(dataset_name=path, on_bad_row="skip").train
    assert kept[-1].input_ids == prepared([chat(7)]).train[0].input_ids


def test_twenty_bad_rows_are_listed_and_all_are_counted(write_lines: WriteLines, refusal: Callable[..., str]) -> None:
    path = write_lines([chat(0), *["{"] * 45])
    text = refusal(dataset_name=path)
    assert "45 of 46 training rows cannot be used" in text
    assert text.count("broken JSON") == 20
    assert "and 25 more" in text


def test_rows_of_tables_are_told_by_their_number(tmp_path: Path, refusal: Callable[..., str]) -> None:
    path = written(tmp_path / "rows.parquet", [{"text": "a"}, {"text": ""}])
    assert f"{path} row 2: empty text" in refusal(dataset_name=path)
    table = tmp_path / "rows.csv"
    table.write_text("prompt,completion\na,b\nc\n")
    assert f"{table} row 2: wrong number of cells: 1 cells under a header of 2" in refusal(dataset_name=str(table))


def test_bytes_that_are_not_utf8_are_told_by_line(tmp_path: Path, refusal: Callable[..., str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(chat(0)).encode() + b'\n{"text": "caf\xe9"}\n')
    assert f"{path}:2: not UTF-8: byte 14" in refusal(dataset_name=str(path))


# --- kinds of rows -------------------------------------------------------------------------------------------------


def test_file_that_mixes_kinds_is_refused_with_the_lines(write_lines: WriteLines, refusal: Callable[..., str]) -> None:
    path = write_lines([chat(0), {"text": "a"}, chat(1), {"prompt": "a", "completion": "b"}])
    for policy in ("error", "skip"):
        text = refusal(dataset_name=path, on_bad_row=policy)
        assert "mixes kinds" in text
        assert f"text in {path}:2" in text
        assert f"prompt+completion in {path}:4" in text


def test_two_files_of_different_kinds_may_be_listed(write_lines: WriteLines, prepared: Prepare) -> None:
    read = prepared(datasets=[write_lines([chat(0)], "a.jsonl"), write_lines([{"text": "plain"}], "b.jsonl")])
    assert {kind: rows for kind, (rows, _) in read.account.train.kinds.items()} == {"messages": 1, "text": 1}


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"conversations": [{"from": "human", "value": "a"}]}, "write it as messages with role and content"),
        ({"instruction": "a", "output": "b"}, "write them as prompt and completion"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "rows of preferences"),
        ({"massages": [], "id": 3}, "rename massages to messages"),
        ({"question": "a", "answer": "b"}, "give rows with messages, or prompt and completion, or text"),
        ({"text": None}, "found text"),
    ],
)
def test_file_without_the_expected_columns_lists_what_it_has(
    policy: str, row: Any, told: str, write_lines: WriteLines, refusal: Callable[..., str]
) -> None:
    text = refusal(dataset_name=write_lines([row, row]), on_bad_row=policy)
    assert "no row has the expected columns" in text
    assert f"found {', '.join(row)}" in text
    assert told in text
    assert text.count("expected columns") == 1


def test_columns_that_are_not_read_are_said(write_lines: WriteLines, prepared: Prepare) -> None:
    account = prepared(dataset_name=write_lines([{**chat(0), "prompt": "q", "id": 3}])).account
    assert account.train.notes == {"column prompt is not read": 1, "column id is not read": 1}


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize(
    "row",
    [
        {**chat(0), "images": ["a.png"]},
        {**chat(0), "image": {"bytes": "", "path": "a.png"}},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]},
                {"role": "assistant", "content": "a cat"},
            ]
        },
    ],
)
def test_images_are_refused_even_where_bad_rows_are_skipped(
    policy: str, row: Any, write_lines: WriteLines, refusal: Callable[..., str]
) -> None:
    path = write_lines([chat(0), row])
    text = refusal(dataset_name=path, on_bad_row=policy)
    assert f"{path}:2: " in text
    assert "images, video or sound" in text


def test_column_of_images_by_type_is_refused_before_it_is_read(tmp_path: Path, refusal: Callable[..., str]) -> None:
    picture = {"bytes": b"not a picture", "path": None}
    path = written(tmp_path / "rows.parquet", [{**chat(0), "photo": picture}])
    assert "images, video or sound in photo" in refusal(dataset_name=path)
    rows = datasets.Dataset.from_list([{**chat(0), "photo": picture}]).cast_column("photo", datasets.Image())
    assert "images, video or sound in photo" in refusal(rows)
    rows.save_to_disk(str(tmp_path / "saved"))
    assert "images, video or sound in photo" in refusal(dataset_name=str(tmp_path / "saved"))


def test_image_column_without_any_image_is_no_obstacle(write_lines: WriteLines, prepared: Prepare) -> None:
    assert len(prepared(dataset_name=write_lines([{**chat(0), "images": []}, {**chat(1), "images": None}])).train) == 2
