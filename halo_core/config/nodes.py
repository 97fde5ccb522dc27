"""What a value looks like before its type is known: scalars with their text, lists and mappings with their lines.

Not for types: `values.py` decides what a text means for a key. Three sources make these nodes: YAML, words of the
command line, and Python values.
"""

from __future__ import annotations

import enum
import math
import numbers
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """One plain or quoted piece of text. `quoted` texts are never anything but text. `line` is 1-based."""

    text: str
    quoted: bool = False
    line: int | None = None


@dataclass(frozen=True, kw_only=True)
class Items:
    """A list."""

    items: tuple[Node, ...]
    line: int | None = None


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """A mapping, in the order in which it was written."""

    pairs: tuple[tuple[Scalar, Node], ...]
    line: int | None = None


Node: TypeAlias = Scalar | Items | Pairs


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One key of a configuration with its value, as one source gave it.

    name: the key as typed (on the command line with `-` and `.` read as `_`). where: the file, or "command line".
    line: 1-based line of the key in the file, or None.
    """

    name: str
    node: Node
    where: str | None
    line: int | None = None


def from_python(value: object) -> Node:
    """Return the node of a Python value: text is quoted, everything else is plain.

    Raises:
        TypeError: the value is none of text, path, number, boolean, None, list, tuple, mapping.
    """
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, numbers.Real) and not isinstance(value, bool):  # numpy's numbers among them
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    if value is None:
        return Scalar(text="null")
    if isinstance(value, bool):
        return Scalar(text="true" if value else "false")
    if isinstance(value, int):
        return Scalar(text=str(value))
    if isinstance(value, float):
        return Scalar(text=repr(value) if math.isfinite(value) else f".{value}".replace(".-", "-."))
    if isinstance(value, str):
        return Scalar(text=value, quoted=True)
    if isinstance(value, os.PathLike):
        return Scalar(text=os.fspath(value), quoted=True)
    if isinstance(value, Mapping):
        return Pairs(
            pairs=tuple((Scalar(text=str(name), quoted=True), from_python(item)) for name, item in value.items())
        )
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return Items(items=tuple(from_python(item) for item in value))
    raise TypeError(f"an object of type {type(value).__name__} cannot stand in a configuration")


def written(node: Node) -> str:
    """Return a node the way a person could write it on one line."""
    if isinstance(node, Scalar):
        return f'"{node.text}"' if node.quoted else node.text
    if isinstance(node, Items):
        return "[" + ", ".join(written(item) for item in node.items) + "]"
    return "{" + ", ".join(f"{name.text}: {written(item)}" for name, item in node.pairs) + "}"


def scalars(node: Node) -> Iterator[Scalar]:
    """Yield every scalar of a node, keys of mappings included."""
    if isinstance(node, Scalar):
        yield node
    elif isinstance(node, Items):
        for item in node.items:
            yield from scalars(item)
    else:
        for name, item in node.pairs:
            yield name
            yield from scalars(item)
