"""Which characters of a rendered conversation the assistant wrote, and the proof of it, row by row.

Not for tokens (`tokens.py`). Spans come from the template's generation markers where it has them, otherwise from
comparing renders of shorter conversations; both are checked against the places of the messages' contents.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from halo_core.data.examples import REASONING_FIELDS, Message, RowFault
from halo_core.data.places import Place, places_of
from halo_core.data.template import ChatTemplate, Conversation, Span, common_prefix, turns, whole_tokens

NOTE_REWRITTEN = (
    "the template leaves out part of what the assistant says (such as earlier reasoning); learnt as rendered"
)
NOTE_NO_TURN_END = "no token that ends the assistant's turn is learnt, as the template has it: the model may not stop"
NOTE_UNMARKED = "the template's generation markers leave out an assistant turn"

_UNTRUE = "the assistant's text cannot be told from the rest"
_REASONING_TAG = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>")


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """The rendered text, the spans of it to be learnt (None: all of it), and what a person should know."""

    text: str
    spans: tuple[Span, ...] | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Rendered:
    """A conversation with its text and the places of its contents."""

    template: ChatTemplate
    conversation: Conversation
    text: str
    places: list[Place]

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.conversation.messages

    def beginning(self, count: int, *, generation_prompt: bool) -> str | None:
        """Return the render of the first `count` messages, or None where the template has none."""
        if count == 0:
            return None
        part = replace(self.conversation, messages=self.messages[:count])
        try:
            return self.template.render(part, generation_prompt=generation_prompt)
        except RowFault:
            return None


def assistant_supervision(template: ChatTemplate, conversation: Conversation, *, first: int = 0) -> Supervision:
    """Return what the assistant wrote in its turns from message `first` on, each with the end of the turn.

    Raises:
        RowFault: the template cannot render the row, or what the assistant wrote cannot be told for certain.
    """
    spans: list[tuple[int, Span]]
    if template.has_markers:
        text, marked = template.render_marked(conversation)
        rendered = _with_places(template, conversation, text)
        spans = _attributed(rendered, _merged(marked))
        spans = [(index, span) for index, span in spans if index >= first]
        if not spans:
            detail = f"its generation markers mark nothing in: {_excerpt(text)}"
            raise RowFault("the template marks no assistant text", detail)
    else:
        rendered = _with_places(template, conversation, template.render(conversation))
        spans = [(index, _turn(rendered, index)) for index in turns(rendered.messages) if index >= first]
    notes = _verified(rendered, spans, first)
    if len(turns(conversation.messages)) < len(conversation.messages) and _merged([span for _, span in spans]) == [
        (0, len(rendered.text))
    ]:
        raise RowFault(_UNTRUE, f"all of the row would be learnt: {_excerpt(rendered.text)}")
    return Supervision(text=rendered.text, spans=tuple(_merged([span for _, span in spans])), notes=notes)


def completion_supervision(
    template: ChatTemplate, conversation: Conversation, *, first: int, assistant_only: bool
) -> Supervision:
    """Return what follows the prompt, the messages before `first`, as the generation prompt ends it.

    Where others than the assistant speak after `first` and `assistant_only` is set, its turns alone.

    Raises:
        RowFault: as `assistant_supervision`.
    """
    if assistant_only and any(message["role"] != "assistant" for message in conversation.messages[first:]):
        return assistant_supervision(template, conversation, first=first)
    rendered = _with_places(template, conversation, template.render(conversation))
    span = (_turn_start(rendered, first), len(rendered.text))
    prompt = replace(rendered, places=[*rendered.places[:first]])
    _refuse_others(prompt, [span])
    if span[0] >= span[1]:
        raise RowFault(_UNTRUE, "the template renders nothing after the prompt")
    return Supervision(text=rendered.text, spans=(span,))


def _with_places(template: ChatTemplate, conversation: Conversation, text: str) -> _Rendered:
    def render(messages: tuple[Message, ...]) -> str:
        return template.render(replace(conversation, messages=messages))

    places = places_of(conversation.messages, text, render)
    return _Rendered(template=template, conversation=conversation, text=text, places=places)


def _turn(rendered: _Rendered, index: int) -> Span:
    start = _turn_start(rendered, index)
    return start, _turn_end(rendered, index, start)


def _turn_start(rendered: _Rendered, index: int) -> int:
    """Return where the turn of message `index` begins: where the model starts to write, after the header."""
    text, template = rendered.text, rendered.template
    prompt = rendered.beginning(index, generation_prompt=True)
    if prompt is not None and text.startswith(prompt):
        return len(prompt)
    asked = rendered.beginning(index, generation_prompt=False)
    if prompt is not None and asked is not None and text.startswith(asked):
        # The generation prompt says more than this turn holds, such as the opening of a reasoning block.
        return max(len(asked), whole_tokens(template, prompt, common_prefix(prompt, text)))
    # The template writes an earlier turn in another way once more messages follow, so the beginning of the text is
    # no render by itself: look for the header behind the previous message.
    behind = rendered.places[index - 1].end if index > 0 else 0
    own = rendered.places[index]
    limit = next((position for position in (own.end, own.start) if position is not None), len(text))
    for header in (template.header, template.bare_header):
        if behind is not None and header:
            position = text.find(header, behind, limit)
            if position >= 0:
                return position + len(header)
    raise RowFault(_UNTRUE, f"where message {index} begins in: {_excerpt(text)}")


def _turn_end(rendered: _Rendered, index: int, start: int) -> int:
    """Return where the turn of message `index` ends: after what closes it, before what opens the next."""
    text, template = rendered.text, rendered.template
    if index == len(rendered.messages) - 1:
        return len(text)
    said = max(start, rendered.places[index].end or start)
    shorter = rendered.beginning(index + 1, generation_prompt=False) or ""
    if text.startswith(shorter) and len(shorter) > said:
        return len(shorter)
    next_start = rendered.places[index + 1].start
    limit = len(text) if next_start is None else next_start
    if template.border:
        position = text.find(template.border, said, limit)
        if position > said:
            return position
    last = rendered.places[-1].end
    closing = text[last:] if rendered.messages[-1]["role"] == "assistant" and last is not None else ""
    if closing and text.startswith(closing, said) and said + len(closing) <= limit:
        return said + len(closing)
    end = common_prefix(shorter, text)
    while end > said and not text.endswith(template.added_tokens, said, end):
        end -= 1
    if end > said:
        return end
    raise RowFault(_UNTRUE, f"where message {index} ends in: {_excerpt(text)}")


def _attributed(rendered: _Rendered, marked: Sequence[Span]) -> list[tuple[int, Span]]:
    """Return each marked span with the assistant message it belongs to: the one whose content it holds or follows."""
    spans: list[tuple[int, Span]] = []
    assistant = turns(rendered.messages)
    for number, (start, end) in enumerate(marked):
        inside = [
            index for index in assistant if (place := rendered.places[index].end) is not None and start < place <= end
        ]
        owner = inside[0] if inside else assistant[min(number, len(assistant) - 1)]
        spans.append((owner, (start, end)))
    return spans


def _verified(rendered: _Rendered, spans: Sequence[tuple[int, Span]], first: int) -> tuple[str, ...]:
    """Check every span against the places of the contents; return what a person should know.

    Raises:
        RowFault: a span holds what another wrote, or an assistant's text is missing or doubled in it.
    """
    text, messages = rendered.text, rendered.messages
    _refuse_others(rendered, [span for _, span in spans])
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
        content = messages[index].get("content", "").strip()
        if place is None and content and not messages[index].get("tool_calls") and content[-40:] not in said:
            raise RowFault(_UNTRUE, f"the content of message {index} is not in its turn: {_excerpt(said)}")
        lost = [name for name in _called(messages[index]) if name not in said]
        if lost:
            raise RowFault("the template leaves out tool calls", f"{', '.join(lost)} in message {index}")
        if place is not None and own[-1][1] <= place:
            notes.add(NOTE_NO_TURN_END)
        if any(part not in said for part in _parts(messages[index])):
            notes.add(NOTE_REWRITTEN)
        _refuse_broken_reasoning(text[_behind(rendered, index, previous) : own[-1][1]], messages[index], index)
        previous = own[-1][1]
    return tuple(sorted(notes))


def _refuse_others(rendered: _Rendered, spans: Sequence[Span]) -> None:
    """Raise where a span touches the content of a message that is not the assistant's."""
    for index, place in enumerate(rendered.places):
        role = rendered.messages[index]["role"]
        if role == "assistant" or (place.start is None and place.end is None):
            continue
        # With one of the two borders unknown, the character inside the known one stands for the content.
        first = place.start if place.start is not None else (place.end or 0) - 1
        last = place.end if place.end is not None else first + 1
        for start, end in spans:
            if start < last and first < end:
                detail = f"text of message {index} ({role}) would be learnt: {_excerpt(rendered.text[start:end])}"
                raise RowFault(_UNTRUE, detail)


def _behind(rendered: _Rendered, index: int, previous: int) -> int:
    """Return a position before the header of turn `index` and behind what comes before it."""
    place = rendered.places[index - 1].end if index > 0 else 0
    return max(place or 0, previous)


def _parts(message: Message) -> list[str]:
    """Return what an assistant message says, each part trimmed."""
    parts = [message.get("content", ""), next((message[f] for f in REASONING_FIELDS if message.get(f)), "")]
    return [part.strip() for part in parts if isinstance(part, str) and part.strip()]


def _called(message: Message) -> list[str]:
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
        f"split contents takes the reasoning as a field, reasoning_content) in: {_excerpt(turn)}"
    )
    raise RowFault("the template breaks a reasoning block", detail)


def _tags(text: str) -> tuple[int, int]:
    closing = [match[1] == "/" for match in _REASONING_TAG.finditer(text)]
    return len(closing) - sum(closing), sum(closing)


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Return the spans in order, empty ones left out and touching ones joined."""
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _excerpt(text: str) -> str:
    """Return a text in one line, cut in the middle where it is long."""
    shown = text if len(text) <= 300 else f"{text[:180]} [...] {text[-110:]}"
    return repr(shown)
