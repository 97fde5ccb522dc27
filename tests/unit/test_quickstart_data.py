"""The quickstart's rows and the second example's: made by their scripts, disjoint, and short enough for their YAML."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer

from halo_core.models import tiny

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
MAKE = runpy.run_path(str(QUICKSTART / "make_data.py"))
CHATTERBOT = runpy.run_path(str(ROOT / "examples" / "chatterbot" / "make_data.py"))
LARGEST_FILE = 500 * 1024  # bytes


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def right_answer(task: str, prompt: str) -> str | None:
    """Return the answer worked out from the prompt alone, or None for what one has to know."""
    numbers = [int(word.strip("?,")) for word in prompt.split() if word.strip("?,").isdigit()]
    said = prompt.partition(": ")[2].split()
    return {
        "next number": lambda: str(numbers[0] + 1),
        "larger number": lambda: str(max(numbers)),
        "sort digits": lambda: " ".join(str(number) for number in sorted(numbers)),
        "reverse words": lambda: " ".join(said[::-1]),
    }.get(task, lambda: None)()


def test_files_are_what_the_script_makes() -> None:
    train, held_out = MAKE["rows"]()
    assert read(QUICKSTART / "train.jsonl") == train
    assert read(QUICKSTART / "heldout.jsonl") == held_out
    assert (QUICKSTART / "train.jsonl").stat().st_size < LARGEST_FILE


def test_another_seed_makes_other_rows_that_are_disjoint_as_well() -> None:
    train, held_out = MAKE["rows"](seed=1)
    assert train != read(QUICKSTART / "train.jsonl")
    MAKE["check"](train, held_out)


def test_no_held_out_prompt_is_trained_on() -> None:
    trained = {row["messages"][0]["content"] for row in read(QUICKSTART / "train.jsonl")}
    asked = [row["messages"][0]["content"] for row in read(QUICKSTART / "heldout.jsonl")]
    assert len(set(asked)) == len(asked) == 120
    assert trained.isdisjoint(asked)


def test_a_held_out_prompt_in_training_is_found_in_any_spelling() -> None:
    train, held_out = MAKE["rows"]()
    leaked = held_out[0]["messages"][0]["content"].upper().replace(" ", "  ")
    with pytest.raises(ValueError, match="trained on"):
        MAKE["check"]([*train, {"messages": [{"content": leaked}]}], held_out)


def test_every_task_is_held_out_equally_and_its_answers_are_right() -> None:
    held_out = read(QUICKSTART / "heldout.jsonl")
    assert set(Counter(row["task"] for row in held_out).values()) == {MAKE["HELD_OUT_PER_TASK"]}
    worked_out = 0
    for row in held_out:
        prompt, answer = (message["content"] for message in row["messages"])
        expected = right_answer(row["task"], prompt)
        if expected is not None:
            assert answer == expected, prompt
            worked_out += 1
    assert worked_out == 4 * MAKE["HELD_OUT_PER_TASK"]


def test_every_fact_that_is_asked_for_is_trained_in_another_wording() -> None:
    for name in ("opposites", "capitals"):
        train, held_out = MAKE["tasks"]()[name]
        assert {answer for _, answer in held_out} <= {answer for _, answer in train}


def test_no_prompt_has_two_answers() -> None:
    answers: dict[str, set[str]] = {}
    for row in read(QUICKSTART / "train.jsonl"):
        prompt, answer = (message["content"] for message in row["messages"])
        answers.setdefault(prompt, set()).add(answer)
    assert all(len(found) == 1 for found in answers.values())


def test_rows_fit_the_length_of_the_yaml(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    longest = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text(encoding="utf-8"))["max_length"]
    for row in read(QUICKSTART / "train.jsonl") + read(QUICKSTART / "heldout.jsonl"):
        tokens = [tokenizer.encode(message["content"]).ids for message in row["messages"]]
        assert sum(map(len, tokens)) + 2 * len(tokens) <= longest


def test_chatterbot_rows_alternate_and_held_out_questions_are_not_trained_on(tmp_path: Path) -> None:
    counts = CHATTERBOT["write"](tmp_path)
    train, held_out = read(tmp_path / "train.jsonl"), read(tmp_path / "heldout.jsonl")
    assert counts == {"train.jsonl": len(train), "heldout.jsonl": len(held_out)}
    assert len(train) > 500
    assert len(held_out) > 30
    for row in train + held_out:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert roles
    first = {row["messages"][0]["content"].lower() for row in train}
    assert first.isdisjoint(row["messages"][0]["content"].lower() for row in held_out)


def test_a_last_turn_without_an_answer_is_left_out() -> None:
    messages = CHATTERBOT["messages"](["Hello", "Hi", "How are you?"])
    assert [message["content"] for message in messages] == ["Hello", "Hi"]
