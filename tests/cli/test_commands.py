"""What people type and what they get: every command but `train`, and the exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from halo_core import registry as facts
from halo_core import support
from halo_core.plugins import PluginFault

REGISTRY = facts.load()
FAMILIES = tuple(REGISTRY.families)

Halo = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]
Separately = Callable[..., subprocess.CompletedProcess[str]]
SCRIPT = Path(sys.executable).parent / "halo"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--help"], ["train", "matrix", "plugins", "init-tiny", "sample", "doctor"]),
        ([], ["train", "doctor"]),
        (["train", "--help"], ["--family", "--nproc", "--plugin", "--dry-run"]),
        (["plugins"], ["lfm2  loaded  (halo-moe"]),
        (["matrix"], ["cp:ulysses"]),
        (["matrix", "--json"], ['"verdict"']),
    ],
)
def test_command_that_needs_no_torch_imports_none(
    without_torch: Separately, words: list[str], expected: list[str]
) -> None:
    run = without_torch(*words)
    assert run.returncode == 0, run.stderr
    assert all(word in run.stdout for word in expected)


def test_the_watch_for_torch_sees_a_command_that_imports_it(without_torch: Separately) -> None:
    run = without_torch("doctor")
    assert run.returncode == 1 and "imported ['torch'" in run.stderr


def test_the_installed_script_is_this_command_line() -> None:
    run = subprocess.run([SCRIPT, "matrix", "--family", "lffm2"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "did you mean 'lfm2'?" in run.stderr


def test_reader_that_leaves_early_is_no_fault() -> None:
    words = [SCRIPT, "matrix", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        run.stdout.close()
        assert (run.wait(), run.stderr.read()) == (0, "")


def test_plugins_lists_what_each_brings(halo: Halo) -> None:
    code, out, _ = halo("plugins")
    assert code == 0
    for family in FAMILIES:
        assert f"family {family}: " in out


def test_json_matrix_is_every_cell_with_its_author(halo: Halo) -> None:
    code, out, _ = halo("matrix", "--json")
    cells = json.loads(out)
    assert code == 0
    assert all(list(cell) == ["family", "architecture", "feature", "verdict", "reason", "by"] for cell in cells)
    assert all(cell["verdict"] in support.WORDS and cell["reason"] and cell["by"] for cell in cells)
    expected = {(a.family, a.name, f) for a in REGISTRY.architectures() for f in support.FEATURES}
    assert {(cell["family"], cell["architecture"], cell["feature"]) for cell in cells} == expected
    assert len(cells) == len(expected)


def test_matrix_of_one_family_speaks_of_no_other(halo: Halo) -> None:
    code, out, _ = halo("matrix", "--family", "LFM-2", "--json")
    assert code == 0
    assert {cell["family"] for cell in json.loads(out)} == {"lfm2"}
    _, table, _ = halo("matrix", "--family", "lfm2")
    assert all(feature in table for feature in support.FEATURES)


def test_why_tells_the_short_convolution_and_the_missing_mechanism(halo: Halo) -> None:
    code, out, _ = halo("matrix", "--why", "lfm2", "cp")
    assert code == 0
    assert "cp:ulysses: Unsupported" in out
    assert "lfm2: Unsupported. a short convolution" in out and "Lfm2MoeShortConv" in out
    assert "halo_core: not built yet. this version has no mechanism for it yet" in out


@pytest.mark.parametrize("who", [*FAMILIES, *(a.name for a in REGISTRY.architectures())])
def test_why_answers_for_every_family_and_every_group_of_features(halo: Halo, who: str) -> None:
    for feature in ("cp", "attention", "balancing", "sft"):
        code, out, _ = halo("matrix", "--why", who, feature)
        assert code == 0
        assert f"{feature}" in out and "halo_core: " in out


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["--why", "lfm2", "paking"], "did you mean 'packing'?"),
        (["--why", "lfm2", "xyz"], "one of: sft"),
        (["--why", "lmf2", "cp"], "did you mean 'lfm2'?"),
        (["--family", "gpt-os"], "did you mean 'gpt_oss'?"),
        (["--family", "zzz"], f"one of: {', '.join(FAMILIES)}"),
    ],
)
def test_unknown_name_in_matrix_is_refused_with_what_there_is(halo: Halo, words: list[str], near: str) -> None:
    code, out, err = halo("matrix", *words)
    assert (code, out) == (2, "")
    assert near in err


def test_matrix_of_a_run_says_who_asked_for_each_feature(halo: Halo, run_yaml: Write) -> None:
    code, out, _ = halo("matrix", "--config", run_yaml(torch_compile="true"))
    assert code == 0
    assert "torch_compile: true" in out and "not built yet" in out
    code, _, err = halo("matrix", "--config", run_yaml(learning_rat="1e-5"))
    assert code == 2
    assert "learning_rate" in err


def test_doctor_says_present_or_how_to_install(halo: Halo) -> None:
    code, out, _ = halo("doctor")
    assert code == 0
    assert re.search(r"^torch +2\.", out, re.MULTILINE)
    for extra in ("gpu", "linear-attention", "flash", "tensorboard", "wandb", "trackio", "plot"):
        assert f"pip install 'halo-moe[{extra}]'" in out or "present" in out
    assert "MISSING" not in out


def test_init_tiny_writes_a_folder_once(halo: Halo, tmp_path: Path) -> None:
    code, out, _ = halo("init-tiny", "--family", "LFM2.5", "--out", tmp_path / "tiny")
    assert code == 0 and "lfm2_moe" in out
    written = {file.name for file in (tmp_path / "tiny").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= written
    code, _, err = halo("init-tiny", "--family", "lfm2", "--out", tmp_path / "tiny")
    assert code == 2 and "not an empty folder" in err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--family", "lffm2", "--out", "new"], "did you mean 'lfm2'?"),
        (["--family", "gpt_oss", "--dense", "--out", "new"], "no dense architecture"),
        (["--family", "lfm2"], "--out"),
    ],
)
def test_init_tiny_refuses_what_does_not_exist(halo: Halo, words: list[str], expected: str) -> None:
    code, _, err = halo("init-tiny", *words)
    assert code == 2 and expected in err


def test_sample_needs_a_model_folder(halo: Halo, tmp_path: Path) -> None:
    code, _, err = halo("sample", tmp_path, "hello")
    assert code == 2 and "config.json" in err


def test_exit_codes_tell_whose_fault_it_was(halo: Halo, monkeypatch: pytest.MonkeyPatch) -> None:
    from halo_core.cli import doctor

    class Stopped(Exception):
        exit_code = 1

    def raising(fault: BaseException) -> Callable[[], None]:
        def run() -> None:
            raise fault

        return run

    assert halo("doctor")[0] == 0
    monkeypatch.setattr(doctor, "run", raising(KeyboardInterrupt()))
    code, _, err = halo("doctor")
    assert code == 130 and "interrupted" in err
    monkeypatch.setattr(doctor, "run", raising(RuntimeError("a bug")))
    code, _, err = halo("doctor")
    assert code == 1 and "Traceback" in err and "a bug" in err and "this is our fault" in err
    monkeypatch.setattr(doctor, "run", raising(PluginFault("plugin 'toy' failed in halo_step_ended: KeyError: 'x'")))
    code, _, err = halo("doctor")
    assert code == 1 and "plugin 'toy' failed in halo_step_ended" in err and "our fault" not in err
    monkeypatch.setattr(doctor, "run", raising(Stopped("step 3: loss is not finite")))
    code, _, err = halo("doctor")
    assert code == 1 and err == "halo: step 3: loss is not finite\n"
