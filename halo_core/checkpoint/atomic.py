"""Folders that are either complete or not there: written aside, checked, made durable, then renamed.

Not for what is inside a checkpoint. No torch here: finding and refusing checkpoints comes before it is imported.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

MARKER = "complete.json"
"""Written last: the size and checksum of every other file. A folder without it is not a checkpoint."""
PARTIAL = ".partial"
REPLACED = ".replaced"
SET_ASIDE = ".set-aside"
_NAME = re.compile(r"checkpoint-(\d+)")
_MARGIN = 1 << 20
"""Bytes of free space asked for beyond the files themselves, for folders and journals."""

Chunk: TypeAlias = bytes | memoryview


class SaveFailed(Exception):
    """A checkpoint could not be written; what was there before is untouched."""

    def __init__(self, *, what: str, remedy: str) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy


class Writer:
    """Writes files into a folder that is not published yet; each file is durable when `file` returns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: dict[str, dict[str, int]] = {}

    def file(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Write one file from its pieces, which are produced while it is written."""
        size, checksum = 0, 0
        with (self.folder / name).open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
                size += len(chunk)
                checksum = zlib.crc32(chunk, checksum)
            file.flush()
            os.fsync(file.fileno())
        self.written[name] = {"bytes": size, "crc32": checksum}


@contextmanager
def publishing(folder: Path, *, needed: int) -> Iterator[Writer]:
    """Yield a writer; at the end `folder` exists with every file written, or is as it was before.

    needed: bytes about to be written, checked against the free space first.

    Raises:
        SaveFailed: too little space, or the file system refused.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        require_space(folder.parent, needed)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        writer = Writer(partial)
        yield writer
        marker = json.dumps({"files": writer.written}, indent=2).encode()
        writer.file(MARKER, [marker])
        _sync_folder(partial)
        _rename_over(partial, folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(folder.parent).free if folder.parent.is_dir() else 0
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SaveFailed(**_no_space(folder.parent, needed, free)) from error
        raise SaveFailed(what=f"{folder} could not be written: {error}",
                         remedy="check that the folder can be written to, then resume") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def require_space(folder: Path, needed: int) -> None:
    """Check the free space of `folder` for `needed` bytes.

    Raises:
        SaveFailed: there is less.
    """
    free = shutil.disk_usage(folder).free
    if free < needed + _MARGIN:
        raise SaveFailed(**_no_space(folder, needed, free))


def faults(folder: Path, *, contents: bool) -> list[str]:
    """Return why `folder` is not a complete checkpoint; empty when it is.

    contents: read every file and compare checksums, not sizes alone.
    """
    if not folder.is_dir():
        return ["it is not a folder" if folder.exists() else "it does not exist"]
    try:
        files = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return [f"{MARKER} is missing: it was never finished, or it is not a checkpoint of this project"]
    except (ValueError, KeyError, TypeError):
        return [f"{MARKER} cannot be read"]
    found = []
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != expected["bytes"]:
            found.append(f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}")
        elif contents and _checksum(path) != expected["crc32"]:
            found.append(f"{name} is damaged: its checksum is another one")
    return found


def step_of(path: Path) -> int | None:
    """Return the step of a folder named like a checkpoint, or None."""
    named = _NAME.fullmatch(path.name)
    return int(named.group(1)) if named and path.is_dir() else None


def named(output_dir: Path) -> list[Path]:
    """Return the folders in `output_dir` named like a checkpoint, complete or not, oldest step first."""
    if not output_dir.is_dir():
        return []
    found = {path: step_of(path) for path in output_dir.iterdir()}
    return sorted((path for path, step in found.items() if step is not None), key=lambda path: found[path] or 0)


def checkpoints(output_dir: Path) -> list[Path]:
    """Return the complete checkpoints in `output_dir` by their sizes, oldest step first."""
    return [path for path in named(output_dir) if not faults(path, contents=False)]


def clean(output_dir: Path) -> None:
    """Remove what a killed save left behind in `output_dir`; a checkpoint caught between two renames is put back."""
    for path in output_dir.glob(f"checkpoint-*{REPLACED}"):
        original = path.with_name(path.name.removesuffix(REPLACED))
        if original.exists():
            shutil.rmtree(path)
        else:
            path.rename(original)
    for path in output_dir.glob(f"checkpoint-*{PARTIAL}"):
        shutil.rmtree(path)


def set_aside(output_dir: Path, *, after: int) -> list[Path]:
    """Rename the checkpoints of steps after `after`, which a resumed run makes again, and return their new names.

    They are neither deleted nor rotated, and no longer taken for the newest.
    """
    moved = []
    for path in named(output_dir):
        step = step_of(path)
        if step is not None and step > after:
            target = path.with_name(path.name + SET_ASIDE)
            shutil.rmtree(target, ignore_errors=True)
            moved.append(path.rename(target))
    return moved


def _rename_over(partial: Path, folder: Path) -> None:
    replaced = folder.with_name(folder.name + REPLACED)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    partial.rename(folder)
    _sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            value = zlib.crc32(chunk, value)
    return value


def _no_space(folder: Path, needed: int, free: int) -> dict[str, str]:
    return {
        "what": f"a checkpoint needs {needed + _MARGIN} bytes and {folder} has {free} bytes free",
        "remedy": "free some space, or lower save_total_limit, or move the run to another output_dir, then resume",
    }
