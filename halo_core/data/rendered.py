"""A conversation as the template writes it, with the places of its contents; what spans are found in and held against.

Not for finding spans (`spans.py`) nor for judging them (`verified.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from halo_core.data.examples import Message, RowFault
from halo_core.data.places import Place, places_of
from halo_core.data.template import ChatTemplate, Conversation, Span

UNTRUE = "the assistant's text cannot be told from the rest"


@dataclass(frozen=True, kw_only=True)
class Rendered:
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


def with_places(template: ChatTemplate, conversation: Conversation, text: str) -> Rendered:
    """Return a conversation and `text`, its render, with the places of its contents in it."""

    def render(messages: tuple[Message, ...]) -> str:
        return template.render(replace(conversation, messages=messages))

    places = places_of(conversation.messages, text, render)
    return Rendered(template=template, conversation=conversation, text=text, places=places)


def others_of(rendered: Rendered, first: int) -> list[tuple[int, Span]]:
    """Return the index and the place of every content that is not the assistant's from message `first` on."""
    found: list[tuple[int, Span]] = []
    for index, place in enumerate(rendered.places):
        is_learnt = rendered.messages[index]["role"] == "assistant" and index >= first
        if not is_learnt:
            found += [(index, span) for span in place.repeated]
        if is_learnt or (place.start is None and place.end is None):
            continue
        # With one of the two borders unknown, the character inside the known one stands for the content.
        start = place.start if place.start is not None else (place.end or 0) - 1
        found.append((index, (start, place.end if place.end is not None else start + 1)))
    return found


def excerpt(text: str) -> str:
    """Return a text in one line, cut in the middle where it is long."""
    shown = text if len(text) <= 300 else f"{text[:180]} [...] {text[-110:]}"
    return repr(shown)
