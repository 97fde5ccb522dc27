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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

MARKER = "complete.json"
"""Written last: the size and checksum of every other file. A folder without it is not a checkpoint."""
ELSEWHERE = "elsewhere"
"""In the marker: the files of processes that write to a folder of this name on other machines."""
PUBLISHED = ("checkpoint-*", "ep-shards")
"""Names of the folders that are written this way."""
PARTIAL = ".partial"
REPLACED = ".replaced"
SET_ASIDE = ".set-aside"
_NAME = re.compile(r"checkpoint-(\d+)")
_MARGIN = 1 << 20
"""Bytes of free space asked for beyond the files themselves, for folders and journals."""

Chunk: TypeAlias = bytes | memoryview
Files: TypeAlias = dict[str, dict[str, int]]
T = TypeVar("T")


class SaveFailed(Exception):
    """A checkpoint could not be written; what was there before is untouched."""

    def __init__(self, *, what: str, remedy: str) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy


class Writers(Protocol):
    """The processes that write one folder together."""

    @property
    def leads(self) -> bool:
        """Return whether this process makes the folder, finishes it and moves it into place."""

    def agreed(self, act: Callable[[], T]) -> tuple[list[T], list[T]]:
        """Run `act` on every process; return its results of those that share the folder, and of all others.

        What it raises on one process is raised on all.
        """


class Alone:
    """One process that asks nobody."""

    leads = True

    def agreed(self, act: Callable[[], T]) -> tuple[list[T], list[T]]:
        """Return what `act` gives."""
        return [act()], []


class Writer:
    """Writes files into a folder that is not published yet; each file is durable when `file` returns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: Files = {}

    def file(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Write one file from its pieces, which are produced while it is written. name: may lie in a sub-folder."""
        size, checksum = 0, 0
        if "/" in name:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (self.folder / name).open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
                size += len(chunk)
                checksum = zlib.crc32(chunk, checksum)
            file.flush()
            os.fsync(file.fileno())
        self.written[name] = {"bytes": size, "crc32": checksum}


@contextmanager
def publishing(folder: Path, *, needed: int, writers: Writers | None = None) -> Iterator[Writer]:
    """Yield a writer; at the end `folder` exists with every file written, or is as it was before.

    needed: bytes that this process is about to write, checked against the free space first.
    writers: the processes that run this block together; each writes files of its own names, and none communicates
    inside. Without them this process is alone.

    Raises:
        SaveFailed: too little space, or the file system refused, on any process.
    """
    among: Writers = writers or Alone()
    partial = folder.with_name(folder.name + PARTIAL)
    sizes, _ = among.agreed(lambda: needed)

    def told(act: Callable[[], T]) -> T:
        return _told(act, folder, sum(sizes))

    def begin() -> None:
        if among.leads:
            folder.parent.mkdir(parents=True, exist_ok=True)
            require_space(folder.parent, sum(sizes))
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()

    def finish() -> None:
        if among.leads:
            writer.file(MARKER, [_marker(here, elsewhere)])
            for path in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
                _sync_folder(path)
            _rename_over(partial, folder)

    try:
        among.agreed(lambda: told(begin))
        writer = Writer(partial)
        failure: Exception | None = None
        try:
            yield writer
        except Exception as error:  # the others wait to hear of it
            failure = error
        here, elsewhere = among.agreed(lambda: told(lambda: _written(writer, failure)))
        among.agreed(lambda: told(finish))
    except BaseException:
        if among.leads:
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
    return list(faults_by_file(folder, contents=contents).values())


def faults_by_file(folder: Path, *, contents: bool, share: tuple[int, int] = (0, 1)) -> dict[str, str]:
    """Return file -> what is wrong with it; under `MARKER` what is wrong with the folder as a whole.

    share: (which, of how many) equal shares of the files are read; their sizes are looked at all the same.
    """
    if not folder.is_dir():
        return {MARKER: "it is not a folder" if folder.exists() else "it does not exist"}
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        # Other machines' files count once a person has brought them here.
        brought = {name: entry for name, entry in marker.get(ELSEWHERE, {}).items() if (folder / name).is_file()}
        files = {**marker["files"], **brought}
        by_size = sorted(files, key=lambda name: (files[name]["bytes"], name))
    except FileNotFoundError:
        return {MARKER: f"{MARKER} is missing: it was never finished, or it is not a checkpoint of this project"}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {MARKER: f"{MARKER} cannot be read"}
    which, many = share
    read = set(by_size[which::many]) if contents else set()
    found = {}
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            found[name] = f"{name} is missing"
        elif path.stat().st_size != expected["bytes"]:
            found[name] = f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
        elif name in read and _checksum(path) != expected["crc32"]:
            found[name] = f"{name} is damaged: its checksum is another one"
    return found


def elsewhere(folder: Path) -> tuple[str, ...]:
    """Return the files that other machines wrote to folders of their own; none where the marker cannot be read."""
    try:
        return tuple(json.loads((folder / MARKER).read_text(encoding="utf-8")).get(ELSEWHERE, ()))
    except (OSError, ValueError, AttributeError):
        return ()


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
    """Remove what a killed save left behind in `output_dir`; a folder caught between two renames is put back."""
    for path in _left_behind(output_dir, REPLACED):
        original = path.with_name(path.name.removesuffix(REPLACED))
        if original.exists():
            shutil.rmtree(path)
        else:
            path.rename(original)
    for path in _left_behind(output_dir, PARTIAL):
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


def _told(act: Callable[[], T], folder: Path, needed: int) -> T:
    """Return what `act` gives; what the file system refuses becomes a SaveFailed about `folder`."""
    try:
        return act()
    except OSError as error:
        free = shutil.disk_usage(folder.parent).free if folder.parent.is_dir() else 0
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SaveFailed(**_no_space(folder.parent, needed, free)) from error
        raise SaveFailed(what=f"{folder} could not be written: {error}",
                         remedy="check that the folder can be written to, then resume") from error


def _written(writer: Writer, failure: Exception | None) -> Files:
    if failure is not None:
        raise failure
    return writer.written


def _marker(here: Iterable[Files], elsewhere: Iterable[Files]) -> bytes:
    """Return the marker's text. The same name in both is one file that several folders hold, such as a manifest."""
    own = {name: entry for files in here for name, entry in files.items()}
    other = {name: entry for files in elsewhere for name, entry in files.items() if name not in own}
    text: dict[str, Mapping[str, Any]] = {"files": own, ELSEWHERE: other} if other else {"files": own}
    return json.dumps(text, indent=2).encode()


def _left_behind(output_dir: Path, suffix: str) -> list[Path]:
    return [path for name in PUBLISHED for path in output_dir.glob(f"{name}{suffix}")]


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
