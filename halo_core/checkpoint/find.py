"""Which checkpoint a run goes on from, and whether it may: before torch is imported and before weights are read.

Not for reading tensors: see `resume.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halo_core.checkpoint import atomic
from halo_core.checkpoint.identity import Identity, differences
from halo_core.errors import Problem, Refused

KEY = "resume_from_checkpoint"
FORMAT = 1
"""Of state.json: raised when a field's meaning changes."""
STATE = "state.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint and the values of its state.json. `skipped` says which newer ones are unusable, and why."""

    path: Path
    step: int
    progress: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    random: Mapping[str, Any]
    identity: Identity
    skipped: tuple[str, ...] = ()


def find(asked: bool | str | Path | None, output_dir: Path) -> Checkpoint | None:
    """Return the checkpoint that `resume_from_checkpoint` means, or None when it is not set.

    `true`: the newest complete one in `output_dir`. A path: that checkpoint, or the newest complete one in that
    folder. Contents are compared with their checksums.

    Raises:
        Refused: there is none, or the named one is incomplete, damaged or of another format.
    """
    if asked is None or asked is False or asked == "":
        return None
    if asked is True:
        return _newest(output_dir, True)
    path = Path(asked).expanduser()
    if atomic.step_of(path) is None and not (path / atomic.MARKER).exists() and atomic.checkpoints(path):
        return _newest(path, asked)
    found = atomic.faults(path, contents=True)
    if found:
        raise Refused([Problem(key=KEY, value=asked, why=fault, remedy=_other_checkpoints(path)) for fault in found])
    return _read(path, asked, ())


def check(checkpoint: Checkpoint, now: Identity) -> tuple[str, ...]:
    """Return what a person should know about the differences between the checkpoint's run and this one.

    Raises:
        Refused: a difference would make it another run; every such key is named with both values.
    """
    problems, notes = differences(checkpoint.identity, now)
    if problems:
        raise Refused(problems)
    return tuple(notes)


def _newest(folder: Path, asked: object) -> Checkpoint:
    skipped: list[str] = []
    for path in reversed(atomic.named(folder)):
        found = atomic.faults(path, contents=True)
        if not found:
            return _read(path, asked, tuple(skipped))
        skipped.append(f"{path.name} is passed over: {'; '.join(found)}")
    seen = f" ({'; '.join(skipped)})" if skipped else ""
    raise Refused(Problem(key=KEY, value=asked, why=f"no complete checkpoint-<step> folder lies in {folder}{seen}",
                          remedy=f"leave {KEY} out to start anew in another output_dir, or give a checkpoint's path"))


def _read(path: Path, asked: object, skipped: tuple[str, ...]) -> Checkpoint:
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(Problem(key=KEY, value=asked, why=f"{path / STATE} cannot be read: {error}",
                              remedy="give a checkpoint written by halo train")) from error
    if state.get("format") != FORMAT:
        raise Refused(Problem(key=KEY, value=asked,
                              why=f"{path} has format {state.get('format')}, and this version reads format {FORMAT}",
                              remedy="resume with the version that wrote it; halo/environment.json names it"))
    return Checkpoint(path=path, step=state["step"], progress=state["progress"], optimizer=state["optimizer"],
                      random=state["random"], identity=Identity(**state["identity"]), skipped=skipped)


def _other_checkpoints(path: Path) -> str:
    others = [str(other) for other in atomic.checkpoints(path.parent) if other != path]
    return f"use {others[-1]}" if others else "give the path of a complete checkpoint-<step> folder"
