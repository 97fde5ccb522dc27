"""Halo's conformance kit on Mosaic: each Supported cell is shown to work, each Unsupported one to refuse."""

from __future__ import annotations

from pathlib import Path

from halo_core.testing.conformance import prove_family


def test_mosaic_keeps_its_word(tmp_path: Path) -> None:
    prove_family("mosaic", tmp_path)
