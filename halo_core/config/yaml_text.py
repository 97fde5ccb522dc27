"""Strict YAML: the text of a configuration to its entries, with line numbers, every fault at once.

Not for the meaning of values: plain text stays text here, so that no reader's idea of `no`, `012` or `2e-5` gets in
between. `yaml_events.py` turns one sound text into nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import yaml

from halo_core.config.nodes import Entry, Node, Scalar
from halo_core.config.yaml_events import FLAT, SECOND_DOCUMENT, Events, Reading, Stop
from halo_core.errors import Problem

MAX_BYTES = 1_000_000
"""A configuration is a page or two; a larger file is another kind of file."""


def entries(data: bytes, where: str | None = None) -> tuple[list[Entry], list[Problem]]:
    """Return the top-level entries of a configuration file, in order, repeated keys included, and its problems.

    data: the bytes of the file, UTF-8 with or without a byte order mark, any line ends. where: how to name the file.
    A part that cannot be read does not hide the rest: its problem is noted and reading goes on at the next key.
    """
    reading = Reading(where=where)
    text = _decoded(data, reading)
    if text is None:
        return [], reading.problems
    lines = _without_tabs(text, reading)
    if all(not line.strip() or line.lstrip().startswith("#") or line.strip() in ("---", "...") for line in lines):
        if not reading.problems:
            reading.fault(None, "the file is empty", "write at least model_name_or_path and dataset_name")
        return [], reading.problems
    try:
        _document(lines, 0, reading)
    except Stop:
        # A fault somewhere: read key by key, so that each fault is named and hides no other.
        reading.entries.clear()
        _key_by_key(lines, reading)
    reading.problems.sort(key=lambda problem: problem.line or 0)
    return reading.entries, reading.problems


def value(text: str) -> Node:
    """Return the value of one word of the command line.

    Text that opens a list, a mapping or a quotation is read as YAML; all other text is one plain scalar, so that a
    path or a name needs no care.

    Raises:
        ValueError: text that opens as YAML and is none; the message says what is wrong.
    """
    stripped = text.strip()
    if not stripped.startswith(("[", "{", '"', "'")):
        return Scalar(text=stripped)
    reading = Reading()
    try:
        events = Events(stripped.split("\n"), 0, reading)
        node = events.value(0)
        if not events.is_finished():
            raise ValueError("there is text after the value")
    except Stop as stop:
        raise ValueError(stop.why) from None
    if reading.problems:
        raise ValueError(reading.problems[0].why)
    return node


def _decoded(data: bytes, reading: Reading) -> str | None:
    if len(data) > MAX_BYTES:
        reading.fault(
            None,
            f"the file has {len(data):,} bytes, far more than a configuration",
            "give the .yaml file of a run, not data or weights",
        )
        return None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        reading.fault(line, "the file is not UTF-8 text", "save it as UTF-8")
        return None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    reading.lines = text.split("\n")
    return text


def _without_tabs(text: str, reading: Reading) -> list[str]:
    """Return the lines with tabs of the indentation as spaces, each such line noted as a problem."""
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        indentation = line[: len(line) - len(line.lstrip(" \t"))]
        if "\t" in indentation and line.strip():
            reading.fault(number, "a tab in the indentation", "use spaces")
            lines[number - 1] = indentation.replace("\t", "  ") + line.lstrip(" \t")
    return lines


def _key_by_key(lines: Sequence[str], reading: Reading) -> None:
    begun = False
    for start, stop in _blocks(lines):
        first = lines[start]
        if first.startswith(("---", "...")) and begun:
            reading.fault(start + 1, *SECOND_DOCUMENT)
            return
        if first.startswith("%") and not begun:
            continue
        begun = begun or not first.startswith("---")
        _block(lines, start, stop, reading)


def _blocks(lines: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield (first, one past last) line indices of pieces that each begin with text at the left edge."""
    inside = (" ", "#", "]", "}", "- ")
    starts = [i for i, line in enumerate(lines) if line and line != "-" and not line.startswith(inside)]
    if not starts or starts[0] > 0:
        starts.insert(0, 0)
    yield from zip(starts, [*starts[1:], len(lines)], strict=True)


def _block(lines: Sequence[str], start: int, stop: int, reading: Reading) -> None:
    """Read one piece; where it breaks, note it and keep what stands before the break."""
    while stop > start and not lines[stop - 1].strip():
        stop -= 1
    while stop > start:
        if all(not line.strip() or line.lstrip().startswith("#") for line in lines[start:stop]):
            return
        kept = len(reading.entries)
        try:
            _document(lines[start:stop], start, reading)
            return
        except Stop as fault:
            del reading.entries[kept:]
            if not reading.has_fault_at(fault.line):
                reading.fault(fault.line, fault.why, fault.remedy)
            broken = min(max(fault.line - 1, start), stop - 1)
            stop = broken


def _document(lines: Sequence[str], offset: int, reading: Reading) -> None:
    events = Events(lines, offset, reading)
    event = events.peek()
    if event is None:
        return
    line = events.line(event)
    if isinstance(event, yaml.MappingStartEvent):
        events.top_level()
    elif isinstance(event, yaml.SequenceStartEvent):
        events.value(0)
        reading.fault(line, "a list stands at the top level", FLAT)
    else:
        node = events.value(0)
        if not isinstance(node, Scalar) or node.text or node.quoted:
            reading.fault(line, "this line is no `key: value`", f"{FLAT}, with a space after the colon")
    if not events.is_finished():
        raise Stop(line, "the text goes on after its end", FLAT)
