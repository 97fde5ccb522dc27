"""PyYAML's parse events as nodes, with the faults of the text in words of the person who wrote it.

Not for going on after a fault: `yaml_text.py` does. PyYAML's constructors and resolvers are not used, so no tag can
make an object and no plain text is taken for a type.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import yaml

from halo_core.config.nodes import Entry, Items, Node, Pairs, Scalar
from halo_core.errors import Problem

MAX_DEPTH = 8
"""Levels of lists and mappings inside a value. No key needs more than three."""

FLAT = "the configuration is flat: one `key: value` a line"
_KEYED = re.compile(r"([A-Za-z_][\w.-]*)\s*:(?:\s+(.*))?")
SECOND_DOCUMENT = ("a second document begins here", "a configuration is one document: remove the line")


@dataclass
class Reading:
    """What one pass over a file has found so far. `lines` are the lines of the file, to show the faulty one."""

    where: str | None = None
    lines: Sequence[str] = ()
    entries: list[Entry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    seen: set[tuple[int | None, str]] = field(default_factory=set)

    def fault(self, line: int | None, why: str, remedy: str) -> None:
        """Note a problem of the text, once per line and reason, with the key of its line where there is one."""
        if (line, why) in self.seen:
            return
        self.seen.add((line, why))
        text = self.lines[line - 1].strip() if line is not None and line <= len(self.lines) else ""
        keyed = _KEYED.fullmatch(text)
        key, value = (keyed[1], keyed[2] or "") if keyed else (None, "")
        shown = f": {_cut(text)}" if text and key is None else ""
        self.problems.append(
            Problem(key=key, value=_cut(value), line=line, where=self.where, why=f"{why}{shown}", remedy=remedy)
        )

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
        text = "\n".join(lines) + "\n"
        try:
            self._loader = yaml.SafeLoader(text)
        except yaml.reader.ReaderError as error:
            line = text[: error.position].count("\n") + 1 + offset
            letter = f"U+{error.character:04X}" if isinstance(error.character, int) else "a byte"
            raise Stop(line, f"the character {letter} does not belong in text", "remove it") from None
        self._ahead: yaml.Event | None = None
        self._documents = 0

    def line(self, event: yaml.Event) -> int:
        """Return the 1-based line of the file on which an event starts."""
        assert event.start_mark is not None, "PyYAML marks every event"
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
            if not self._loader.check_event():
                return None
            event: yaml.Event = self._loader.get_event()  # type: ignore[no-untyped-call]
            return event
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            if _is_unfinished(error):
                # Told where the open end began, not at the end of the text: a quotation, or a bracket.
                is_bracket = isinstance(error, yaml.parser.ParserError) and self._loader.marks
                mark = self._loader.marks[-1] if is_bracket else error.context_mark or mark
            raise Stop(self._offset + (0 if mark is None else int(mark.line)) + 1, *_told(error)) from None
        except (yaml.YAMLError, ValueError, OverflowError, LookupError) as error:
            # PyYAML lets some faults of escapes through, such as "\UFFFFFFFF".
            raise Stop(self._offset + 1, f"this is no YAML ({error})", "put the text in single quotes") from None

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
                self._reading.fault(line, "a key must be one word", FLAT)
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
                first = names[name.text]
                self._reading.fault(at, f"{name.text} is given twice (first on line {first})", "keep one")
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
            self._reading.fault(line, f"*{event.anchor} refers to another place", "write the value itself")
        elif isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)):
            if event.anchor:
                self._reading.fault(line, f"&{event.anchor} names a value for use elsewhere", "remove the name")
            if event.tag:
                tag = event.tag.replace("tag:yaml.org,2002:", "!!")
                self._reading.fault(
                    line, f"the tag {tag} is not allowed on {what}", "remove it: types follow from the key"
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
    if "that cannot start any token" in problem:
        return f"a value cannot begin with {problem.split()[2]}", "put the value in quotes"
    if _is_unfinished(error):
        return "a bracket or a quotation mark is never closed", "close it"
    if "expected <block end>" in problem or "expected ',' or" in problem:
        return f"the text does not fit what stands before it ({problem})", "check indentation, brackets and quotes"
    return f"this is no YAML ({problem})", "check the characters of this line, or put the value in quotes"


def _cut(text: str) -> str:
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= 80 else text[:77] + "..."
