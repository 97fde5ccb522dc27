"""Tokenised rows as files: four arrays that are mapped into memory, and beside them sizes, checksums and the account.

Not for what the rows were made from (`prepared.py`, `cache.py`). Plain .npy files: nothing in them is ever executed.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import uuid
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from halo_core.data.account import Dropped, Repeated, SplitAccount
from halo_core.data.rows import Row, Rows
from halo_core.data.weights import Block

FORMAT = 1
"""Raised when the files change their meaning."""
MARKER = "rows.json"
"""Written last into a folder of rows."""
PARTIAL = ".partial-"
"""In the name of a folder that is not finished, followed by what makes the name unique."""

_KINDS: Mapping[str, str] = {"row_ids": "<i8", "ends": "<i8", "input_ids": "<i4", "supervised": "|u1"}
_HEADER = 128
"""Bytes of a .npy header of one dimension, padding included."""
_TOKENS_AT_ONCE = 1 << 16


_OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
"""What renaming a folder onto a folder with content, or onto a file, fails with."""


class Occupied(Exception):
    """Something lies where a folder was to be put."""


class Damaged(Exception):
    """A folder of rows is not as it was written."""


class RowsWriter:
    """Writes rows into files as they come; memory does not grow with them.

    `add` takes single rows, `extend` many; `close` finishes the files and tells their sizes and checksums.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {name: _ArrayFile(folder / f"{name}.npy", kind) for name, kind in _KINDS.items()}
        self._files["ends"].write(np.zeros(1, dtype=np.int64))
        self._end = 0
        self._start_anew()

    def _start_anew(self) -> None:
        self._row_ids, self._ends, self._input_ids, self._supervised = array("q"), array("q"), array("i"), bytearray()

    def add(self, row: Row) -> None:
        """Take one more row."""
        self._row_ids.append(row.row_id)
        self._input_ids.extend(row.input_ids)
        self._supervised.extend(row.supervised)
        self._end += len(row.input_ids)
        self._ends.append(self._end)
        if len(self._input_ids) >= _TOKENS_AT_ONCE:
            self._flush()

    def extend(self, block: Block) -> None:
        """Take several rows at once."""
        self._flush()
        ends = self._end + np.cumsum(block.lengths)
        self._end = int(ends[-1])
        for name, values in (("row_ids", block.row_ids), ("ends", ends), ("input_ids", block.input_ids),
                             ("supervised", block.supervised)):  # fmt: skip
            self._files[name].write(values)

    def close(self) -> dict[str, dict[str, int]]:
        """Make the files durable and return name -> bytes and crc32 of the values."""
        self._flush()
        return {f"{name}.npy": file.close() for name, file in self._files.items()}

    def _flush(self) -> None:
        for name, values in (("row_ids", self._row_ids), ("ends", self._ends), ("input_ids", self._input_ids),
                             ("supervised", self._supervised)):  # fmt: skip
            if len(values):
                self._files[name].write(np.frombuffer(values, dtype=_KINDS[name]))
        self._start_anew()


