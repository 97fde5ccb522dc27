"""The chat template of a tokenizer: what it writes and how, and conversations rendered to text.

Not for which template it is (`tokenizer_setup.py`), for what is supervised (`spans.py`), nor for tokens (`tokens.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from halo_core.data.examples import Message, RowFault
from halo_core.errors import Problem, Refused

Span = tuple[int, int]
"""Characters from the first up to, not including, the second."""

Arguments: TypeAlias = Literal["both", "object", "text"]
"""The form in which a template takes the arguments of a tool call: an object, JSON text, or both."""

NOTE_ARGUMENTS = "the arguments of its tool calls are given to the template in the form that it expects"
NOTE_NULLS = "arguments of its tool calls are null and written so; a table fills in those of all other calls"

_BRACKETED = re.compile(r"<[^<>\s]+>")
_MARKER = re.compile(r"\{%-?\+?\s*generation\s*[-+]?%\}")
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a template is given: messages, tools, and further variables of the row."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    template_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template ready to render.

    `has_markers`: it says itself, by generation markers, what the assistant writes. `added_tokens` are the texts of
    the tokenizer's added tokens, longest first. `header` is what it writes to open an assistant's turn, `bare_header`
    the part of it that stands before every assistant turn, `border` the added token that opens any turn; each empty
    where the template does not show one. `arguments`: the form in which it takes the arguments of tool calls.
    `special_tokens` are the texts that the tokenizer reads as special tokens.
    """

    tokenizer: Any
    has_markers: bool
    writes_date: bool
    added_tokens: tuple[str, ...]
    special_tokens: frozenset[str]
    arguments: Arguments = "both"
    header: str = ""
    bare_header: str = ""
    border: str = ""

    def render(self, conversation: Conversation, *, generation_prompt: bool = False) -> str:
        """Return the text of a conversation; with `generation_prompt`, up to where the assistant would begin.

        Raises:
            RowFault: the template cannot render it, with the template's own words.
        """
        return self._rendered(conversation, generation_prompt=generation_prompt, marked=False)[0]

    def render_marked(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Return the text and the spans between the template's generation markers.

        Raises:
            RowFault: as `render`.
        """
        return self._rendered(conversation, generation_prompt=False, marked=True)

    def fitted(self, conversation: Conversation) -> tuple[Conversation, tuple[str, ...]]:
        """Return the conversation as this template takes it, and what a person should know of it.

        Sets write the arguments of a tool call as an object or as JSON text; a template that takes only one of them
        fails at the other, or writes it wrongly (quoted twice, in two pairs of braces).

        Raises:
            RowFault: arguments that are no JSON object, where the template takes objects.
        """
        notes = (NOTE_NULLS,) if any(map(_has_nulls, conversation.messages)) else ()
        if self.arguments == "both":
            return conversation, notes
        messages = tuple(_with_arguments(message, self.arguments) for message in conversation.messages)
        if all(new is old for new, old in zip(messages, conversation.messages, strict=True)):
            return conversation, notes
        return replace(conversation, messages=messages), (NOTE_ARGUMENTS, *notes)

    def special_tokens_in(self, text: str) -> set[str]:
        """Return the special tokens that a text spells out, which the tokenizer reads as such wherever they stand."""
        found = {token for token in _BRACKETED.findall(text) if token in self.special_tokens}
        return found.union(token for token in self._others_special if token in text)

    @cached_property
    def _others_special(self) -> tuple[str, ...]:
        """The special tokens in another shape than `<...>`; by their shape the others are found in one pass."""
        return tuple(token for token in self.special_tokens if not _BRACKETED.fullmatch(token))

    def _rendered(self, conversation: Conversation, *, generation_prompt: bool, marked: bool) -> tuple[str, list[Span]]:
        tools: list[Any] | None = None if conversation.tools is None else list(conversation.tools)
        # Variables of the row win over the tokenizer's own, as in apply_chat_template, which also comes down to this
        # call; calling it here gives the text and the marked spans without tokenising, so rows tokenise in batches.
        variables = {**self.tokenizer.special_tokens_map, **(conversation.template_kwargs or {})}
        try:
            # Annotated as text there, although it returns the texts and the spans.
            rendered: Any = render_jinja_template(
                conversations=[list(conversation.messages)],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(None, tools),
                return_assistant_tokens_mask=marked,
                add_generation_prompt=generation_prompt,
                **variables,
            )
        except _RENDER_ERRORS as error:
            raise RowFault("the chat template cannot render the row", str(error).strip() or repr(error)) from error
        texts, spans = rendered
        return texts[0], [(start, end) for start, end in spans[0]] if marked else []


def chat_template_of(tokenizer: Any, first_row: str) -> ChatTemplate:
    """Return the tokenizer's template, compiled and probed; `first_row` is the row that needs it.

    Raises:
        Refused: the tokenizer has no template, or one that is not valid.
    """
    if not getattr(tokenizer, "chat_template", None):
        why = f"{first_row} is a conversation and the tokenizer has no chat template"
        remedy = "name a .jinja file or a tokenizer's folder that has one, or give prompt and completion as text"
        raise Refused(Problem(key="chat_template_path", value=None, why=why, remedy=remedy))
    try:
        source = tokenizer.get_chat_template(None, None)
    except ValueError as error:
        raise Refused(_invalid(str(error).split("\n")[0])) from error
    added = sorted(
        {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}, key=lambda token: (-len(token), token)
    )
    bare = ChatTemplate(
        tokenizer=tokenizer,
        has_markers=_MARKER.search(source) is not None,
        writes_date="strftime_now" in source,
        added_tokens=tuple(added),
        special_tokens=_special_tokens(tokenizer),
    )
    try:
        prompt = bare.render(_probe("user"), generation_prompt=True)
    except RowFault as fault:
        # A template that refuses the probe may render the rows: only one that does not compile is refused here.
        cause = fault.__cause__
        if isinstance(cause, jinja2.TemplateSyntaxError):
            near = source.split("\n")[cause.lineno - 1].strip()
            raise Refused(_invalid(f"line {cause.lineno}: {cause.message}: {near[:200]}")) from fault
        return replace(bare, arguments=_arguments_taken(bare))
    header, bare_header, border = _headers(bare, prompt)
    return replace(bare, arguments=_arguments_taken(bare), header=header, bare_header=bare_header, border=border)


def common_prefix(one: str, other: str) -> int:
    """Return the number of leading characters that two texts share."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _probe(*roles: str) -> Conversation:
    return Conversation(messages=tuple({"role": role, "content": "halo"} for role in roles))


def _special_tokens(tokenizer: Any) -> frozenset[str]:
    """Return the texts that the tokenizer reads as special tokens."""
    decoder = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset({*tokenizer.all_special_tokens, *(token.content for token in decoder.values() if token.special)})


_PROBED_ARGUMENTS = {"halo": "moon"}


def _arguments_taken(template: ChatTemplate) -> Arguments:
    """Return in which form the template writes the arguments of a tool call as they are meant."""

    def written(arguments: Any) -> str | None:
        call = {"type": "function", "id": "call00001", "function": {"name": "probe", "arguments": arguments}}
        messages: tuple[Message, ...] = (
            {"role": "user", "content": "halo"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        )
        try:
            return template.render(Conversation(messages=messages))
        except RowFault:
            return None

    of_object, of_text = written(_PROBED_ARGUMENTS), written(json.dumps(_PROBED_ARGUMENTS))
    if of_object == of_text:
        return "both"
    # A template that joins texts fails at an object, or writes it as Python does.
    if of_object is None or str(_PROBED_ARGUMENTS) in of_object:
        return "text"
    return "object"


def _has_nulls(message: Message) -> bool:
    """Return whether a call of a message has an argument that is null, in an object."""
    given = [call.get("function", call).get("arguments") for call in message.get("tool_calls") or ()]
    return any(isinstance(arguments, Mapping) and None in arguments.values() for arguments in given)


def _with_arguments(message: Message, form: Arguments) -> Message:
    """Return the message with the arguments of its tool calls in this form; the very message where they are."""
    calls = message.get("tool_calls")
    if not calls or message["role"] != "assistant":
        return message
    changed = [_call_with_arguments(call, form) for call in calls]
    if all(new is old for new, old in zip(changed, calls, strict=True)):
        return message
    return {**message, "tool_calls": changed}


def _call_with_arguments(call: Mapping[str, Any], form: Arguments) -> Mapping[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if form == "text" and isinstance(arguments, Mapping):
        given: Any = json.dumps(arguments, ensure_ascii=False)
    elif form == "object" and isinstance(arguments, str):
        given = _object_in(arguments, str(function.get("name")))
    else:
        return call
    function = {**function, "arguments": given}
    return {**call, "function": function} if "function" in call else function


def _object_in(arguments: str, name: str) -> Mapping[str, Any]:
    try:
        given = json.loads(arguments or "{}")
    except ValueError as error:
        raise RowFault("arguments of a tool call that are no JSON", f"those of {name}: {error}") from None
    if not isinstance(given, Mapping):
        raise RowFault("arguments of a tool call that are no object", f"those of {name}: {arguments[:60]}")
    return given


def _headers(template: ChatTemplate, prompt: str) -> tuple[str, str, str]:
    """Return (header, bare header, border) as the probes show them; `prompt` is a user's turn with the header."""
    asked = template.render(_probe("user"))
    # Some templates end a text that is not to be continued with the end-of-text token.
    endings = ["", *(token for token in template.added_tokens if asked.endswith(token))]
    for ending in endings:
        opened = asked.removesuffix(ending)
        if prompt.startswith(opened) and len(prompt) > len(opened):
            header = prompt[len(opened) :]
            break
    else:
        return "", "", ""
    try:
        answered = template.render(_probe("user", "assistant", "user"))
    except RowFault:
        answered = ""
    shared = whole_tokens(template, prompt, common_prefix(prompt, answered))
    border = next((token for token in template.added_tokens if header.startswith(token)), "")
    return header, prompt[len(opened) : shared], border if border and border in opened else ""


def whole_tokens(template: ChatTemplate, text: str, end: int) -> int:
    """Return the last position up to `end` that follows white space or an added token, or `end` at the text's end.

    Two texts may share the first letters of what differs (`<think>` and `<b>`): those are not shared in meaning.
    """
    if end >= len(text):
        return end
    while end > 0 and not text[end - 1].isspace() and not text.endswith(template.added_tokens, 0, end):
        end -= 1
    return end


def _invalid(why: str) -> Problem:
    return Problem(
        key="chat_template_path",
        value=None,
        why=f"the chat template is not valid ({why})",
        remedy="correct the template, or give another one by chat_template_path",
    )


def turns(messages: Sequence[Message]) -> list[int]:
    """Return the indices of the assistant's messages."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]
