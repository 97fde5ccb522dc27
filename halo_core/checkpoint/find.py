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
FORMAT = 3
"""Of a checkpoint's files: raised when their meaning changes. An earlier one is refused by its number."""
STATE = "state.json"
WEIGHTS, OPTIMIZER, RANDOM = "weights.safetensors", "optimizer.safetensors", "random.safetensors"
"""The files of a run of one process; of several, each has its own: see `file_of`."""
SPARED = (OPTIMIZER, RANDOM)
"""What a run may go on without where allow_warm_restart: true says so. Never weights."""
WARM = "set allow_warm_restart: true to go on with the weights and new moments"
"""The way out where only the optimizer's state does not fit."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint and the values of its state.json.

    world: the number of processes that wrote it. random: per process, the plain values of its random generators.
    files: the names of its sound files. elsewhere: of those that other machines keep in folders of their own.
    skipped: which newer checkpoints are unusable, and why. lacking: what is wrong with files that are gone without.
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
    lacking: tuple[str, ...] = ()

    def parts(self, name: str) -> list[Path]:
        """Return the files here that hold parts of `name` (`weights.safetensors`): one per process that wrote some."""
        return parts_of(name, self.path, self.files)


def parts_of(name: str, folder: Path, files: Iterable[str]) -> list[Path]:
    """Return which of `files` in `folder` hold parts of `name` (`weights.safetensors`)."""
    return [folder / file for file in sorted(files) if _is_part(file, name)]


def file_of(name: str, rank: int, world: int) -> str:
    """Return the file of one of `world` processes."""
    stem, _, suffix = name.partition(".")
    return name if world == 1 else f"{stem}-rank-{rank}-of-{world}.{suffix}"


Faults: TypeAlias = Callable[[Path], dict[str, str]]
"""Says what is wrong with a checkpoint's folder: file -> fault, as `atomic.faults_by_file`."""


def with_contents(path: Path) -> dict[str, str]:
    """Return what is wrong with a checkpoint, every byte read."""
    return atomic.faults_by_file(path, contents=True)


def by_sizes(path: Path) -> dict[str, str]:
    """Return what is wrong with a checkpoint as far as its files' names and sizes tell."""
    return atomic.faults_by_file(path, contents=False)


def grave(faults: Mapping[str, str], *, warm: bool) -> list[str]:
    """Return the faults that forbid a resume. warm: whether it may go on without the optimizer's state."""
    return [text for file, text in faults.items() if not (warm and _is_spared(file))]


def find(
    asked: bool | str | Path | None, output_dir: Path, *, faults_of: Faults = with_contents, warm: bool = False
) -> Checkpoint | None:
    """Return the checkpoint that `resume_from_checkpoint` means, or None when it is not set.

    `true`: the newest complete one in `output_dir`. A path: that checkpoint, or the newest complete one in that
    folder. faults_of: how a folder is judged; `by_sizes` where another reads the contents later. warm: files of
    optimizer and random state may be missing or damaged, where no checkpoint is complete or the one is named.

    Raises:
        Refused: there is none, or the named one is incomplete, damaged or of another format.
    """
    if asked is None or asked is False or asked == "":
        return None
    path = candidates(asked, output_dir)
    if isinstance(path, Path):
        found = faults_of(path)
        if grave(found, warm=warm):
            raise Refused(unusable(asked, path, found))
        return read(path, asked, (), lacking=found)
    skipped: dict[Path, dict[str, str]] = {}
    for one in path:
        found = faults_of(one)
        if not found:
            return read(one, asked, tuple(passed_over(other, faults.values()) for other, faults in skipped.items()))
        skipped[one] = found
    told = [passed_over(other, faults.values()) for other, faults in skipped.items()]
    for place, (one, found) in enumerate(skipped.items()):
        if not grave(found, warm=warm):
            return read(one, asked, tuple(told[:place]), lacking=found)
    raise Refused(none_found(asked, output_dir, told))


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


def unusable(asked: object, path: Path, faults: Mapping[str, str]) -> list[Problem]:
    """Return the problems of a named checkpoint, each with the way out."""
    remedy = other_checkpoints(path)
    if faults and not grave(faults, warm=True):
        remedy += f", or {WARM}"
    return [Problem(key=KEY, value=asked, why=fault, remedy=remedy) for fault in faults.values()]


def passed_over(path: Path, faults: Iterable[str]) -> str:
    """Return the sentence about a checkpoint that is not used."""
    return f"{path.name} is passed over: {'; '.join(faults)}"


def none_found(asked: object, output_dir: Path, skipped: list[str]) -> Problem:
    """Return the problem that no checkpoint can be used."""
    folder = output_dir if asked is True else asked
    seen = f" ({'; '.join(skipped)})" if skipped else ""
    return Problem(key=KEY, value=asked, why=f"no complete checkpoint-<step> folder lies in {folder}{seen}",
                   remedy=f"leave {KEY} out to start anew in another output_dir, or give a checkpoint's path")


def read(
    path: Path, asked: object, skipped: tuple[str, ...], *, lacking: Mapping[str, str] | None = None
) -> Checkpoint:
    """Return a complete checkpoint. lacking: its files that are gone without, and why.

    Raises:
        Refused: its state.json cannot be read, or is of another format.
    """
    if (path / PARTS_MANIFEST).is_file():
        raise Refused(Problem(key=KEY, value=asked, why=f"{path} holds the parts of a finished model, no resume point",
                              remedy="give a checkpoint-<step> folder"))
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        marker = json.loads((path / atomic.MARKER).read_text(encoding="utf-8"))
        if state.get("format") == FORMAT:
            return _checkpoint(path, state, marker, skipped, lacking or {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else error
        raise Refused(Problem(key=KEY, value=asked, why=f"{path / STATE} cannot be read: {said}",
                              remedy="give a checkpoint written by halo train")) from error
    raise Refused(Problem(key=KEY, value=asked,
                          why=f"{path} has format {state.get('format')}, and this version reads format {FORMAT}",
                          remedy="resume with the version that wrote it; halo/environment.json names it"))


def _checkpoint(
    path: Path,
    state: Mapping[str, Any],
    marker: Mapping[str, Any],
    skipped: tuple[str, ...],
    lacking: Mapping[str, str],
) -> Checkpoint:
    other = tuple(marker.get(atomic.ELSEWHERE, ()))
    brought = tuple(name for name in other if (path / name).is_file())
    return Checkpoint(path=path, step=state["step"], world=state["world"], progress=state["progress"],
                      optimizer=state["optimizer"], random=state["random"], identity=Identity(**state["identity"]),
                      files=tuple(name for name in (*marker["files"], *brought) if name not in lacking),
                      elsewhere=tuple(name for name in other if name not in brought), skipped=skipped,
                      lacking=tuple(lacking.values()))


def other_checkpoints(path: Path) -> str:
    """Return the way out where a named checkpoint cannot be used."""
    others = [str(other) for other in atomic.checkpoints(path.parent) if other != path]
    return f"use {others[-1]}" if others else "give the path of a complete checkpoint-<step> folder"


def _is_part(file: str, name: str) -> bool:
    stem, _, suffix = name.partition(".")
    return re.fullmatch(rf"{stem}(-rank-\d+-of-\d+)?\.{suffix}", file) is not None


def _is_spared(file: str) -> bool:
    return any(_is_part(file, name) for name in SPARED)
