"""Holds the spans to be learnt of a conversation against the places of its contents: the proof, row by row.

Not for finding the spans (`spans.py`) nor for their tokens (`tokens.py`, which reads them back from the tokens).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from halo_core.data.examples import REASONING_FIELDS, Message, RowFault
from halo_core.data.rendered import UNTRUE, Rendered, excerpt, others_of
from halo_core.data.template import Span, turns

NOTE_REWRITTEN = (
    "the template leaves out part of what the assistant says (such as earlier reasoning); learnt as rendered"
)
NOTE_NO_REASONING = "the template does not write the reasoning of the last turn, so it is not learnt"
NOTE_NO_TURN_END = "no token that ends the assistant's turn is learnt, as the template has it: the model may not stop"
NOTE_UNMARKED = "the template's generation markers leave out an assistant turn"
NOTE_SPECIAL = "spells out {token} in the text of a message, and the tokenizer reads it as that special token"

_REASONING_TAG = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>")
_REASONING_SPLIT = re.compile(r"</?(?:think|thinking|thought|reasoning)>")
_SHORTEST_REPEATED = 24
"""Characters from which on a text that stands twice in a turn is no chance."""


def verified(rendered: Rendered, spans: Sequence[tuple[int, Span]], first: int) -> tuple[str, ...]:
    """Check every span against the places of the contents; return what a person should know.

    Raises:
        RowFault: a span holds what another wrote, or an assistant's text is missing or doubled in it.
    """
    text, messages = rendered.text, rendered.messages
    refuse_others(rendered, [span for _, span in spans], first)
    by_turn: dict[int, list[Span]] = {}
    for index, span in spans:
        by_turn.setdefault(index, []).append(span)
    notes: set[str] = set()
    previous = 0
    for index in turns(messages):
        if index < first:
            continue
        place = rendered.places[index].end
        own = [span for _, span in spans if place is not None and span[0] < place <= span[1]]
        own = own or (by_turn.get(index, []) if place is None else [])
        if not own:
            notes.add(NOTE_UNMARKED)
            continue
        said = text[own[0][0] : own[-1][1]]
        answer = _pieces(messages[index].get("content", ""))[-1:]
        if place is None and answer and not messages[index].get("tool_calls") and answer[0][-40:] not in said:
            raise RowFault(UNTRUE, f"the content of message {index} is not in its turn: {excerpt(said)}")
        called = called_names(messages[index])
        lost = sorted({name for name in called if said.count(name) < called.count(name)})
        if lost:
            raise RowFault("the template leaves out tool calls", f"{', '.join(lost)} in message {index}")
        _refuse_repeated(said, messages[index], index)
        if place is not None and own[-1][1] <= place:
            notes.add(NOTE_NO_TURN_END)
        reasoning = _reasoning(messages[index])
        if index == turns(messages)[-1] and any(piece not in said for piece in _pieces(reasoning)):
            notes.add(NOTE_NO_REASONING)
            reasoning = ""
        if any(
            piece not in said for part in (reasoning, messages[index].get("content", "")) for piece in _pieces(part)
        ):
            notes.add(NOTE_REWRITTEN)
        _refuse_broken_reasoning(text[_behind(rendered, index, previous) : own[-1][1]], messages[index], index)
        previous = own[-1][1]
    return tuple(sorted(notes))


def refuse_others(rendered: Rendered, spans: Sequence[Span], first: int) -> None:
    """Raise where a span touches a content that is not the assistant's from message `first` on."""
    for index, (begin, stop) in others_of(rendered, first):
        for start, end in spans:
            if start < stop and begin < end:
                role = rendered.messages[index]["role"]
                detail = f"text of message {index} ({role}) would be learnt: {excerpt(rendered.text[start:end])}"
                raise RowFault(UNTRUE, detail)

    # A content whose place cannot be told is looked for by its letters, where they are too many for chance.
    answers = [message for message in rendered.messages[first:] if message["role"] == "assistant"]
    own = "\n".join(part for message in answers for part in _parts(message))
    for index, (message, place) in enumerate(zip(rendered.messages, rendered.places, strict=False)):
        content = message.get("content", "").strip()
        is_told = place.start is not None or place.end is not None or place.repeated
        if message["role"] == "assistant" or is_told or len(content) < _SHORTEST_REPEATED or content in own:
            continue
        if any(content in rendered.text[start:end] for start, end in spans):
            raise RowFault(UNTRUE, f"text of message {index} ({message['role']}) would be learnt: {excerpt(content)}")


