"""The pages made from code equal what the code says now; `make docs` rewrites them."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from halo_core.config import describe

ROOT = Path(__file__).resolve().parents[2]


def test_configuration_page_equals_the_keys() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == describe.markdown(), "run `make docs`"


def test_support_matrix_page_equals_the_command() -> None:
    entries = importlib.metadata.distribution("halo-moe").entry_points
    built_in = ",".join(entry.name for entry in entries if entry.group == "halo")
    command = [sys.executable, "-c", "from halo_core.cli.main import main; main()", "matrix", "--markdown"]
    said = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "HALO_PLUGINS": built_in}
    )
    assert (ROOT / "docs" / "support-matrix.md").read_text(encoding="utf-8") == said.stdout, "run `make docs`"
