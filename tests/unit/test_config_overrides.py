"""Words of the command line and values from Python: how they are read, and what they replace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from halo_core.config import read
from halo_core.errors import shown


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a small sound configuration."""
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\nmax_length: 512\nlearning_rate: 1e-3\n")
    return path


@pytest.mark.parametrize(
    "word",
    [
        "learning_rate=2e-5",
        "--learning_rate=2e-5",
        "--learning-rate=2e-5",
        "-learning.rate=2e-5",
        "learning_rate= 2e-5 ",
    ],
)
def test_an_override_replaces_the_files_key_however_its_name_is_spelt(file: Path, word: str) -> None:
    result = read(file, [word])
    assert not result.problems
    assert result.config.learning_rate == 2e-5
    assert result.config.seed == 1
    assert result.places["learning_rate"] == ("command line", None)


def test_an_override_under_a_former_name_replaces_the_key_too(file: Path) -> None:
    result = read(file, ["--max-seq-length=64"])
    assert not result.problems
    assert result.config.max_length == 64


def test_a_faulty_value_that_is_replaced_is_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: TODO\n")
    assert read(path).problems
    assert not read(path, ["learning_rate=1e-5"]).problems


def test_lists_and_mappings_are_written_in_flow_style(file: Path) -> None:
    result = read(
        file,
        [
            "report_to=[wandb, trackio]",
            "lr_scheduler_kwargs={min_lr_rate: 0.1}",
            "datasets=[{path: a.jsonl, split: test}, b.jsonl]",
        ],
    )
    assert not result.problems
    assert result.config.report_to == ("wandb", "trackio")
    assert result.config.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert result.config.datasets == ({"path": "a.jsonl", "split": "test"}, {"path": "b.jsonl"})


@pytest.mark.parametrize("text", ["a: b", "@home", "*", "#1", "a=b", "C:\\runs", "&x", "!y", "with space"])
def test_a_text_needs_no_care_on_the_command_line(file: Path, text: str) -> None:
    result = read(file, [f"run_name={text}"])
    assert not result.problems
    assert result.config.run_name == text


@pytest.mark.parametrize("text", ["null", "none", "~", ""])
def test_null_clears_an_optional_key(file: Path, text: str) -> None:
    result = read(file, [f"max_length={text}"])
    assert not result.problems
    assert result.config.max_length is None


@pytest.mark.parametrize(
    ("word", "key", "why"),
    [
        ("learning_rat=1", "learning_rat", "did you mean learning_rate"),
        ("seed", "seed", "no setting"),
        ("=1", "=1", "no setting"),
        ("--dry", "--dry", "no setting"),
        ("seed=012", "seed", "leading zero"),
        ("seed='4'", "seed", "quotation marks"),
        ("seed=x", "seed", "whole number"),
        ("report_to=[wandb", "report_to", "never closed"),
        ("report_to=[wandb] x", "report_to", "cannot be read"),
        ("lr_scheduler_kwargs={a: !!python/name:os.system }", "lr_scheduler_kwargs", "the tag"),
    ],
)
def test_a_wrong_override_is_a_problem_of_the_command_line(file: Path, word: str, key: str, why: str) -> None:
    result = read(file, [word])
    (problem,) = result.problems
    assert problem.where == "command line"
    assert problem.line is None
    assert problem.key == key
    assert why in problem.why


def test_two_overrides_of_one_key_are_a_problem(file: Path) -> None:
    for words in (["seed=1", "seed=2"], ["max_length=8", "max_seq_length=8"]):
        (problem,) = read(file, words).problems
        assert "given" in problem.why


def test_problems_of_the_file_come_before_those_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("optim: x\nfoo: 1\n")
    assert [problem.where for problem in read(path, ["seed=x"]).problems] == [str(path), str(path), "command line"]


def test_python_values_are_taken_as_they_are_and_overrides_win() -> None:
    given = {
        "seed": 3,
        "learning_rate": 1e-05,
        "packing": False,
        "max_length": None,
        "dataset_name": Path("a.jsonl"),
        "report_to": ["wandb"],
        "eval_strategy": "no",
        "lr_scheduler_kwargs": {"min_lr": 0.0},
        "output_dir": "yes",
    }
    result = read(None, ["seed=4"], given=given)
    assert not result.problems
    config = result.config
    assert (config.seed, config.learning_rate, config.packing, config.max_length) == (4, 1e-05, False, None)
    assert (config.dataset_name, config.report_to, config.output_dir) == ("a.jsonl", ("wandb",), "yes")
    assert config.lr_scheduler_kwargs == {"min_lr": 0.0}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", "2e-5"),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("seed", 1.5),
        ("seed", True),
        ("optim", object()),
        ("packing", "yes"),
        ("run_name", 5.5j),
        ("learning_rat", 1),
    ],
)
def test_a_python_value_of_the_wrong_type_is_a_problem(key: str, value: object) -> None:
    (problem,) = read(None, given={key: value}).problems
    assert problem.key == key


def test_plugins_can_bring_further_words() -> None:
    words = {"optim": ("muon",), "report_to": ("notebook",), "attn_implementation": ("ring",)}
    given = {"optim": "muon", "report_to": ["notebook", "wandb"], "attn_implementation": "ring"}
    assert len(read(None, given=given).problems) == 3
    result = read(None, given=given, more_words=words)
    assert not result.problems
    assert result.config.report_to == ("notebook", "wandb")


def test_numbers_of_numpy_are_numbers() -> None:
    given = {"learning_rate": np.float64(1e-3), "weight_decay": np.float32(0.5), "seed": np.int64(7)}
    found = read(None, given=given)
    assert found.problems == ()
    assert (found.config.learning_rate, found.config.weight_decay, found.config.seed) == (1e-3, 0.5, 7)


def test_lists_and_mappings_in_problems_are_written_as_yaml() -> None:
    assert shown([{"path": "a.jsonl", "split": None}, True, 0.5]) == "[{path: a.jsonl, split: null}, true, 0.5]"
    assert shown(()) == "[]" and shown({}) == "{}"


def test_a_revision_of_a_folder_and_a_warm_up_beyond_the_end_are_told(tmp_path: Path) -> None:
    words = [f"model_name_or_path={tmp_path}", "model_revision=v2", "max_steps=3", "warmup_steps=300"]
    revision, warm_up = sorted(read(None, words).notes)
    assert "model_revision: has no effect on a folder" in revision
    assert "warmup_steps: the run ends at max_steps: 3" in warm_up
    assert read(None, ["model_name_or_path=org/name", "model_revision=v2", "max_steps=3", "warmup_steps=2"]).notes == ()
