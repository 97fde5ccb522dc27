"""The folder of a run: its name, when it may be used, and the records of what ran in it.

Not for checkpoints or the exported model, which lie in the same folder. No torch here: a folder refuses early.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import yaml

from halo_core.checkpoint import agreement, atomic
from halo_core.checkpoint.identity import plain
from halo_core.errors import Problem, Refused
from halo_core.trainer import lock, metrics

RECORDS = "halo"
"""The sub-folder of run.yaml, plan.json, environment.json and account.json."""
LOCK = "lock"
"""The file there that a run keeps locked while it goes on. It stays, and alone is no trace of a run."""
_MODEL_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "ep-shards")
_DISTRIBUTIONS = ("halo-moe", "torch", "transformers", "safetensors", "datasets", "tokenizers", "numpy")


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """An opened folder."""

    path: Path

    @property
    def metrics(self) -> Path:
        """Return where the rows of steps and evaluations go."""
        return self.path / metrics.FILE_NAME

    @property
    def records(self) -> Path:
        """Return where run.yaml, plan.json, environment.json and account.json lie."""
        return self.path / RECORDS


def expand(output_dir: str, now: datetime) -> Path:
    """Return the folder that `output_dir` names: `%Y`-like codes become the date and time, `%%` a percent sign.

    A percent sign before anything but a letter stays as typed.
    """
    return Path(re.sub(r"%([A-Za-z%])", lambda found: now.strftime(found.group(0)), output_dir)).expanduser()


def problems(path: Path, *, resumed_from: Path | None) -> tuple[Problem, ...]:
    """Return what stands in the way of running in `path`.

    resumed_from: the checkpoint that the run goes on from, or None. It may lie in another folder, which is then only
    read; but a folder that holds another run is never continued from elsewhere.
    """
    try:
        exists = path.exists()
    except OSError as fault:  # a name that is too long, or a folder on the way that may not be looked into
        return (_unwritable(path, f"the file system refuses it ({fault.strerror})"),)
    if exists and not path.is_dir():
        return (Problem(key="output_dir", value=path, why="this is a file", remedy="name a folder"),)
    nearest = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not nearest.is_dir():
        return (_unwritable(path, f"{nearest} is a file"),)
    if not os.access(nearest, os.W_OK | os.X_OK):
        return (_unwritable(path, f"{nearest} may not be written to"),)
    held_by = lock.holder(path / RECORDS / LOCK)
    return (_occupied(path, held_by),) if held_by else _conflicts(path, resumed_from)


def _conflicts(path: Path, resumed_from: Path | None) -> tuple[Problem, ...]:
    """Return that `path` holds another run than the one gone on with."""
    found = traces(path)
    if not found or (resumed_from is not None and resumed_from.resolve().parent == path.resolve()):
        return ()
    holds = f"it already holds a run ({', '.join(found)})"
    if resumed_from is not None:
        return (Problem(key="output_dir", value=path, why=f"{holds}, and {resumed_from} belongs to another folder",
                        remedy=f"set output_dir to a new folder, or to {resumed_from.parent}"),)
    way_out = "set resume_from_checkpoint: true to go on with it" if atomic.checkpoints(path) else "delete it"
    return (Problem(key="output_dir", value=path, why=holds, remedy=f"{way_out}, or name a new output_dir"),)


def traces(path: Path) -> list[str]:
    """Return the names in `path` that show a run or a model there."""
    if not path.is_dir():
        return []
    names = [name for name in (metrics.FILE_NAME, *_MODEL_FILES) if (path / name).exists()]
    records = path / RECORDS
    if records.is_dir() and any(entry.name != LOCK for entry in records.iterdir()):
        names.insert(0, RECORDS)
    return names + sorted(entry.name for entry in path.iterdir() if atomic.step_of(entry) is not None)


@contextmanager
def occupied(path: Path, *, resumed_from: Path | None, say: Callable[[str], None]) -> Iterator[None]:
    """Keep other runs out of `path` for the time of a block; a collective. Of processes that share it, one locks it.

    resumed_from: as for `problems`, which is asked again: another run may have used the folder since. say: tells a
    person that the file system has no locks, which is no reason not to run.

    Raises:
        Refused: on every process: another run is going on there, or has been meanwhile, or no folder can be made.
    """
    held: list[IO[str]] = []

    def enter() -> str:
        try:
            (path / RECORDS).mkdir(parents=True, exist_ok=True)
            held.append(lock.take(path / RECORDS / LOCK))
        except lock.Held as other:
            raise Refused(_occupied(path, str(other))) from other
        except lock.Unsupported as fault:
            return f"nothing keeps a second run out of {path}: its file system has no locks ({fault})"
        except OSError as fault:  # what `problems` cannot foresee, such as a file system that takes no folders
            raise Refused(_unwritable(path, f"the folder cannot be made ({fault.strerror})")) from fault
        found = _conflicts(path, resumed_from)
        if found:
            raise Refused(found)
        return ""

    try:
        unlocked = agreement.once_per_folder(path, enter)
        if unlocked:
            say(unlocked)
        yield
    finally:
        for handle in held:
            handle.close()


def open_folder(path: Path, *, config: Mapping[str, Any], plan: Mapping[str, Any],
                environment: Mapping[str, Any], account: Mapping[str, Any] | None = None) -> RunFolder:
    """Make the folder, write its records, and return it. Unfinished saves of a killed run are cleaned away.

    account: that of the data, in plain values; nothing is written without it.

    Raises:
        Refused: the folder cannot be made.
    """
    folder = RunFolder(path=path)
    try:
        folder.records.mkdir(parents=True, exist_ok=True)
    except OSError as fault:  # what `problems` cannot foresee, such as a file system that takes no folders
        raise Refused(_unwritable(path, f"the folder cannot be made ({fault.strerror})")) from fault
    atomic.clean(path)
    _write(folder.records / "run.yaml", yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True))
    _write(folder.records / "plan.json", json.dumps(plain(plan), indent=2) + "\n")
    _write(folder.records / "environment.json", json.dumps(plain(environment), indent=2) + "\n")
    if account is not None:
        _write(folder.records / "account.json", json.dumps(plain(account), indent=2, ensure_ascii=False) + "\n")
    return folder


def environment(*, device: str, plugins: Mapping[str, str]) -> dict[str, Any]:
    """Return what the run runs on: versions, plugins with theirs, the device, and the commit of a checkout, if any."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: _version(name) for name in _DISTRIBUTIONS},
        "plugins": dict(plugins),
        "device": device,
        "commit": _commit(Path(__file__).parent),
    }


def _occupied(path: Path, holder: str) -> Problem:
    return Problem(key="output_dir", value=path, why=f"a run is going on in it ({holder})",
                   remedy="wait for its end or end it, or name a new output_dir")


def _unwritable(path: Path, why: str) -> Problem:
    return Problem(key="output_dir", value=path, why=why, remedy="name a folder where files can be written")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit(checkout: Path) -> str | None:
    try:
        found = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True,
                               check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
