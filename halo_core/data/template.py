"""The chat template of a tokenizer: which one, set up from the configuration, and rendered to text.

Not for deciding what is supervised (`spans.py`) nor for tokens (`tokens.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from halo_core.config import RunConfig
from halo_core.data.examples import Message, RowFault
from halo_core.errors import Problem, Refused

Span = tuple[int, int]
"""Characters from the first up to, not including, the second."""

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
    where the template does not show one.
    """

    tokenizer: Any
    has_markers: bool
    writes_date: bool
    added_tokens: tuple[str, ...]
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


def set_up_tokenizer(config: RunConfig, tokenizer: Any) -> None:
    """Give the tokenizer the template that `chat_template_path` names, in place, so that it is saved with it.

    Raises:
        Refused: nothing is there, or no template, or one that writes tokens which the tokenizer does not have.
    """
    if config.chat_template_path is not None:
        tokenizer.chat_template = _template_at(config.chat_template_path, tokenizer.get_vocab())


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
    )
    try:
        prompt = bare.render(_probe("user"), generation_prompt=True)
    except RowFault as fault:
        # A template that refuses the probe may render the rows: only one that does not compile is refused here.
        cause = fault.__cause__
        if isinstance(cause, jinja2.TemplateSyntaxError):
            near = source.split("\n")[cause.lineno - 1].strip()
            raise Refused(_invalid(f"line {cause.lineno}: {cause.message}: {near[:200]}")) from fault
        return bare
    header, bare_header, border = _headers(bare, prompt)
    return ChatTemplate(
        tokenizer=tokenizer,
        has_markers=bare.has_markers,
        writes_date=bare.writes_date,
        added_tokens=bare.added_tokens,
        header=header,
        bare_header=bare_header,
        border=border,
    )


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


def _template_at(given: str, vocabulary: Mapping[str, int]) -> str:
    """Return the template in a .jinja file, or that of another tokenizer, by its folder or hub id."""
    path = Path(given).expanduser()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if not path.is_dir() and (given.startswith((".", "/", "~")) or given.count("/") > 1 or path.suffix == ".jinja"):
        remedy = "give a .jinja file, or the folder or hub id of a tokenizer"
        raise Refused(Problem(key="chat_template_path", value=given, why="no such file or folder", remedy=remedy))
    from transformers import AutoTokenizer

    try:
        other = AutoTokenizer.from_pretrained(str(path) if path.is_dir() else given)
    except (OSError, ValueError) as error:
        why = f"no tokenizer can be read there: {str(error).strip().splitlines()[0]}"
        remedy = "give a .jinja file, or the folder or hub id of a tokenizer"
        raise Refused(Problem(key="chat_template_path", value=given, why=why, remedy=remedy)) from error
    if not other.chat_template:
        why = "this tokenizer has no chat template"
        raise Refused(Problem(key="chat_template_path", value=given, why=why, remedy="give a .jinja file"))
    template = other.get_chat_template(None, None)
    missing = [token for token in other.get_added_vocab() if token in template and token not in vocabulary]
    if missing:
        why = f"its template writes tokens that the model's tokenizer does not have: {', '.join(missing)}"
        remedy = "give a .jinja file that uses the tokenizer's own tokens; adding tokens is not built yet"
        raise Refused(Problem(key="chat_template_path", value=given, why=why, remedy=remedy, kind="not built"))
    return str(template)


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
