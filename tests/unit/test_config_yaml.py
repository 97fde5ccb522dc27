"""Strict YAML: every fault is told with its line, none hides another, nothing ends in a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from halo_core.config import ConfigRead, read
from halo_core.errors import Problem


def reading(tmp_path: Path, text: str | bytes, *overrides: str) -> ConfigRead:
    """Return what a file with this text reads as."""
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read(path, overrides)


def only_problem(result: ConfigRead) -> Problem:
    assert len(result.problems) == 1, [problem.text() for problem in result.problems]
    return result.problems[0]


@pytest.mark.parametrize("text", ["2e-5", "2.0e-05", "0.00002", "2E-5", ".2e-4"])
def test_a_small_learning_rate_is_a_number_however_it_is_written(tmp_path: Path, text: str) -> None:
    result = reading(tmp_path, f"learning_rate: {text}\n")
    assert not result.problems
    assert result.config.learning_rate == 2e-5


@pytest.mark.parametrize(("text", "value"), [("yes", True), ("On", True), ("no", False), ("OFF", False)])
def test_yes_no_on_off_are_booleans_with_a_note_that_names_the_line(tmp_path: Path, text: str, value: bool) -> None:
    result = reading(tmp_path, f"seed: 1\npacking: {text}\n")
    assert not result.problems
    assert result.config.packing is value
    assert any("line 2" in note and f"{text} reads as {str(value).lower()}" in note for note in result.notes)


@pytest.mark.parametrize("text", ["true", "True", "FALSE"])
def test_true_and_false_need_no_note(tmp_path: Path, text: str) -> None:
    result = reading(tmp_path, f"bf16: {text}\n")
    assert result.config.bf16 is (text.lower() == "true")
    assert result.notes == ()


@pytest.mark.parametrize("key", ["save_strategy", "eval_strategy"])
def test_no_stays_a_word_where_the_key_takes_a_word(tmp_path: Path, key: str) -> None:
    for result in (reading(tmp_path, f"{key}: no\n"), reading(tmp_path, "seed: 1\n", f"{key}=no")):
        assert not result.problems
        assert not result.notes
        assert getattr(result.config, key) == "no"


def test_none_stays_a_word_where_the_key_takes_a_word(tmp_path: Path) -> None:
    for result in (
        reading(tmp_path, "moe_balancing: none\nreport_to: none\n"),
        reading(tmp_path, "moe_balancing: auto\nreport_to: wandb\n", "moe_balancing=none", "report_to=none"),
    ):
        assert not result.problems
        assert not result.notes
        assert result.config.moe_balancing == "none"
        assert result.config.report_to == ()


@pytest.mark.parametrize("text", ["null", "none", "None", "~", ""])
def test_null_and_none_clear_what_may_be_null(tmp_path: Path, text: str) -> None:
    result = reading(tmp_path, f"max_length: {text}\nmax_steps: 5\n")
    assert not result.problems
    assert result.config.max_length is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("seed: 012", "leading zero"),
        ("run_name: 012", "leading zero"),
        ("max_steps: 1:30", "base of 60"),
        ("run_name: 1:30", "base of 60"),
        ('seed: "4"', "quotation marks make it text"),
        ("learning_rate: '2e-5'", "quotation marks make it text"),
        ('packing: "true"', "quotation marks make it text"),
        ("seed: 1.5", "whole number"),
        ("seed: true", "whole number"),
        ("packing: 1", "no boolean"),
        ("learning_rate: fast", "number"),
        ("learning_rate: .inf", "finite"),
        ("learning_rate: 1e999", "finite"),
        ("learning_rate: -1", "out of range"),
        ("adam_beta1: 1", "out of range"),
        ("max_steps: 0", "out of range"),
        ("warmup_steps: 1.5", "half a step"),
        ("per_device_train_batch_size:", "needs a value"),
        ("run_name: yes", "is a boolean"),
        ("optim: [sgd]", "not a list"),
        ("learning_rate: {a: 1}", "not a mapping"),
        ("eval_strategy: false", "not a boolean"),
        ("dtype: float16", "scaled losses"),
        ("seed: " + "9" * 5000, "too many digits"),
        ('output_dir: "a\\0b"', "no name can have"),
    ],
)
def test_a_value_of_the_wrong_kind_is_told_with_its_line_and_keeps_the_default(
    tmp_path: Path, line: str, why: str
) -> None:
    result = reading(tmp_path, f"# first\n{line}\n")
    problem = only_problem(result)
    key = line.partition(":")[0]
    assert problem.line == 2
    assert problem.key == key
    assert why in problem.why
    assert problem.remedy
    assert getattr(result.config, key) == getattr(read(None).config, key)


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("", None, "empty"),
        ("# only a comment\n\n", None, "empty"),
        ("- seed: 1\n", 1, "a list stands at the top level"),
        ("seed\n", 1, "no `key: value`"),
        ("seed:1\n", 1, "no `key: value`"),
        ("seed: 1\nseed: 1\n", 2, "given twice (first on line 1)"),
        ("seed: 1\n\tmax_steps: 2\n", 2, "a tab"),
        ("run_name:\tx\n", 1, "a tab"),
        ("seed: 1\n---\nseed: 2\n", 2, "second document"),
        ("seed: &s 1\n", 1, "for use elsewhere"),
        ("kernels:\n  <<: {experts: reference}\n  <<: {experts: grouped}\n", 3, "given twice"),
        ("run_name: !!python/object/apply:os.system [ls]\n", 1, "the tag !!python"),
        ("run_name: !!str 5\n", 1, "the tag !!str"),
        ("run_name: [[[[[[[[[[[[[[1]]]]]]]]]]]]]]\n", 1, "deep"),
        ("run_name: @x\n", 1, "cannot begin with"),
        ('seed: 1\nrun_name: "x\n', 2, "never closed"),
        ("seed: 1\nreport_to: [wandb,\n", 2, "never closed"),
        ("seed: 1\n  max_steps: 5\n", 2, "only a value can stand"),
        ("? [a]\n: b\n", 1, "one word"),
        ("seed: 1\nrun_name: \x01\n", 2, "U+0001"),
        ('run_name: "\\UFFFFFFFF"\n', 1, "no YAML"),
        ("lr_scheduler_kwargs: {a: 1, a: 2}\n", 1, "given twice"),
    ],
)
def test_a_fault_of_the_text_is_a_problem_with_its_line(tmp_path: Path, text: str, line: int | None, why: str) -> None:
    result = reading(tmp_path, text)
    assert [problem.line for problem in result.problems if why in problem.why] == [line]


def test_a_file_that_is_no_text_is_a_problem(tmp_path: Path) -> None:
    assert "not UTF-8" in only_problem(reading(tmp_path, b"seed: 1\nrun_name: \xff\xfe\n")).why
    assert "far more than" in only_problem(reading(tmp_path, b"#" * 2_000_000)).why
    assert "cannot be read" in only_problem(read(tmp_path / "absent.yaml")).why
    assert "cannot be read" in only_problem(read(tmp_path)).why


def test_byte_order_mark_windows_line_ends_and_document_start_are_fine(tmp_path: Path) -> None:
    result = reading(tmp_path, b"\xef\xbb\xbf---\r\nseed: 7\r\nmax_steps: 0\r\n")
    assert result.config.seed == 7
    assert only_problem(result).line == 3


def test_a_list_at_the_indentation_of_its_key_is_fine_beside_a_fault(tmp_path: Path) -> None:
    result = reading(tmp_path, "datasets:\n- path: a.jsonl\n- b.jsonl\nrun_name: @x\nseed: 3\n")
    assert only_problem(result).line == 4
    assert result.config.datasets == ({"path": "a.jsonl"}, {"path": "b.jsonl"})
    assert result.config.seed == 3


def test_every_fault_is_told_at_once_whatever_its_kind(tmp_path: Path) -> None:
    result = reading(
        tmp_path,
        "model_name_or_path: tiny\n"
        "learning_rat: 1e-5\n"  # an unknown key
        "seed 4\n"  # no colon
        "\tmax_steps: 3\n"  # a tab
        "optim: adam\n"  # a wrong word
        "run_name: a: b\n"  # two colons
        "save_steps: 010\n"  # octal for some
        'report_to: "x\n'  # a quotation left open
        "save_total_limit: 0\n",  # out of range
    )
    assert [problem.line for problem in result.problems] == [2, 3, 4, 5, 6, 7, 8, 9]
    assert all(problem.where == str(tmp_path / "run.yaml") for problem in result.problems)
    assert result.config.model_name_or_path == "tiny"


def test_what_stands_before_a_break_is_kept(tmp_path: Path) -> None:
    result = reading(tmp_path, "model_name_or_path: tiny\n  optim: sgd\nseed: 4\n")
    assert only_problem(result).line == 2
    assert result.config.model_name_or_path == "tiny"
    assert result.config.seed == 4


def test_one_fault_is_not_told_twice(tmp_path: Path) -> None:
    assert only_problem(reading(tmp_path, "seed: *other\n")).line == 1
    assert only_problem(reading(tmp_path, "seed: 1\n\toptim: sgd\n")).line == 2


def test_texts_are_kept_as_they_are_written(tmp_path: Path) -> None:
    result = reading(tmp_path, "run_name: 1_000\nmodel_revision: 2024-01-01\noutput_dir: 'yes'\nfamily: \"012\"\n")
    assert not result.problems
    config = result.config
    assert (config.run_name, config.model_revision, config.output_dir, config.family) == (
        "1_000",
        "2024-01-01",
        "yes",
        "012",
    )


def test_lists_and_mappings_in_both_styles_are_the_same(tmp_path: Path) -> None:
    flow = reading(
        tmp_path, "lr_scheduler_kwargs: {min_lr_rate: 1e-1, decay_type: linear}\nreport_to: [wandb, trackio]\n"
    )
    block = reading(
        tmp_path,
        "lr_scheduler_kwargs:\n  min_lr_rate: 0.1\n  decay_type: linear\nreport_to:\n  - wandb\n  - trackio\n",
    )
    assert not flow.problems
    assert flow.config == block.config
    assert flow.config.lr_scheduler_kwargs == {"min_lr_rate": 0.1, "decay_type": "linear"}
    assert flow.config.report_to == ("wandb", "trackio")


def test_lines_and_given_name_what_the_file_has(tmp_path: Path) -> None:
    result = reading(tmp_path, "seed: 1\n\nmax_seq_length: 64\n", "optim=sgd")
    assert {key: line for key, (_, line) in result.places.items()} == {"seed": 1, "max_length": 3, "optim": None}
    assert result.given == {"seed", "max_length", "optim"}


def test_the_text_of_a_problem_has_file_line_key_value_reason_and_way_out(tmp_path: Path) -> None:
    text = only_problem(reading(tmp_path, "learning_rat: 1e-5\n")).text()
    assert text.startswith(f"{tmp_path / 'run.yaml'}: line 1: learning_rat: 1e-5")
    assert "did you mean learning_rate" in text
    assert "do:" in text


def test_keys_in_a_section_are_told_to_move(tmp_path: Path) -> None:
    problem = only_problem(reading(tmp_path, "training:\n  learning_rate: 1e-5\n"))
    assert "no sections" in problem.why
    assert "learning_rate" in problem.remedy


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("learning_rat", "learning_rate"),
        ("num-epochs", "num_train_epochs"),
        ("Seed", "seed"),
        ("max-length", "max_length"),
        ("gradient_acumulation_steps", "gradient_accumulation_steps"),
        ("max_seq_lenght", "max_seq_length"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_near_one(tmp_path: Path, typed: str, meant: str) -> None:
    problem = only_problem(reading(tmp_path, f"{typed}: 1\n"))
    assert problem.key == typed
    assert meant in problem.why
