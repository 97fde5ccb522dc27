"""Which checkpoint a run goes on from, and whether it may: before torch is imported and before weights are read.

Not for reading tensors: see `resume.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from halo_core.checkpoint import atomic
from halo_core.checkpoint.identity import Identity, differences
from halo_core.errors import Problem, Refused
from halo_core.model_config import PARTS_MANIFEST

KEY = "resume_from_checkpoint"
FORMAT = 2
"""Of state.json: raised when a field's meaning changes."""
READ = (1, 2)
"""Formats that are read. The first, of one process, has the values of that one's random generators alone."""
STATE = "state.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint and the values of its state.json.

    world: the number of processes that wrote it. random: per process, the plain values of its random generators.
    files: the names of its files. elsewhere: of those that other machines keep in folders of their own.
    skipped: which newer checkpoints are unusable, and why.
    """

    path: Path
    step: int
    world: int
    progress: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    random: Sequence[Mapping[str, Any]]
    identity: Identity
    files: tuple[str, ...]
    elsewhere: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    def parts(self, name: str) -> list[Path]:
        """Return the files here that hold parts of `name` (`weights.safetensors`): one per process that wrote some."""
        return parts_of(name, self.path, self.files)


def parts_of(name: str, folder: Path, files: Iterable[str]) -> list[Path]:
    """Return which of `files` in `folder` hold parts of `name` (`weights.safetensors`)."""
    stem, _, suffix = name.partition(".")
    pattern = re.compile(rf"{stem}(-rank-\d+-of-\d+)?\.{suffix}")
    return [folder / file for file in sorted(files) if pattern.fullmatch(file)]


Faults: TypeAlias = Callable[[Path], list[str]]
"""Says what is wrong with a checkpoint's folder."""


def with_contents(path: Path) -> list[str]:
    """Return what is wrong with a checkpoint, every byte read."""
    return atomic.faults(path, contents=True)


def by_sizes(path: Path) -> list[str]:
    """Return what is wrong with a checkpoint as far as its files' names and sizes tell."""
    return atomic.faults(path, contents=False)


def find(
    asked: bool | str | Path | None, output_dir: Path, *, faults_of: Faults = with_contents
) -> Checkpoint | None:
    """Return the checkpoint that `resume_from_checkpoint` means, or None when it is not set.

    `true`: the newest complete one in `output_dir`. A path: that checkpoint, or the newest complete one in that
    folder. faults_of: how a folder is judged; `by_sizes` where another reads the contents later.

    Raises:
        Refused: there is none, or the named one is incomplete, damaged or of another format.
    """
    if asked is None or asked is False or asked == "":
        return None
    path = candidates(asked, output_dir)
    if isinstance(path, Path):
        found = faults_of(path)
        if found:
            raise Refused([Problem(key=KEY, value=asked, why=fault, remedy=other_checkpoints(path))
                           for fault in found])
        return read(path, asked, ())
    skipped: list[str] = []
    for one in path:
        found = faults_of(one)
        if not found:
            return read(one, asked, tuple(skipped))
        skipped.append(passed_over(one, found))
    raise Refused(none_found(asked, output_dir, skipped))


def candidates(asked: Literal[True] | str | Path, output_dir: Path) -> Path | list[Path]:
    """Return the one checkpoint that is named, or the folders to choose from, newest first; complete or not."""
    if asked is True:
        return atomic.named(output_dir)[::-1]
    path = Path(asked).expanduser()
    if atomic.step_of(path) is None and not (path / atomic.MARKER).exists() and atomic.checkpoints(path):
        return atomic.named(path)[::-1]
    return path


def check(checkpoint: Checkpoint, now: Identity) -> tuple[str, ...]:
    """Return what a person should know about the differences between the checkpoint's run and this one.

    Raises:
        Refused: a difference would make it another run; every such key is named with both values.
    """
    problems, notes = differences(checkpoint.identity, now)
    if problems:
        raise Refused(problems)
    return tuple(notes)


def passed_over(path: Path, faults: list[str]) -> str:
    """Return the sentence about a checkpoint that is not used."""
    return f"{path.name} is passed over: {'; '.join(faults)}"


def none_found(asked: object, output_dir: Path, skipped: list[str]) -> Problem:
    """Return the problem that no checkpoint can be used."""
    folder = output_dir if asked is True else asked
    seen = f" ({'; '.join(skipped)})" if skipped else ""
    return Problem(key=KEY, value=asked, why=f"no complete checkpoint-<step> folder lies in {folder}{seen}",
                   remedy=f"leave {KEY} out to start anew in another output_dir, or give a checkpoint's path")


def read(path: Path, asked: object, skipped: tuple[str, ...]) -> Checkpoint:
    """Return a complete checkpoint.

    Raises:
        Refused: its state.json cannot be read, or is of another format.
    """
    if (path / PARTS_MANIFEST).is_file():
        raise Refused(Problem(key=KEY, value=asked, why=f"{path} holds the parts of a finished model, no resume point",
                              remedy="give a checkpoint-<step> folder"))
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        marker = json.loads((path / atomic.MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(Problem(key=KEY, value=asked, why=f"{path / STATE} cannot be read: {error}",
                              remedy="give a checkpoint written by halo train")) from error
    if state.get("format") not in READ:
        known = " and ".join(map(str, READ))
        raise Refused(Problem(key=KEY, value=asked,
                              why=f"{path} has format {state.get('format')}, and this version reads format {known}",
                              remedy="resume with the version that wrote it; halo/environment.json names it"))
    random = state["random"]
    other = tuple(marker.get(atomic.ELSEWHERE, ()))
    brought = tuple(name for name in other if (path / name).is_file())
    return Checkpoint(path=path, step=state["step"], world=state.get("world", 1), progress=state["progress"],
                      optimizer=state["optimizer"], random=[random] if isinstance(random, dict) else random,
                      identity=Identity(**state["identity"]), files=(*marker["files"], *brought),
                      elsewhere=tuple(name for name in other if name not in brought), skipped=skipped)


def other_checkpoints(path: Path) -> str:
    """Return the way out where a named checkpoint cannot be used."""
    others = [str(other) for other in atomic.checkpoints(path.parent) if other != path]
    return f"use {others[-1]}" if others else "give the path of a complete checkpoint-<step> folder"
