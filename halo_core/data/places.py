"""Finds where the content of each message stands in a rendered conversation, whatever the template does around it.

Not for deciding what is supervised (`spans.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from halo_core.data.examples import Message, RowFault

_FIRST_MARK = 0xF0000
"""The first character of a plane that Unicode leaves to private use: no text has them, no template treats them."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a message's content begins and ends in the text, in characters; None where that cannot be told.

    `repeated`: begin and end of every place of a content that the template writes several times; then the two are None.
    """

    start: int | None
    end: int | None
    repeated: tuple[tuple[int, int], ...] = ()


def places_of(messages: Sequence[Message], text: str, render: Callable[[tuple[Message, ...]], str]) -> list[Place]:
    """Return the place of every message's content in `text`, the render of `messages`.

    The conversation is rendered again with one mark before and one after each content. Without its marks that render
    must be the text itself, letter by letter, so a place is exact or None. Where the marks change what the template
    writes (it looks at how a content begins), each mark is tried alone.
    """
    marks = _marks(text, 2 * len(messages))
    before = {index: marks[2 * index] for index in range(len(messages))}
    after = {index: marks[2 * index + 1] for index in range(len(messages))}
    found = _found(text, _render(render, _marked(messages, before, after)), marks)
    if found is None:
        found = {}
        for index in range(len(messages)):
            for opening, closing in (({index: before[index]}, {}), ({}, {index: after[index]})):
                found |= _found(text, _render(render, _marked(messages, opening, closing)), marks) or {}
    return [_place(found.get(before[index], []), found.get(after[index], [])) for index in range(len(messages))]


def _place(starts: Sequence[int], ends: Sequence[int]) -> Place:
    if len(starts) > 1 and len(starts) == len(ends):
        return Place(start=None, end=None, repeated=tuple(zip(starts, ends, strict=True)))
    return Place(start=starts[0] if len(starts) == 1 else None, end=ends[0] if len(ends) == 1 else None)


def _marks(text: str, count: int) -> str:
    """Return `count` characters that do not occur in the text."""
    candidates: Iterator[str] = (chr(code) for code in range(_FIRST_MARK, 0x10FFFE))
    present = set(text)
    return "".join(mark for mark, _ in zip((m for m in candidates if m not in present), range(count), strict=False))


def _marked(messages: Sequence[Message], before: Mapping[int, str], after: Mapping[int, str]) -> tuple[Message, ...]:
    """Return the messages with marks around their contents, inside white space that a template may trim."""
    marked: list[Message] = []
    for index, message in enumerate(messages):
        content = message.get("content", "")
        inner = content.strip()
        if inner:
            start = content.index(inner)
            opened = f"{content[:start]}{before.get(index, '')}{inner}"
            marked.append({**message, "content": f"{opened}{after.get(index, '')}{content[start + len(inner) :]}"})
        else:
            marked.append(message)
    return tuple(marked)


def _render(render: Callable[[tuple[Message, ...]], str], messages: tuple[Message, ...]) -> str | None:
    try:
        return render(messages)
    except RowFault:
        return None


def _found(text: str, marked: str | None, marks: str) -> dict[str, list[int]] | None:
    """Return where each mark stands in `text`, in order, or None when the marks changed more than themselves."""
    if marked is None:
        return None
    pattern = re.compile(f"[{marks}]")
    if pattern.sub("", marked) != text:
        return None
    found: dict[str, list[int]] = {}
    for passed, match in enumerate(pattern.finditer(marked)):
        found.setdefault(match[0], []).append(match.start() - passed)
    return found
