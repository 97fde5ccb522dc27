"""The kinds of values made of others: lists, mappings, values that may be null, data sets.

Not for single values: `values.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from halo_core.config.nodes import Items, Node, Pairs, Scalar
from halo_core.config.values import Kind, Text, Unfit, is_null, near, plain, shape, switch


@dataclass(frozen=True, kw_only=True)
class Many:
    """One value of a kind, or a list of them; the value is always a tuple. `nothing` is the word for an empty one."""

    kind: Kind
    nothing: str | None = None
    nothing_aliases: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Return the kind in words."""
        return f"{self.kind.words}, or a list" + (f", or {self.nothing}" if self.nothing else "")

    def read(self, node: Node, notes: list[str]) -> tuple[Any, ...]:
        """Return the values without repetitions. Raises Unfit for the first item that does not fit."""
        if isinstance(node, Pairs):
            raise Unfit("it takes a list, not a mapping", "write [first, second]", node.line)
        nodes = node.items if isinstance(node, Items) else (node,)
        values = []
        for item in nodes:
            if self.nothing and isinstance(item, Scalar):
                word = item.text.lower()
                if word == self.nothing or word in self.nothing_aliases or is_null(item):
                    if len(nodes) > 1:
                        raise Unfit(f"{word} stands beside other values", "keep either", item.line)
                    if word in self.nothing_aliases:
                        notes.append(f"{item.text} reads as {self.nothing}")
                    return ()
            values.append(self.kind.read(item, notes))
        return tuple(dict.fromkeys(values))


@dataclass(frozen=True, kw_only=True)
class Table:
    """A mapping of names to values, of one kind where `kind` is set."""

    kind: Kind | None = None

    @property
    def words(self) -> str:
        """Return the kind in words."""
        return f"mapping of name to {self.kind.words}" if self.kind else "mapping"

    def read(self, node: Node, notes: list[str]) -> dict[str, Any]:
        """Return the mapping. Raises Unfit for the first value that does not fit."""
        if not isinstance(node, Pairs):
            raise Unfit(f"it takes a mapping, not a {shape(node)}", "write {name: value}, or indented lines", node.line)
        return {
            name.text: self.kind.read(item, notes) if self.kind else plain(item, notes) for name, item in node.pairs
        }


@dataclass(frozen=True, kw_only=True)
class Optional:
    """A value of a kind, or null (`null`, `none`, `~`, nothing)."""

    kind: Kind

    @property
    def words(self) -> str:
        """Return the kind in words."""
        return f"{self.kind.words}, or null"

    def read(self, node: Node, notes: list[str]) -> Any:
        """Return None or the value. Raises Unfit as the kind does."""
        return None if is_null(node) else self.kind.read(node, notes)


@dataclass(frozen=True, kw_only=True)
class NullIs:
    """A value of a kind, where null means `value`."""

    kind: Kind
    value: Any

    @property
    def words(self) -> str:
        """Return the kind in words."""
        return self.kind.words

    def read(self, node: Node, notes: list[str]) -> Any:
        """Return the value. Raises Unfit as the kind does."""
        return self.value if is_null(node) else self.kind.read(node, notes)


@dataclass(frozen=True, kw_only=True)
class FlagOrText:
    """true, false, or text."""

    words: str = "boolean or text"

    def read(self, node: Node, notes: list[str]) -> bool | str:
        """Return the boolean or the text. Raises Unfit as text does."""
        found = switch(node, notes)
        return Text().read(node, notes) if found is None else found


@dataclass(frozen=True, kw_only=True)
class DatasetList:
    """A list of data sets: each a path or hub id, or a mapping with `path` and what selects rows from it.

    may_be_one: a single path or mapping is taken as well; a single path stays text.
    """

    fields: Mapping[str, Kind]
    may_be_one: bool = False
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """Return the kind in words."""
        listed = f"list of paths or hub ids, or of mappings with {', '.join(self.fields)}"
        return f"path or hub id, or {listed}" if self.may_be_one else listed

    def read(self, node: Node, notes: list[str]) -> str | tuple[dict[str, Any], ...]:
        """Return one mapping per data set, `path` always present. Raises Unfit for the first that does not fit."""
        if self.may_be_one and isinstance(node, Scalar):
            return Text().read(node, notes)
        if self.may_be_one and isinstance(node, Pairs):
            return (self._one(node, notes),)
        if not isinstance(node, Items):
            raise Unfit(f"it takes a list, not a {shape(node)}", "write one line `- path: ...` per data set", node.line)
        return tuple(self._one(item, notes) for item in node.items)

    def _one(self, node: Node, notes: list[str]) -> dict[str, Any]:
        if isinstance(node, Scalar):
            return {"path": Text().read(node, notes)}
        if isinstance(node, Items):
            raise Unfit("a data set is a path or a mapping, not a list", "write - path: ...", node.line)
        entry: dict[str, Any] = {}
        for name, item in node.pairs:
            if name.text in self.refused and not is_null(item):
                why, remedy = self.refused[name.text]
                raise Unfit(f"{name.text}: {why}", remedy, name.line)
            if name.text not in self.fields and name.text not in self.refused:
                raise Unfit(
                    f"{name.text} is no word for a data set{near(name.text, self.fields)}",
                    f"one of: {', '.join(self.fields)}",
                    name.line,
                )
            if not is_null(item):
                try:
                    entry[name.text] = self.fields[name.text].read(item, notes)
                except Unfit as unfit:
                    raise Unfit(f"{name.text}: {unfit.why}", unfit.remedy, unfit.line) from None
        if "path" not in entry:
            raise Unfit("a data set without a path", "write - path: FILE, folder or hub id", node.line)
        return entry
