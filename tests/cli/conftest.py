"""What the tests of the command line share: running it in this process, a sound run.yaml, plans not printed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from halo_core.cli import plan_table
from halo_core.cli.main import exit_code

WITHOUT_TORCH = """
import sys
from halo_core.cli.main import exit_code
code = exit_code(sys.argv[1:])
brought = [name for name in ("torch", "transformers", "datasets") if name in sys.modules]
sys.exit(f"imported {brought}" if brought else code)
"""
RUN = {"model_name_or_path": "tiny", "family": "lfm2", "dataset_name": "rows.jsonl", "output_dir": "out"}


@pytest.fixture
def halo(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command line in this process, in an empty folder: (exit code, out, err)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n')

    def run(*words: str | Path) -> tuple[int, str, str]:
        code = exit_code([str(word) for word in words])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err or code == 1
        return code, out, err

    return run


@pytest.fixture
def run_yaml(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes run.yaml: the four lines of a sound run, changed by keywords, and a text below."""

    def write(text: str = "", **keys: object) -> Path:
        lines = [f"{key}: {value}\n" for key, value in {**RUN, **keys}.items() if value is not None]
        file = tmp_path / "run.yaml"
        file.write_text("".join(lines) + text)
        return file

    return write


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Collect the plans that a dry-run would print: printing them imports torch."""
    plans: list[object] = []
    monkeypatch.setattr(plan_table, "print_plan", plans.append)
    return plans


@pytest.fixture
def separately(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a Python program with words in a process of its own, in the test's folder."""

    def run(program: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)

    return run


@pytest.fixture
def without_torch(
    separately: Callable[..., subprocess.CompletedProcess[str]]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs the command line in a process that fails when it has imported torch or its like."""
    return partial(separately, WITHOUT_TORCH)
