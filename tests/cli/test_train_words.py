"""What `halo train` makes of words, files, sizes and models before anything starts; not training itself."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from halo_core import registry as facts

REGISTRY = facts.load()
FAMILIES = tuple(REGISTRY.families)

Halo = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]
Separately = Callable[..., subprocess.CompletedProcess[str]]


def numbered(err: str) -> list[str]:
    """Return the problems of a refusal, one text each."""
    return re.split(r"^\d+\. ", err, flags=re.MULTILINE)[1:]


def test_words_of_train_may_come_in_any_order(halo: Halo, planned: list[object], run_yaml: Write) -> None:
    file = run_yaml(family=None, learning_rate="1e-5")
    parts = [[file, "--max-steps=7"], ["--family", "lfm2"], ["learning_rate=3e-4"], ["--dry-run"]]
    for order in itertools.permutations(parts):
        code, _, err = halo("train", *(word for part in order for word in part))
        assert code == 0, err
    assert len(planned) == 24
    decided = {(plan.config.learning_rate, plan.config.max_steps, plan.plan.family) for plan in planned}
    assert decided == {(3e-4, 7, "lfm2")}


def test_a_run_may_have_no_file_at_all(halo: Halo, planned: list[object]) -> None:
    words = ("model_name_or_path=tiny", "--family=lfm2", "--dataset-name=rows.jsonl", "output_dir=out")
    code, _, err = halo("train", *words, "--dry-run")
    assert code == 0, err


def test_dry_run_prints_the_plan_and_passes_where_only_mechanisms_are_missing(
    halo: Halo, tmp_path: Path, run_yaml: Write
) -> None:
    file = run_yaml(torch_compile="true")
    code, out, _ = halo("train", file, "--dry-run")
    assert code == 0
    for word in ("compile", "not built yet", "lfm2_moe", "parameters", "optimizer state", "tokens per step"):
        assert word in out, word
    code, out, err = halo("train", file)
    assert (code, out) == (2, "")
    assert "torch_compile" in err and "do:  set torch_compile: false" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--learning-rate", "1e-4"], "--learning-rate=1e-4"),
        (["--packing"], "--packing=VALUE"),
        (["--eval-dataset", "rows.jsonl"], "--eval-dataset=rows.jsonl"),
        (["--max-steps", "-1", "--seed", "3"], "--seed=3"),
    ],
)
def test_setting_without_equals_sign_is_refused_with_the_way_to_write_it(
    halo: Halo, words: list[str], expected: str, run_yaml: Write
) -> None:
    for order in ([run_yaml(), *words], [*words, run_yaml()]):
        code, _, err = halo("train", *order, "--dry-run")
        assert code == 2
        assert expected in err and "no such file" not in err and "one file" not in err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["missing.yaml"], "missing.yaml  \n    why: there is no such file"),
        (["."], "it is a folder"),
        (["run.yaml", "rows.jsonl"], "a run has one file"),
        (["run.yaml", "--plugin", "none.py"], "--plugin: none.py"),
        (["run.yaml", "--nproc", "two"], "--nproc"),
        (["run.yaml", "--nproc", "0"], "at least one process"),
        (["run.yaml", "--family", "lffm2"], "did you mean 'lfm2'?"),
        (["trian"], "no such file"),
    ],
)
def test_wrong_words_are_the_users_mistake(halo: Halo, words: list[str], expected: str, run_yaml: Write) -> None:
    run_yaml()
    code, _, err = halo("train", *words, "--dry-run")
    assert code == 2
    assert expected.replace("  \n", "\n") in err, err


def test_train_without_anything_says_what_a_run_needs(halo: Halo) -> None:
    code, _, err = halo("train")
    assert code == 2
    assert "model_name_or_path" in err and "dataset_name" in err


def test_unknown_command_and_unknown_option_are_the_users_mistake(halo: Halo) -> None:
    assert halo("trian")[0] == 2
    code, _, err = halo("matrix", "--famliy", "lfm2")
    assert code == 2
    assert "Try: halo matrix --help" in err


def test_three_mistakes_of_different_kinds_are_one_report_without_torch(
    without_torch: Separately, run_yaml: Write
) -> None:
    file = run_yaml(learning_rat="1e-5", max_steps="many", context_parallel_size=2)
    run = without_torch("train", file, "--nproc", "2")
    assert run.returncode == 2, run.stderr
    problems = numbered(run.stderr)
    misspelt = next(text for text in problems if "learning_rat:" in text)
    assert "line 5" in misspelt and "learning_rate" in misspelt
    wrong_type = next(text for text in problems if "max_steps: many" in text)
    assert "line 6" in wrong_type and "whole number" in wrong_type
    refused = next(text for text in problems if "context_parallel_size" in text)
    assert "line 7" in refused and "short convolution" in refused and "(says lfm2)" in refused
    assert all("do:  " in text for text in problems)


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("learning_rat: 1e-5\n", 5, "learning_rate"),
        ("num-epochs: 3\n", 5, "num_train_epochs"),
        ("training:\n  learning_rate: 1e-5\n", 5, "training"),
        ("seed: 1\nseed: 2\n", 6, "seed"),
        ("seed:\t1\n\tlearning_rate: 2\n", 6, "tab"),
        ('max_steps: "5"\n', 5, "max_steps"),
        ("max_steps: 012\n", 5, "012"),
        ("warmup_steps: 1:30\n", 5, "1:30"),
        ("max_seq_length: [1\n", None, ""),
        ("moe_balancing: bias-updat\n", 5, "bias_update"),
    ],
)
def test_mistake_in_the_file_is_told_with_its_line(
    halo: Halo, text: str, line: int | None, expected: str, run_yaml: Write
) -> None:
    code, _, err = halo("train", run_yaml(text), "--dry-run")
    assert code == 2
    assert expected in err
    assert line is None or f"line {line}" in err, err


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n- b\n", "just words\n"])
def test_file_that_is_no_mapping_is_refused(halo: Halo, tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    code, _, err = halo("train", tmp_path / "run.yaml", "--dry-run")
    assert code == 2
    assert "run.yaml" in err


def test_words_of_other_yaml_readers_are_booleans_where_the_key_is_one(
    halo: Halo, planned: list[object], run_yaml: Write
) -> None:
    code, _, err = halo("train", run_yaml(packing="no", bf16="off", save_strategy="no"), "--dry-run")
    assert code == 0, err
    config = planned[0].config
    assert (config.packing, config.bf16, config.save_strategy) == (False, False, "no")


@pytest.mark.parametrize(
    ("nproc", "keys", "expected"),
    [
        (2, {"expert_parallel_size": 3}, "one of 1, 2"),
        (3, {"expert_parallel_size": 3}, "it does not divide the number of experts, 8"),
        (2, {"expert_parallel_size": 2, "context_parallel_size": 2}, "--nproc 4"),
        (3, {"expert_parallel_size": 2}, "--nproc: 3"),
        (3, {"expert_tensor_parallel_size": 3}, "width of an expert"),
        (4, {"context_parallel_size": 2, "expert_tensor_parallel_size": 2}, "one of these sets"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(
    halo: Halo, nproc: int, keys: dict[str, int], expected: str, run_yaml: Write
) -> None:
    code, _, err = halo("train", run_yaml(family="qwen3", **keys), "--nproc", str(nproc), "--dry-run")
    assert code == 2
    assert expected in err, err


def test_context_parallel_degree_above_the_heads_is_refused(halo: Halo, run_yaml: Write) -> None:
    code, _, err = halo("train", run_yaml(family="qwen3", context_parallel_size=4), "--nproc", "4", "--dry-run")
    assert code == 2
    assert "it does not divide the number of key-value heads, 2" in err and "do:  one of 1, 2" in err


def model_folder(folder: Path, architecture: facts.Architecture) -> Path:
    """Write only the config.json of an architecture's tiny model: all that a refusal may read."""
    folder.mkdir(exist_ok=True)
    config = {**architecture.spec.tiny, "model_type": architecture.spec.model_types[0]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("architecture", REGISTRY.architectures(), ids=lambda architecture: architecture.name)
def test_wrong_family_names_the_right_one(
    halo: Halo, tmp_path: Path, planned: list[object], architecture: facts.Architecture, run_yaml: Write
) -> None:
    folder = model_folder(tmp_path / "model", architecture)
    for family in FAMILIES:
        file = run_yaml(family=None, model_name_or_path=folder)
        code, _, err = halo("train", file, "--family", family.replace("_", "-"), "--dry-run")
        if family == architecture.family:
            assert code == 0, err
            assert planned[-1].plan.architecture == architecture.name
        else:
            assert code == 2
            assert f"--family {architecture.family}" in err and f": {family}" in err


def test_tiny_without_a_family_lists_the_families(halo: Halo, run_yaml: Write) -> None:
    for model in ("tiny", "tiny-dense"):
        code, _, err = halo("train", run_yaml(family=None, model_name_or_path=model), "--dry-run")
        assert code == 2
        assert ", ".join(FAMILIES) in err


def test_model_of_an_unknown_type_is_refused_with_the_known_ones(halo: Halo, tmp_path: Path, run_yaml: Write) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "lfm2_mo"}')
    code, _, err = halo("train", run_yaml(family=None, model_name_or_path=tmp_path / "model"), "--dry-run")
    assert code == 2
    assert "did you mean 'lfm2_moe'?" in err
