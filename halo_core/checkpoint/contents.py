"""What a checkpoint holds and whether it is whole, told from its names, sizes, heads and checksums. No torch here.

Not for reading tensors (`resume.py`) nor for choosing a checkpoint (`find.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from halo_core.checkpoint import atomic, find, parts_note
from halo_core.checkpoint.find import OPTIMIZER, RANDOM, WEIGHTS, Checkpoint
from halo_core.errors import Refused
from halo_core.models.safetensors_files import read_file


@dataclass(frozen=True, kw_only=True)
class Held:
    """Tensors of several files: how many, their bytes, and the number of files."""

    tensors: int
    num_bytes: int
    files: int


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A checkpoint as far as it can be told without its run. written: local time of its last file.

    checkpoint: None where its state.json does not tell. faults: why it is not whole. is_read: whether every byte was
    compared with its checksum. foreign: files that are no part of it.
    """

    path: Path
    written: datetime | None
    checkpoint: Checkpoint | None
    held: Mapping[str, Held]
    faults: Mapping[str, str]
    is_read: bool
    foreign: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return everything in values that JSON knows."""
        known: dict[str, Any] = {}
        if self.checkpoint is not None:
            one = self.checkpoint
            known = {
                "step": one.step, "world": one.world, **one.progress,
                "optimizer": {"class": one.optimizer["class"], "parameters": len(one.optimizer["parameters"])},
                "plan": dict(one.identity.plan), "data": dict(one.identity.data),
                "environment": dict(one.identity.environment), "config": dict(one.identity.config),
                "elsewhere": list(one.elsewhere),
            }  # fmt: skip
        return {
            "path": str(self.path), "written": self.written and self.written.isoformat(timespec="seconds"), **known,
            "held": {name: vars(held) for name, held in self.held.items()}, "is_sound": not self.faults,
            "is_every_byte_read": self.is_read, "faults": list(self.faults.values()), "foreign": list(self.foreign),
        }  # fmt: skip


def contents(path: Path, *, every_byte: bool) -> Contents:
    """Return what the checkpoint at `path` holds. every_byte: compare checksums, not names and sizes alone.

    Raises:
        Refused: it is no checkpoint of this version.
    """
    faults = atomic.faults_by_file(path, contents=every_byte)
    if not (path / atomic.MARKER).is_file():
        raise Refused(find.unusable(str(path), path, faults))
    checkpoint = None
    if not {atomic.MARKER, find.STATE} & faults.keys():
        checkpoint = find.read(path, str(path), (), lacking=faults)
    own = [*checkpoint.files, *checkpoint.elsewhere, *faults] if checkpoint is not None else []
    held: dict[str, Held] = {}
    torn: dict[str, str] = {}
    for name in (WEIGHTS, OPTIMIZER, RANDOM):
        files = [] if checkpoint is None else checkpoint.parts(name)
        held[name.partition(".")[0]], lost, unread = _held(files)
        torn |= unread
        if checkpoint is not None and not checkpoint.elsewhere and not faults:
            torn |= {tensor: f"parts of {tensor} are in none of its files" for tensor in lost}
    return Contents(
        path=path,
        written=datetime.fromtimestamp((path / atomic.MARKER).stat().st_mtime).astimezone(),
        checkpoint=checkpoint,
        held=held,
        faults={**faults, **torn},
        is_read=every_byte,
        foreign=tuple(sorted(entry.name for entry in path.iterdir()
                             if own and entry.name not in {*own, atomic.MARKER})),
    )


def newest(path: Path) -> Path:
    """Return `path`, or the newest checkpoint in it where it is a run's folder: complete by its sizes if any is."""
    chosen = find.candidates(str(path), path)
    if isinstance(chosen, Path):
        inner = atomic.named(path) if path.is_dir() and atomic.step_of(path) is None else []
        return chosen if (path / atomic.MARKER).is_file() or not inner else inner[-1]
    return atomic.checkpoints(path)[-1]


def _held(files: Sequence[Path]) -> tuple[Held, list[str], dict[str, str]]:
    """Return what these files hold, the tensors that they hold in part, and the files whose heads are damaged."""
    unread: dict[str, str] = {}
    wholes: dict[str, int] = {}
    found: dict[str, int] = {}
    num_bytes = 0
    for path in files:
        try:
            file = read_file(path)
        except Refused as refused:
            unread[path.name] = f"{path.name}: {refused.problems[0].why}"
            continue
        parts = parts_note.read(file.head)
        for tensor in file.tensors:
            shape = parts[tensor.key][1] if tensor.key in parts else tensor.shape
            wholes[tensor.key] = math.prod(tensor.shape if shape is None else shape)
            found[tensor.key] = found.get(tensor.key, 0) + math.prod(tensor.shape)
            num_bytes += tensor.num_bytes
    lost = [name for name, size in wholes.items() if found[name] < size]
    return Held(tensors=len(wholes), num_bytes=num_bytes, files=len(files)), lost, unread
