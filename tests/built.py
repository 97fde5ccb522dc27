"""Switches mechanisms on for a test, whether or not this version says that it has them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halo_core import plan, support


def as_built(monkeypatch: pytest.MonkeyPatch, *features: str) -> None:
    """Let plans take these features as built."""

    def switched(mechanisms: tuple[support.Mechanism, ...]) -> tuple[support.Mechanism, ...]:
        return tuple(replace(m, built=True) if m.feature in features else m for m in mechanisms)

    monkeypatch.setattr(support, "MECHANISMS", switched(support.MECHANISMS))
    monkeypatch.setattr(plan, "RUN_MECHANISMS", switched(plan.RUN_MECHANISMS))