class _ArrayFile:
    """A .npy file of one dimension whose length is known at the end."""

    def __init__(self, path: Path, kind: str) -> None:
        self._kind = np.dtype(kind)
        self._count = self._checksum = 0
        self._file = path.open("wb")
        self._file.write(bytes(_HEADER))

    def write(self, values: np.ndarray) -> None:
        data = memoryview(np.ascontiguousarray(values, dtype=self._kind)).cast("B")
        self._file.write(data)
        self._checksum = zlib.crc32(data, self._checksum)
        self._count += len(values)

    def close(self) -> dict[str, int]:
        facts = {"descr": self._kind.str, "fortran_order": False, "shape": (self._count,)}
        text = repr(facts).encode("latin1")
        # Source: numpy's format 1.0: magic, version, length of the rest of the header, the facts, padding, a newline.
        begin = b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little") + text
        self._file.seek(0)
        self._file.write(begin.ljust(_HEADER - 1) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": _HEADER + self._count * self._kind.itemsize, "crc32": self._checksum}


def finish(folder: Path, files: Mapping[str, Mapping[str, int]], account: SplitAccount) -> None:
    """Write the marker of a folder whose arrays are closed: from now on it is a folder of rows."""
    told = {"format": FORMAT, "files": files, "account": dataclasses.asdict(account)}
    write_json(folder / MARKER, told)


def write_rows(folder: Path, rows: Rows, account: SplitAccount) -> None:
    """Write rows that lie in memory, and their account, into `folder`."""
    writer = RowsWriter(folder)
    writer.extend(
        Block(row_ids=rows.row_ids, lengths=rows.lengths, input_ids=rows.tokens, supervised=rows.flags)
    )  # fmt: skip
    finish(folder, writer.close(), account)


def mapped(folder: Path) -> Rows:
    """Return the rows of a folder, mapped into memory; nothing is checked."""
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _KINDS}
    return Rows.over(**arrays)


def read_rows(folder: Path) -> tuple[Rows, SplitAccount]:
    """Return the rows of a finished folder, mapped into memory, and their account.

    Raises:
        Damaged: a file is missing, or has another size or checksum than it was written with.
    """
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        if marker["format"] != FORMAT:
            raise Damaged(f"{folder} has format {marker['format']}, and this version reads {FORMAT}")
        account = _account(marker["account"])
        for name in (f"{name}.npy" for name in _KINDS):
            expected = marker["files"][name]
            path = folder / name
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise Damaged(f"{path} has {size} bytes instead of {expected['bytes']}")
            if _checksum(path) != expected["crc32"]:
                raise Damaged(f"{path} is damaged: its checksum is another one")
        return mapped(folder), account
    except FileNotFoundError as fault:
        raise Damaged(f"{fault.filename} is missing") from fault
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise Damaged(f"{folder} cannot be read: {type(fault).__name__}: {fault}") from fault


@contextmanager
def published(folder: Path, *, replaces: bool) -> Iterator[Path]:
    """Yield a folder aside to write into; at the good end it is renamed to `folder`, else it is removed.

    replaces: what lies at `folder` by then is removed; otherwise it stays, unless it is an empty folder.

    Raises:
        Occupied: something lies there that is not to be replaced.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}{PARTIAL}{uuid.uuid4().hex}")
    partial.mkdir()
    try:
        yield partial
        _put(partial, folder, replaces)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a mapping as JSON, durably."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=2, default=str)
        file.flush()
        os.fsync(file.fileno())


def _put(partial: Path, folder: Path, replaces: bool) -> None:
    for _ in range(100):
        try:
            partial.rename(folder)
            return
        except OSError as fault:
            # By the error itself: what was there may be gone again by the time one looks.
            if fault.errno not in _OCCUPIED:
                raise
            if not replaces:
                raise Occupied(f"{folder} is there already") from fault
            # A folder with content cannot be renamed over: out of the way with it. Readers have it mapped already.
            aside = folder.with_name(f"{folder.name}{PARTIAL}{uuid.uuid4().hex}")
            try:
                folder.rename(aside)
            except FileNotFoundError:
                continue  # another process was faster
            shutil.rmtree(aside, ignore_errors=True)
    raise OSError(f"{folder} is put in place by others again and again")


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        file.seek(_HEADER)
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


def _account(plain: Mapping[str, Any]) -> SplitAccount:
    """Return the account that was written as plain values."""
    values = dict(plain)
    values["dropped"] = {reason: Dropped(**dropped) for reason, dropped in values["dropped"].items()}
    values["repeated"] = {reason: Repeated(**repeated) for reason, repeated in values["repeated"].items()}
    values["kinds"] = {kind: (rows, learnt) for kind, (rows, learnt) in values["kinds"].items()}
    assert values["packing"] is None, "packs are made of rows after they are read"
    return SplitAccount(**values)
