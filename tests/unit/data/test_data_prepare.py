"""Lengths, policies and the account of the data. Not for templates or file formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halo_core.config import RunConfig
from halo_core.data import IGNORED, Prepared, collate, pad_id_of, prepare
from halo_core.data.prepare import NOTE_JOINS, NOTE_NO_END
from halo_core.errors import Refused

WithTemplate = Callable[[str], Any]
WriteLines = Callable[..., str]


def chat(question: int, answer: int, name: int = 0) -> dict[str, Any]:
    """Return a row whose question and answer have about so many tokens: ` if` is one."""
    return {
        "messages": [
            {"role": "user", "content": f"{name}" + " if" * question},
            {"role": "assistant", "content": f"{name}" + " if" * answer},
        ]
    }


@pytest.fixture
def tiny(with_template: WithTemplate) -> Any:
    """Return the tokenizer under a template with markers: 8 tokens beside the contents of a question and an answer."""
    return with_template("lfm2_training")


def length_of(tiny: Any, row: dict[str, Any]) -> int:
    return len(tiny.apply_chat_template(row["messages"], return_dict=True)["input_ids"])


def refusal(tokenizer: Any, rows: Any = None, **given: Any) -> str:
    with pytest.raises(Refused) as caught:
        prepare(RunConfig(**given), tokenizer, rows=rows)
    return caught.value.text()


def adds_up(prepared: Prepared) -> None:
    """Assert that every row and every token read is kept or told of."""
    for rows, account in (
        (prepared.train, prepared.account.train),
        (prepared.evaluation or [], prepared.account.evaluation),
    ):
        if account is None:
            continue
        dropped = account.dropped.values()
        assert account.rows == len(rows)
        assert account.rows_read == account.rows + sum(reason.rows for reason in dropped)
        assert account.tokens == sum(len(row.input_ids) for row in rows)
        assert account.tokens_read == account.tokens + account.cut_tokens + sum(reason.tokens for reason in dropped)
        assert account.supervised_tokens == sum(row.num_targets for row in rows)
        assert account.rows == sum(count for count, _ in account.kinds.values())


# --- lengths -------------------------------------------------------------------------------------------------------


def test_overlong_rows_are_dropped_and_said_by_default(tiny: Any) -> None:
    rows = [chat(5, 60 if number % 4 == 2 else 5, number) for number in range(20)]
    prepared = prepare(RunConfig(max_length=40), tiny, rows=rows)
    adds_up(prepared)
    assert [row.row_id for row in prepared.train] == [number for number in range(20) if number % 4 != 2]
    account = prepared.account.train
    (reason, dropped), *others = account.dropped.items()
    assert not others
    assert (reason, dropped.rows) == ("longer than max_length 40", 5)
    assert dropped.first == f"rows row 3, {length_of(tiny, rows[2])} tokens"
    assert dropped.tokens == sum(length_of(tiny, row) for number, row in enumerate(rows) if number % 4 == 2)
    assert "20 rows read from rows, 15 kept, 5 dropped" in prepared.account.text()


def test_row_of_exactly_max_length_is_kept(tiny: Any) -> None:
    rows = [chat(3, 4), chat(3, 5)]
    prepared = prepare(RunConfig(max_length=length_of(tiny, rows[0])), tiny, rows=rows)
    assert [row.row_id for row in prepared.train] == [0]
    assert len(prepare(RunConfig(max_length=None), tiny, rows=rows).train) == 2


def test_truncated_rows_keep_their_beginning(tiny: Any) -> None:
    rows = [chat(5, 60), chat(5, 5)]
    whole = prepare(RunConfig(), tiny, rows=rows).train
    prepared = prepare(RunConfig(max_length=30, overlong="truncate"), tiny, rows=rows)
    adds_up(prepared)
    assert prepared.train[0].input_ids == whole[0].input_ids[:30]
    assert prepared.train[0].supervised == whole[0].supervised[:30]
    assert prepared.train[1] == whole[1]
    assert (prepared.account.train.cut_rows, prepared.account.train.cut_tokens) == (1, len(whole[0].input_ids) - 30)
    assert "cut: 1 row at max_length" in prepared.account.text()


def test_overlong_error_names_count_length_and_first_row(tiny: Any, write_lines: WriteLines) -> None:
    rows = [chat(5, 5), chat(5, 60), chat(5, 80), chat(5, 5)]
    path = write_lines(rows)
    text = refusal(tiny, dataset_name=path, max_length=40, overlong="error")
    assert "max_length: 40" in text
    assert "2 of 4 training rows are longer" in text
    assert f"the first is {path}:2 with {length_of(tiny, rows[1])} tokens" in text
    assert f"raise max_length to {length_of(tiny, rows[2])}" in text


@pytest.mark.parametrize("policy", ["truncate", "drop"])
def test_rows_that_truncation_leaves_without_an_answer_are_refused_when_nothing_is_left(
    policy: str, tiny: Any, write_lines: WriteLines
) -> None:
    rows = [chat(80, 3, number) for number in range(6)]
    path = write_lines(rows)
    text = refusal(tiny, dataset_name=path, max_length=32, overlong=policy)
    assert "none of the 6 training rows is left" in text
    assert "6 dropped" in text
    assert "max_length: 32" in text
    assert f"first: {path}:1, {length_of(tiny, rows[0])} tokens" in text
    needed = int(text.split("raise max_length to ")[1].split()[0])
    with pytest.raises(Refused):
        prepare(RunConfig(dataset_name=path, max_length=needed - 1, overlong=policy), tiny)
    assert prepare(RunConfig(dataset_name=path, max_length=needed, overlong=policy), tiny).train


def test_one_row_without_an_answer_among_eight_leaves_the_others_as_they_are(tiny: Any) -> None:
    rows = [chat(80 if number == 3 else 4, 5, number) for number in range(8)]
    config = RunConfig(max_length=32, overlong="truncate")
    prepared = prepare(config, tiny, rows=rows)
    adds_up(prepared)
    alone = prepare(config, tiny, rows=[row for number, row in enumerate(rows) if number != 3])
    assert [row.input_ids for row in prepared.train] == [row.input_ids for row in alone.train]
    (reason, dropped), *others = prepared.account.train.dropped.items()
    assert (reason, dropped.rows, others) == ("nothing to learn within max_length 32", 1, [])


def test_evaluation_rows_without_an_answer_never_reach_a_batch(tiny: Any, write_lines: WriteLines) -> None:
    held = write_lines([chat(80, 3), chat(3, 3)], "held.jsonl")
    given = {"eval_dataset": held, "eval_strategy": "steps", "max_length": 32, "overlong": "truncate"}
    prepared = prepare(RunConfig(**given), tiny, rows=[chat(3, 3)])
    adds_up(prepared)
    assert prepared.evaluation is not None
    assert len(prepared.evaluation) == 1
    assert prepared.account.evaluation is not None
    assert prepared.account.evaluation.rows_read == 2
    only = write_lines([chat(80, 3)], "only.jsonl")
    text = refusal(tiny, [chat(3, 3)], **{**given, "eval_dataset": only})
    assert "none of the 1 evaluation rows is left" in text


def test_problems_of_training_and_evaluation_rows_come_together(tiny: Any, write_lines: WriteLines) -> None:
    train = write_lines([chat(3, 3), {"messages": []}], "train.jsonl")
    held = write_lines(["{"], "held.jsonl")
    text = refusal(tiny, dataset_name=train, eval_dataset=held, eval_strategy="epoch")
    assert f"{train}:2: empty list of messages" in text
    assert f"{held}:1: broken JSON" in text


@given(
    sizes=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=8),
    max_length=st.integers(20, 60),
    overlong=st.sampled_from(["drop", "truncate"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_tokens_in_are_tokens_kept_and_tokens_told_of(
    sizes: list[tuple[int, int]], max_length: int, overlong: str, tiny: Any
) -> None:
    rows = [chat(question, answer) for question, answer in sizes]
    lengths = [length_of(tiny, row) for row in rows]
    # One row that always fits, so that something is always left.
    prepared = prepare(RunConfig(max_length=max_length, overlong=overlong), tiny, rows=[chat(0, 0), *rows])
    total = sum(lengths) + length_of(tiny, chat(0, 0))
    adds_up(prepared)
    assert prepared.account.train.tokens_read == total
    assert all(len(row.input_ids) <= max_length and row.num_targets for row in prepared.train)


# --- policies ------------------------------------------------------------------------------------------------------


def test_file_whose_rows_are_all_bad_is_refused_under_skip(tiny: Any, write_lines: WriteLines) -> None:
    rows = [{"messages": []}, {"messages": [{"role": "system", "content": "a"}]}, "{", {"messages": ""}]
    text = refusal(tiny, dataset_name=write_lines(rows), on_bad_row="skip")
    assert "none of the 4 training rows is left" in text
    for reason in ("empty list of messages", "no assistant message", "broken JSON", "wrong type"):
        assert f"1 dropped: {reason}" in text


def test_preparing_twice_gives_the_same_rows(tiny: Any) -> None:
    rows = [chat(number, 3, number) for number in range(9)]
    one, other = (prepare(RunConfig(), tiny, rows=rows) for _ in range(2))
    assert list(one.train) == list(other.train)
    assert one.account == other.account


def test_many_rows_keep_their_order_over_several_batches_of_tokens(tiny: Any) -> None:
    rows = [chat(1, 1, number) for number in range(600)]
    prepared = prepare(RunConfig(), tiny, rows=rows)
    assert [row.row_id for row in prepared.train] == list(range(600))
    for number in (0, 255, 256, 511, 512, 599):
        assert prepared.train[number].input_ids == tiny.apply_chat_template(rows[number]["messages"])["input_ids"]


# --- prompt and completion, text -----------------------------------------------------------------------------------


def learnt(tokenizer: Any, prepared: Prepared) -> str:
    row = prepared.train[0]
    return str(tokenizer.decode([token for token, flag in zip(row.input_ids, row.supervised, strict=True) if flag]))


def test_completion_is_learnt_with_the_end_token_and_the_prompt_is_not(tiny: Any) -> None:
    rows = [{"prompt": "What is it?", "completion": " A file."}]
    prepared = prepare(RunConfig(), tiny, rows=rows)
    assert learnt(tiny, prepared) == " A file.<|endoftext|>"
    assert prepared.train[0].input_ids == tiny("What is it? A file.<|endoftext|>")["input_ids"]
    assert "1 row of prompt+completion: the completion" in prepared.account.text()
    whole = prepare(RunConfig(completion_only_loss=False), tiny, rows=rows)
    assert all(whole.train[0].supervised)
    assert "every token (completion_only_loss: false)" in whole.account.text()


def test_end_token_is_not_added_twice(tiny: Any) -> None:
    for row in ({"prompt": "a", "completion": " b<|endoftext|>"}, {"text": "a b<|endoftext|>"}):
        prepared = prepare(RunConfig(), tiny, rows=[row])
        assert prepared.train[0].input_ids == tiny("a b<|endoftext|>")["input_ids"]


def test_text_is_learnt_whole_and_ended(tiny: Any) -> None:
    prepared = prepare(RunConfig(), tiny, rows=[{"text": "A file."}])
    assert prepared.train[0].input_ids == tiny("A file.<|endoftext|>")["input_ids"]
    assert all(prepared.train[0].supervised)
    assert "1 row of text: every token" in prepared.account.text()
    batch = collate(prepared.train[:], pad_id_of(tiny))
    assert batch.targets[0].tolist() == [*prepared.train[0].input_ids[1:], IGNORED]


def test_tokenizer_without_end_token_adds_none_and_says_so(tiny: Any) -> None:
    tiny.eos_token = None
    prepared = prepare(RunConfig(), tiny, rows=[{"text": "A file."}])
    assert prepared.train[0].input_ids == tiny("A file.")["input_ids"]
    assert prepared.account.train.notes == {NOTE_NO_END: 1}
    tiny.pad_token = None
    assert pad_id_of(tiny) == 0


def test_token_over_the_border_of_prompt_and_completion_is_learnt_and_said(tiny: Any) -> None:
    joined = prepare(RunConfig(), tiny, rows=[{"prompt": "the funct", "completion": "ion"}])
    assert joined.account.train.notes == {NOTE_JOINS: 1}
    assert learnt(tiny, joined) == " function<|endoftext|>"
    apart = prepare(RunConfig(), tiny, rows=[{"prompt": "the", "completion": " function"}])
    assert not apart.account.train.notes


def test_completion_of_messages_is_what_follows_the_generation_prompt(tiny: Any) -> None:
    row = {
        "prompt": [{"role": "user", "content": "What?"}],
        "completion": [{"role": "assistant", "content": "This."}],
    }
    prepared = prepare(RunConfig(), tiny, rows=[row])
    assert learnt(tiny, prepared) == "This.<|im_end|>\n"
    assert prepared.train[0].input_ids == tiny.apply_chat_template([*row["prompt"], *row["completion"]])["input_ids"]


def test_earlier_answers_in_a_prompt_are_not_learnt(tiny: Any, with_template: WithTemplate) -> None:
    history = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "First."},
        {"role": "user", "content": "Two?"},
    ]
    row = {"prompt": history, "completion": [{"role": "assistant", "content": "Second."}]}
    assert learnt(tiny, prepare(RunConfig(), tiny, rows=[row])) == "Second.<|im_end|>\n"
    stock = with_template("qwen3_5_nothink")
    assert learnt(stock, prepare(RunConfig(), stock, rows=[row])) == "Second.<|im_end|>\n"


@pytest.mark.parametrize("name", ["lfm2", "lfm2_training"])
def test_tool_answers_inside_a_completion_are_not_learnt(name: str, with_template: WithTemplate) -> None:
    tokenizer = with_template(name)
    row = {
        "prompt": [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Where?"}],
        "completion": [
            {"role": "assistant", "content": "I look."},
            {"role": "tool", "content": "sunny"},
            {"role": "assistant", "content": "Sunny."},
        ],
    }
    assert learnt(tokenizer, prepare(RunConfig(), tokenizer, rows=[row])) == "I look.<|im_end|>\nSunny.<|im_end|>\n"
    whole = learnt(tokenizer, prepare(RunConfig(assistant_only_loss=False), tokenizer, rows=[row]))
    assert "sunny" in whole
    assert "Where?" not in whole


# --- the account ---------------------------------------------------------------------------------------------------


def test_account_is_fit_for_json_and_says_what_the_lines_say(tiny: Any, write_lines: WriteLines) -> None:
    path = write_lines([chat(3, 4), "", chat(3, 90), {"messages": []}])
    held = write_lines([chat(2, 2)], "held.jsonl")
    config = RunConfig(dataset_name=path, eval_dataset=held, eval_strategy="steps", max_length=40, on_bad_row="skip")
    prepared = prepare(config, tiny)
    adds_up(prepared)
    told = json.loads(json.dumps(prepared.account.as_dict()))
    assert told["train"]["rows_read"] == 3
    assert told["train"]["rows"] == 1
    assert told["train"]["blank_lines"] == 1
    assert told["train"]["dropped"]["longer than max_length 40"]["rows"] == 1
    assert told["evaluation"]["rows"] == 1
    share = told["train"]["supervised_tokens"] / told["train"]["tokens"]
    assert told["train"]["supervised_share"] == share
    text = prepared.account.text()
    assert f"training data: 3 rows read from {path}, 1 kept, 2 dropped" in text
    assert f"evaluation data: 1 row read from {held}, 1 kept, 0 dropped" in text
    assert f"({share:.1%})" in text
    assert "the assistant's turns, by the template's generation markers" in text
