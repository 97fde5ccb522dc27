"""PyYAML's parse events as nodes, with the faults of the text in words of the person who wrote it.

Not for going on after a fault: `yaml_text.py` does. PyYAML's constructors and resolvers are not used, so no tag can
make an object and no plain text is taken for a type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import yaml

from halo_core.config.nodes import Entry, Items, Node, Pairs, Scalar
from halo_core.errors import Problem

MAX_DEPTH = 8
"""Levels of lists and mappings inside a value. No key needs more than three."""

FLAT = "the configuration is flat: one `key: value` a line"
SECOND_DOCUMENT = ("a second document begins here", "a configuration is one document: remove the line")


@dataclass
class Reading:
    """What one pass over a file has found so far."""

    where: str | None
    entries: list[Entry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    seen: set[tuple[int | None, str]] = field(default_factory=set)

    def fault(self, line: int | None, why: str, remedy: str, key: str | None = None, value: object = "") -> None:
        """Note a problem, once per line and reason."""
        if (line, why) in self.seen:
            return
        self.seen.add((line, why))
        self.problems.append(Problem(key=key, value=value, line=line, where=self.where, why=why, remedy=remedy))

    def has_fault_at(self, line: int) -> bool:
        """Return whether this line already has a problem."""
        return any(problem.line == line for problem in self.problems)


class Stop(Exception):
    """The text cannot be read any further: where, why, what to do."""

    def __init__(self, line: int, why: str, remedy: str) -> None:
        super().__init__(why)
        self.line, self.why, self.remedy = line, why, remedy


class Events:
    """The parse events of a text, as nodes. `offset` is how many lines of the file stand before the text."""

    def __init__(self, lines: Sequence[str], offset: int, reading: Reading) -> None:
        self._offset = offset
        self._reading = reading
        self._stream = yaml.parse("\n".join(lines) + "\n", Loader=yaml.SafeLoader)
        self._ahead: yaml.Event | None = None
        self._documents = 0

    def line(self, event: yaml.Event) -> int:
        """Return the 1-based line of the file on which an event starts."""
        return int(event.start_mark.line) + 1 + self._offset

    def peek(self) -> yaml.Event | None:
        """Return the next event that carries content, or None at the end."""
        while self._ahead is None:
            event = self._raw()
            if event is None:
                return None
            if isinstance(event, yaml.DocumentStartEvent):
                self._documents += 1
                if self._documents > 1:
                    raise Stop(self.line(event), *SECOND_DOCUMENT)
            if not isinstance(
                event, (yaml.StreamStartEvent, yaml.StreamEndEvent, yaml.DocumentStartEvent, yaml.DocumentEndEvent)
            ):
                self._ahead = event
        return self._ahead

    def is_finished(self) -> bool:
        """Return whether no content is left."""
        return self.peek() is None

    def _next(self) -> yaml.Event:
        event = self.peek()
        if event is None:
            raise Stop(self._offset + 1, "the text ends too early", "complete the value")
        self._ahead = None
        return event

    def _raw(self) -> yaml.Event | None:
        try:
            return next(self._stream, None)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            if _is_unfinished(error):
                mark = error.context_mark or mark  # where the open end began, not the end of the text
            raise Stop(self._offset + (0 if mark is None else int(mark.line)) + 1, *_told(error)) from None
        except yaml.reader.ReaderError as error:
            raise Stop(
                self._offset + 1,
                f"the character U+{error.character:04X} does not belong in text"
                if isinstance(error.character, int)
                else "a character that does not belong in text",
                "remove it",
            ) from None
        except (yaml.YAMLError, ValueError, OverflowError, LookupError) as error:
            # PyYAML lets some faults of escapes through, such as "\UFFFFFFFF".
            raise Stop(
                self._offset + 1, f"this is no YAML ({error})", "correct the text, or put it in single quotes"
            ) from None

    def top_level(self) -> None:
        """Read the mapping that a configuration is, entry by entry, into the reading."""
        self._plain(self._next(), "the file")
        while True:
            event = self._next()
            if isinstance(event, yaml.MappingEndEvent):
                return
            line = self.line(event)
            name = self._value_of(event, 0)
            node = self.value(0)
            if not isinstance(name, Scalar) or not name.text:
                self._reading.fault(line, "a key must be one word", FLAT, value="")
                continue
            self._reading.entries.append(Entry(name=name.text, node=node, where=self._reading.where, line=line))

    def value(self, depth: int) -> Node:
        """Return the next value; what makes no sense in it is noted as a problem and read as empty."""
        return self._value_of(self._next(), depth)

    def _value_of(self, event: yaml.Event, depth: int) -> Node:
        line = self.line(event)
        self._plain(event, "a value")
        if isinstance(event, yaml.ScalarEvent):
            return Scalar(text=event.value, quoted=event.style is not None, line=line)
        if isinstance(event, yaml.AliasEvent):
            return Scalar(text="", line=line)
        if depth >= MAX_DEPTH:
            self._reading.fault(
                line, f"lists and mappings stand more than {MAX_DEPTH} deep", "no key needs that: check the brackets"
            )
            self._skip()
            return Scalar(text="", line=line)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._list(line, depth)
        assert isinstance(event, yaml.MappingStartEvent), f"unexpected {event!r}"
        return self._mapping(line, depth)

    def _list(self, line: int, depth: int) -> Items:
        items: list[Node] = []
        while True:
            event = self._next()
            if isinstance(event, yaml.SequenceEndEvent):
                return Items(items=tuple(items), line=line)
            items.append(self._value_of(event, depth + 1))

    def _mapping(self, line: int, depth: int) -> Pairs:
        pairs: list[tuple[Scalar, Node]] = []
        names: dict[str, int] = {}
        while True:
            event = self._next()
            if isinstance(event, yaml.MappingEndEvent):
                return Pairs(pairs=tuple(pairs), line=line)
            at = self.line(event)
            name = self._value_of(event, depth + 1)
            node = self.value(depth + 1)
            if not isinstance(name, Scalar) or not name.text:
                self._reading.fault(at, "a key must be one word", "write name: value")
            elif name.text in names:
                self._reading.fault(
                    at, f"the key is given twice (first on line {names[name.text]})", "keep one", key=name.text
                )
            else:
                names[name.text] = at
                pairs.append((name, node))

    def _skip(self) -> None:
        """Read up to the end of the collection that has just begun."""
        depth = 1
        while depth:
            event = self._next()
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1

    def _plain(self, event: yaml.Event, what: str) -> None:
        """Note anchors, aliases, merge keys and tags: a flat file has no use for them, and tags can mean code."""
        line = self.line(event)
        if isinstance(event, yaml.AliasEvent):
            self._reading.fault(
                line, f"*{event.anchor} refers to another place", "write the value itself", value=f"*{event.anchor}"
            )
            return
        if not isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)):
            return
        if event.anchor:
            self._reading.fault(
                line, f"&{event.anchor} names a value for use elsewhere", "remove the name", value=f"&{event.anchor}"
            )
        if event.tag:
            self._reading.fault(
                line,
                f"the tag {event.tag} is not allowed on {what}",
                "remove it: types follow from the key",
                value=str(event.tag),
            )


def _is_unfinished(error: yaml.MarkedYAMLError) -> bool:
    return any(words in (error.problem or "") for words in ("end of stream", "stream end"))


def _told(error: yaml.MarkedYAMLError) -> tuple[str, str]:
    """Return (why, remedy) for a fault of the text, in words of the person who wrote it."""
    problem = error.problem or "it cannot be read"
    if "\\t" in problem:
        return "a tab between words", "use spaces"
    if "mapping values are not allowed" in problem:
        return (
            "a second `key: value` stands where only a value can stand",
            "start each key at the left edge on its own line; put a value that holds `: ` in quotes",
        )
    if "could not find expected ':'" in problem:
        return "a line without a colon", "write `key: value`, with a space after the colon"
    if "found character" in problem:
        return f"{problem.replace('found character', 'the character')}", "put the value in quotes"
    if _is_unfinished(error):
        return "a bracket or a quotation mark is never closed", "close it"
    if "expected <block end>" in problem or "expected ',' or" in problem:
        return f"the text does not fit what stands before it ({problem})", "check indentation, brackets and quotes"
    return f"this is no YAML ({problem})", "check the characters of this line, or put the value in quotes"
