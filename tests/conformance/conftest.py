"""What conformance tests share: every architecture's case, made once per session whatever the number of workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock

from halo_core.testing.conformance import Suite


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all workers of this session share."""
    own = tmp_path_factory.getbasetemp()
    # A worker's folder lies inside the session's.
    return own.parent if own.name.startswith("popen-") else own


@pytest.fixture(scope="session")
def suite(session_folder: Path) -> Suite:
    """Return all cells and cases of the built-in families; the first worker to ask runs the reference process."""
    with FileLock(session_folder / "conformance.lock"):
        return Suite.of(None, session_folder / "conformance")
