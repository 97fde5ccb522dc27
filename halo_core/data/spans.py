"""Which characters of a rendered conversation the assistant wrote, and the proof of it, row by row.

Not for tokens (`tokens.py`). Spans come from the template's generation markers where it has them, otherwise from
comparing renders of shorter conversations; both are checked against the places of the messages' contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from halo_core.data.examples import RowFault
from halo_core.data.rendered import UNTRUE, Rendered, excerpt, others_of, with_places
from halo_core.data.template import ChatTemplate, Conversation, Span, common_prefix, turns, whole_tokens
from halo_core.data.verified import called_names, refuse_others, spelt_out, verified


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """The rendered text, the spans of it to be learnt (None: all of it), and what a person should know.

    `others`: the places of what is certainly not to be learnt, such as a user's text; no learnt token may touch them.
    """

    text: str
    spans: tuple[Span, ...] | None
    others: tuple[Span, ...] = ()
    notes: tuple[str, ...] = ()


def whole_supervision(template: ChatTemplate, conversation: Conversation) -> Supervision:
    """Return a rendered conversation of which every token is learnt.

    Raises:
        RowFault: the template cannot render the row.
    """
    conversation, notes = template.fitted(conversation)
    return Supervision(text=template.render(conversation), spans=None, notes=notes)


def assistant_supervision(
    template: ChatTemplate, conversation: Conversation, *, first: int = 0, last_only: bool = False
) -> Supervision:
    """Return what the assistant wrote in its turns from message `first` on, each with the end of the turn.

    last_only: of these turns the last alone, which is its last message.

    Raises:
        RowFault: the template cannot render the row, or what the assistant wrote cannot be told for certain.
    """
    conversation, fitted = template.fitted(conversation)
    if last_only:
        first = max(first, turns(conversation.messages)[-1])
    spans: list[tuple[int, Span]]
    if template.has_markers:
        text, marked = template.render_marked(conversation)
        rendered = with_places(template, conversation, text)
        spans = _attributed(rendered, sorted(span for span in marked if span[0] < span[1]), first)
        if not spans:
            detail = f"its generation markers mark nothing in: {excerpt(text)}"
            raise RowFault("the template marks no assistant text", detail)
    else:
        rendered = with_places(template, conversation, template.render(conversation))
        spans = [(index, _turn(rendered, index)) for index in turns(rendered.messages) if index >= first]
    notes = verified(rendered, spans, first)
    learnt = tuple(_merged([span for _, span in spans]))
    if len(turns(conversation.messages)) < len(conversation.messages) and learnt == ((0, len(rendered.text)),):
        raise RowFault(UNTRUE, f"all of the row would be learnt: {excerpt(rendered.text)}")
    others = tuple(span for _, span in others_of(rendered, first))
    return Supervision(text=rendered.text, spans=learnt, others=others, notes=(*notes, *fitted, *spelt_out(rendered)))


def completion_supervision(
    template: ChatTemplate,
    conversation: Conversation,
    *,
    first: int,
    assistant_only: bool,
    last_only: bool = False,
) -> Supervision:
    """Return what follows the prompt, the messages before `first`, as the generation prompt ends it.

    Where others than the assistant speak after `first` and `assistant_only` is set, its turns alone; with `last_only`
    its last turn alone.

    Raises:
        RowFault: as `assistant_supervision`.
    """
    speakers = {message["role"] for message in conversation.messages[first:]}
    if last_only or (assistant_only and speakers != {"assistant"}):
        return assistant_supervision(template, conversation, first=first, last_only=last_only)
    conversation, notes = template.fitted(conversation)
    rendered = with_places(template, conversation, template.render(conversation))
    span = (_turn_start(rendered, first), len(rendered.text))
    prompt = replace(rendered, places=[*rendered.places[:first]])
    refuse_others(prompt, [span], first)
    if span[0] >= span[1]:
        raise RowFault(UNTRUE, "the template renders nothing after the prompt")
    others = tuple(other for _, other in others_of(prompt, first))
    return Supervision(text=rendered.text, spans=(span,), others=others, notes=(*notes, *spelt_out(rendered)))


def _turn(rendered: Rendered, index: int) -> Span:
    start = _turn_start(rendered, index)
    return start, _turn_end(rendered, index, start)


def _turn_start(rendered: Rendered, index: int) -> int:
    """Return where the turn of message `index` begins: where the model starts to write, after the header."""
    text, template = rendered.text, rendered.template
    behind = rendered.places[index - 1].end if index > 0 else None
    begun = rendered.places[index].start
    if template.bare_header and behind is not None and begun is not None:
        # Both neighbours' places are exact, so the one header between them is this turn's; no render is needed.
        # Where the generation prompt says more than this turn holds, such as the opening of a reasoning block, it
        # ends with what they share.
        position = text.find(template.bare_header, behind, begun)
        if position >= 0:
            shared = common_prefix(template.header, text[position : position + len(template.header)])
            return position + whole_tokens(template, template.header, shared)
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
    raise RowFault(UNTRUE, f"where message {index} begins in: {excerpt(text)}")


def _turn_end(rendered: Rendered, index: int, start: int) -> int:
    """Return where the turn of message `index` ends: after what closes it, before what opens the next."""
    text, template = rendered.text, rendered.template
    if index == len(rendered.messages) - 1:
        return len(text)
    place = rendered.places[index].end
    said = max(start, place or start)
    following = rendered.places[index + 1].start
    calls = bool(rendered.messages[index].get("tool_calls"))
    if template.border and place is not None and following is not None and not calls:
        # What stands between two exact places and opens a turn opens the next one; no render is needed.
        position = text.find(template.border, said, following)
        if position > said:
            return position
    shorter = rendered.beginning(index + 1, generation_prompt=False) or ""
    if text.startswith(shorter) and len(shorter) > said:
        return len(shorter)
    limit = len(text) if following is None else following
    for name in called_names(rendered.messages[index]):
        # A call may stand in a part of the turn that has a header of its own.
        position = text.find(name, said, limit)
        said = position + len(name) if position >= 0 else said
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
    raise RowFault(UNTRUE, f"where message {index} ends in: {excerpt(text)}")


def _attributed(rendered: Rendered, marked: Sequence[Span], first: int) -> list[tuple[int, Span]]:
    """Return each marked span with the assistant's message it belongs to, those of messages before `first` left out.

    It belongs to the message whose content it holds; one without a content (a call, reasoning) to the message whose
    neighbours it lies between.

    Raises:
        RowFault: it cannot be told whether a span belongs to a message before `first`.
    """
    spans: list[tuple[int, Span]] = []
    assistant = turns(rendered.messages)
    for number, (start, end) in enumerate(marked):
        inside = [
            index for index in assistant if (place := rendered.places[index].end) is not None and start < place <= end
        ]
        by_number = assistant[min(number, len(assistant) - 1)]
        candidates = inside[-1:] or [index for index in assistant if _lies_between(rendered, index, (start, end))]
        if len(candidates) != 1 and len({index < first for index in candidates or assistant}) == 2:
            raise RowFault(UNTRUE, f"which turn wrote: {excerpt(rendered.text[start:end])}")
        owner = by_number if by_number in candidates or not candidates else candidates[0]
        if owner >= first:
            spans.append((owner, (start, end)))
    return spans


def _lies_between(rendered: Rendered, index: int, span: Span) -> bool:
    """Return whether a span lies behind all earlier contents and before all later ones, as far as places are known."""
    before = [place.end for place in rendered.places[:index] if place.end is not None]
    after = [place.start for place in rendered.places[index + 1 :] if place.start is not None]
    return span[0] >= max(before, default=0) and span[1] <= min(after, default=len(rendered.text))


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Return the spans in order, empty ones left out and touching ones joined."""
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