def spelt_out(rendered: Rendered) -> tuple[str, ...]:
    """Return notes of the special tokens that contents spell out, tags of reasoning in the assistant's own apart."""
    spelt: set[str] = set()
    for message in rendered.messages:
        found = rendered.template.special_tokens_in(message.get("content", ""))
        if message["role"] == "assistant":
            found = {token for token in found if not _REASONING_TAG.fullmatch(token)}
        spelt |= found
    return tuple(NOTE_SPECIAL.format(token=token) for token in sorted(spelt))


def _refuse_repeated(said: str, message: Message, index: int) -> None:
    """Raise where the template writes what the assistant says, or its reasoning, more often than the row does."""
    own = "\n".join(_parts(message))
    for piece in (piece for part in _parts(message) for piece in _pieces(part)):
        if len(piece) < _SHORTEST_REPEATED or said.count(piece) <= own.count(piece):
            continue
        calls = json.dumps(message.get("tool_calls") or [], ensure_ascii=False, default=str)
        if said.count(piece) > own.count(piece) + calls.count(piece):
            raise RowFault("the template writes a text of the assistant twice", f"message {index}: {excerpt(said)}")


def _behind(rendered: Rendered, index: int, previous: int) -> int:
    """Return a position before the header of turn `index` and behind what comes before it."""
    place = rendered.places[index - 1].end if index > 0 else 0
    return max(place or 0, previous)


def _reasoning(message: Message) -> str:
    """Return the reasoning that an assistant message has in a field of its own."""
    given = next((message[field] for field in REASONING_FIELDS if message.get(field)), "")
    return given if isinstance(given, str) else ""


def _parts(message: Message) -> list[str]:
    """Return what an assistant message says, each part trimmed."""
    return [part.strip() for part in (message.get("content", ""), _reasoning(message)) if part.strip()]


def _pieces(part: str) -> list[str]:
    """Return what stands before, between and after the tags of reasoning in a text, which templates set anew."""
    return [piece.strip() for piece in _REASONING_SPLIT.split(part) if piece.strip()]


def called_names(message: Message) -> list[str]:
    """Return the names of the functions that an assistant message calls."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or [] if isinstance(call, Mapping)]
    return [str(call["name"]) for call in calls if isinstance(call, Mapping) and call.get("name")]


def _refuse_broken_reasoning(turn: str, message: Message, index: int) -> None:
    """Raise where the template wrote the tags of a reasoning block more often than the row has them, or unpaired.

    Templates split a content at its closing tag; one that only looks for the opening tag writes the reasoning twice
    or leaves a closing tag alone. Source: huggingface/trl#6363.
    """
    opened, closed = _tags(turn)
    own_opened, own_closed = _tags("\n".join(_parts(message)))
    if (opened, closed) == (own_opened, own_closed) or (opened == closed and closed <= max(1, own_closed)):
        return
    detail = (
        f"message {index} is rendered with {opened} opening and {closed} closing tags (a template that does not "
        f"split contents takes the reasoning as a field, reasoning_content) in: {excerpt(turn)}"
    )
    raise RowFault("the template breaks a reasoning block", detail)


def _tags(text: str) -> tuple[int, int]:
    closing = [match[1] == "/" for match in _REASONING_TAG.finditer(text)]
    return len(closing) - sum(closing), sum(closing)
