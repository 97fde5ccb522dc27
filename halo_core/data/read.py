"""Reads rows out of one file, folder, hub data set or list, each with the place a person finds it at.

Not for what a row must hold (`examples.py`): a record is whatever stands there, or why it cannot be read.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halo_core.data.examples import RowFault
from halo_core.errors import Problem, Refused

EXTENSIONS = (".jsonl", ".json", ".parquet", ".csv")
"""The kinds of file that are read."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff")
_ROWS_AT_ONCE = 512


@dataclass(frozen=True, kw_only=True)
class Record:
    """One row as it stands: its `values`, or the `fault` that kept it from being read, or neither for a blank line.

    `place` is where a person finds it (`rows.jsonl:7`, `rows.parquet row 7`), `file` the file or set it belongs to.
    """

    place: str
    file: str
    values: Mapping[str, Any] | None = None
    fault: RowFault | None = None

    @property
    def is_blank(self) -> bool:
        """Whether this is an empty line, which is no row."""
        return self.values is None and self.fault is None


def read_file(path: Path, shown: str, key: str) -> Iterator[Record]:
    """Yield the records of a file; `shown` is its name in messages, `key` the configuration key that named it.

    Raises:
        Refused: the file cannot be read as what its extension says, or holds no row at all.
    """
    readers = {".jsonl": _lines, ".json": _json, ".parquet": _parquet, ".csv": _csv}
    found = False
    try:
        for record in readers[path.suffix.lower()](path, shown):
            found = found or not record.is_blank
            yield record
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        why = f"the file cannot be read as {path.suffix.lower()}: {_first_line(error)}"
        raise Refused(Problem(key=key, value=shown, why=why, remedy="give a complete file")) from error
    if not found:
        why = "the file is empty" if path.stat().st_size == 0 else "the file holds no row"
        raise Refused(Problem(key=key, value=shown, why=why, remedy="give a file with at least one row"))


def rows_in(path: Path) -> int | None:
    """Return about how many rows a file holds, where that takes no parsing: the lines of a .jsonl, a table's count."""
    try:
        if path.suffix.lower() == ".jsonl":
            with path.open("rb") as file:
                return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 22), b""))
        if path.suffix.lower() == ".parquet":
            import pyarrow.parquet

            return int(pyarrow.parquet.read_metadata(path).num_rows)
    except (OSError, ValueError):
        return None  # reading the rows says so, in its own words
    return None


def read_rows(rows: Iterable[Any], shown: str, columns: Sequence[str] | None = None) -> Iterator[Record]:
    """Yield the records of rows in memory or of a `datasets.Dataset`, numbered from 1."""
    for number, values in enumerate(rows, start=1):
        place = f"{shown} row {number}"
        if columns is not None and isinstance(values, Mapping):
            values = {column: values[column] for column in columns if column in values}
        yield _record(values, place, shown)


def only(records: Iterator[Record], columns: Sequence[str]) -> Iterator[Record]:
    """Yield the records with the named columns alone."""
    for record in records:
        if record.values is None:
            yield record
        else:
            kept = {column: value for column, value in record.values.items() if column in columns}
            yield Record(place=record.place, file=record.file, values=kept)


def _record(values: Any, place: str, file: str) -> Record:
    if isinstance(values, Mapping):
        return Record(place=place, file=file, values=values)
    return Record(place=place, file=file, fault=RowFault("not an object", f"the row is {type(values).__name__}"))


def _lines(path: Path, shown: str) -> Iterator[Record]:
    """Yield one record a line. Our own reading, because a line's number is what helps a person."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{shown}:{number}"
            if number == 1:
                if line.startswith(_WIDE_MARKS):
                    raise ValueError("it is UTF-16; save it as UTF-8")
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if not line.strip():
                yield Record(place=place, file=shown)
                continue
            try:
                values = json.loads(line.decode("utf-8").rstrip("\r\n"))
            except (ValueError, RecursionError) as error:
                yield Record(place=place, file=shown, fault=_line_fault(line, error))
            else:
                yield _record(values, place, shown)


def _line_fault(line: bytes, error: Exception) -> RowFault:
    if isinstance(error, UnicodeDecodeError):
        return RowFault("not UTF-8", f"byte {error.start + 1} of the line")
    if isinstance(error, json.JSONDecodeError):
        detail = f"{error.msg} at column {error.colno}"
        if not line.endswith(b"\n"):
            return RowFault("broken JSON", f"the last line is cut off ({detail})")
        return RowFault("broken JSON", detail)
    return RowFault("broken JSON", _first_line(error))


def _json(path: Path, shown: str) -> Iterator[Record]:
    """Yield the objects of a JSON list; a file of one object a line is read as such, whatever its name."""
    with path.open("rb") as file:
        # A byte-order mark and white space may stand before the list.
        start = file.read(4096).removeprefix(_BYTE_ORDER_MARK).lstrip()
    if not start.startswith(b"["):
        if start.split(b"\n")[0].strip() == b"{":
            raise ValueError("it is one object over several lines; expected a list of rows, or one row a line")
        yield from _lines(path, shown)
        return
    for number, values in enumerate(json.loads(path.read_text(encoding="utf-8-sig")), start=1):
        yield _record(values, f"{shown} row {number}", shown)


def _parquet(path: Path, shown: str) -> Iterator[Record]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:
        number = 0
        for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE):
            for values in batch.to_pylist():
                number += 1
                yield _record(values, f"{shown} row {number}", shown)


def _csv(path: Path, shown: str) -> Iterator[Record]:
    """Yield the rows of a table with a header line; every cell is text."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            number = 0
            for cells in reader:
                if not cells:
                    yield Record(place=f"{shown}:{reader.line_num}", file=shown)
                    continue
                number += 1
                place = f"{shown} row {number}"
                if len(cells) == len(header):
                    yield _record(dict(zip(header, cells, strict=True)), place, shown)
                else:
                    detail = f"{len(cells)} cells under a header of {len(header)}"
                    yield Record(place=place, file=shown, fault=RowFault("wrong number of cells", detail))
    finally:
        csv.field_size_limit(limit)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
