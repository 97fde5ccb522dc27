"""The best checkpoint so far, and when another one is better.

Not for measuring: an evaluation does that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halo_core.checkpoint import atomic


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best saved step: the value of its metric and where its checkpoint lies."""

    step: int
    value: float
    checkpoint: Path


def is_better(value: float, best: Best | None, greater_is_better: bool) -> bool:
    """Return whether `value` beats the best so far; an equal value does not."""
    return best is None or (value > best.value if greater_is_better else value < best.value)


def recorded(best: Best | None) -> dict[str, Any] | None:
    """Return the best as values for a checkpoint; its folder is found again by its step."""
    return None if best is None else {"step": best.step, "value": best.value}


def recalled(record: Mapping[str, Any] | None, folders: tuple[Path, ...]) -> Best | None:
    """Return a recorded best whose checkpoint still lies complete in one of `folders`, otherwise None."""
    if record is None:
        return None
    for folder in folders:
        path = folder / f"checkpoint-{record['step']}"
        if not atomic.faults(path, contents=False):
            return Best(step=record["step"], value=record["value"], checkpoint=path)
    return None
