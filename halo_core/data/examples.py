"""Turns one raw row, as it stands in a file, into a checked example of one of three kinds, or says what is wrong.

Not for reading files (`read.py`) nor for rendering (`template.py`).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["messages", "prompt+completion", "text"]
Message: TypeAlias = dict[str, Any]

KINDS: tuple[Kind, ...] = ("messages", "prompt+completion", "text")
EXPECTED = "messages, or prompt and completion, or text"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Where an assistant message may carry its reasoning. Source: the names transformers treats as the same field."""

_MEDIA = ("image", "images", "image_url", "input_image", "video", "videos", "audio", "audios", "input_audio")
_MEDIA_COLUMNS = (*_MEDIA, "pixel_values")
_OTHER_FORMATS = {
    "conversations": "a column conversations with from and value: write it as messages with role and content",
    "instruction": "instruction rows: write them as prompt and completion",
    "chosen": "rows of preferences: this method learns from one answer, write it as completion",
    "input_ids": "rows that are tokenised already: give the text, the tokens are made with the model's own tokenizer",
}


class RowFault(Exception):
    """A row that cannot be used: `reason` groups it with others in the account, `detail` is about this one row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        # Both arguments as they are, so that a fault that travels from another process is made anew from them.
        super().__init__(reason, detail)

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """Return reason and detail as one line."""
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class NoKind(RowFault):
    """A row without the columns of any kind."""


class Media(RowFault):
    """A row with images, video or sound: never skipped, because leaving them out would train on another question."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One checked row: `messages` in full, or `prompt` and `completion` (both text or both messages), or `text`.

    Contents of messages are strings; `tools` and `template_kwargs` go to the chat template as they are.
    """

    kind: Kind
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[Message, ...] = ""
    completion: str | tuple[Message, ...] = ""
    text: str = ""
    tools: tuple[Mapping[str, Any], ...] | None = None
    template_kwargs: Mapping[str, Any] | None = None


def kind_of(values: Mapping[str, Any]) -> Kind | None:
    """Return the kind of a row by the columns it fills, or None.

    A row that fills the columns of several kinds is read as prompt and completion before messages before text, the
    order in which TRL looks.
    """
    if values.get("prompt") is not None and values.get("completion") is not None:
        return "prompt+completion"
    if values.get("messages") is not None:
        return "messages"
    if values.get("text") is not None:
        return "text"
    return None


def columns_read(kind: Kind) -> tuple[str, ...]:
    """Return the columns that are read of a row of this kind."""
    if kind == "text":
        return ("text",)
    main = ("messages",) if kind == "messages" else ("prompt", "completion")
    return (*main, "tools", "chat_template_kwargs")


def example_of(values: Mapping[str, Any]) -> Example:
    """Return the checked example of one raw row.

    Raises:
        RowFault: what is wrong, in the words of the file; `NoKind` and `Media` are its special cases.
    """
    for column in _MEDIA_COLUMNS:
        if values.get(column) is not None and values[column] != []:
            raise Media("a column of images, video or sound", f"{column}; this version trains on text alone")
    kind = kind_of(values)
    if kind is None:
        raise NoKind("none of the expected columns", _columns_found(values))
    if kind == "text":
        return Example(kind=kind, text=_filled_text(values["text"], "text"))
    tools = _tools(values.get("tools"))
    template_kwargs = values.get("chat_template_kwargs")
    if template_kwargs is not None and not isinstance(template_kwargs, Mapping):
        raise RowFault("wrong type", f"chat_template_kwargs is {_told(template_kwargs)}, expected an object")
    if kind == "messages":
        messages = _messages(values["messages"], "messages")
        if not any(message["role"] == "assistant" for message in messages):
            raise RowFault("no assistant message", f"the roles are {', '.join(m['role'] for m in messages)}")
        return Example(kind=kind, messages=messages, tools=tools, template_kwargs=template_kwargs)
    prompt, completion = _prompt_and_completion(values["prompt"], values["completion"])
    return Example(kind=kind, prompt=prompt, completion=completion, tools=tools, template_kwargs=template_kwargs)


def hint_for(columns: Sequence[str]) -> str:
    """Return what to do about a file with these columns and none of the expected ones."""
    known = [hint for column, hint in _OTHER_FORMATS.items() if column in columns]
    near = [
        f"rename {column} to {match[0]}"
        for column in columns
        if (match := difflib.get_close_matches(column, ("messages", "prompt", "completion", "text"), 1, 0.75))
        and match[0] not in columns
    ]
    return "; ".join([*known, *near]) or f"give rows with {EXPECTED}"


def _prompt_and_completion(
    prompt: Any, completion: Any
) -> tuple[str, str] | tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Return both sides checked: two texts or two lists of messages."""
    if isinstance(prompt, str) != isinstance(completion, str):
        raise RowFault(
            "wrong type",
            f"prompt is {_told(prompt)} and completion is {_told(completion)}, expected two texts or two lists",
        )
    if isinstance(prompt, str):
        return prompt, _filled_text(completion, "completion")
    question, answer = _messages(prompt, "prompt"), _messages(completion, "completion")
    if not any(message["role"] == "assistant" for message in answer):
        raise RowFault("no assistant message", f"the completion's roles are {', '.join(m['role'] for m in answer)}")
    return question, answer


def _messages(value: Any, column: str) -> tuple[Message, ...]:
    """Return the messages of a column, each checked, contents as strings, fields without a value left out."""
    if not isinstance(value, list | tuple):
        raise RowFault("wrong type", f"{column} is {_told(value)}, expected a list of messages")
    if not value:
        raise RowFault("empty list of messages", column)
    return tuple(_message(message, f"{column}[{index}]") for index, message in enumerate(value))


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, Mapping):
        raise RowFault("wrong type", f"{place} is {_told(value)}, expected an object with role and content")
    # Tables fill the fields that a message lacks with nulls, which templates would write as text.
    message = {key: field for key, field in value.items() if field is not None}
    role = message.get("role")
    if role is None:
        remedy = " (from and value are read as nothing here: write role and content)" if "from" in message else ""
        raise RowFault("a message without role", f"{place} has {', '.join(message) or 'no field'}{remedy}")
    if role not in ROLES:
        near = difflib.get_close_matches(str(role).lower(), ROLES, 1)
        meant = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(ROLES)}"
        raise RowFault("unknown role", f"{place}.role is {role!r}, {meant}")
    if message.get("weight") not in (None, 1):
        raise RowFault(
            "a message with a weight", f"{place}.weight is {message['weight']!r}; weights per message are not read"
        )
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{place}.tool_calls")
    if "content" in message:
        message["content"] = _content(message["content"], f"{place}.content")
    speaks_otherwise = message.get("tool_calls") or any(message.get(field) for field in REASONING_FIELDS)
    if role == "assistant" and not speaks_otherwise and not message.get("content", "").strip():
        raise RowFault("empty assistant message", place)
    if role != "assistant" and "content" not in message:
        raise RowFault("a message without content", place)
    return message


def _tool_calls(value: Any, place: str) -> list[Mapping[str, Any]]:
    """Return the calls of a message, given as a list or as JSON text, fields without a value left out.

    Their arguments stay as they are, an object or JSON text: an object may mean its nulls.
    """
    value = _from_json(value, place)
    if not isinstance(value, list | tuple):
        raise RowFault("wrong type", f"{place} is {_told(value)}, expected a list of calls")
    calls: list[Mapping[str, Any]] = []
    for index, given in enumerate(value):
        function = given.get("function", given) if isinstance(given, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            detail = f"{place}[{index}] is {_told(given)}, expected an object with function, name and arguments"
            raise RowFault("wrong type", detail)
        arguments = function.get("arguments")
        if not isinstance(arguments, str | Mapping | None):
            detail = f"{place}[{index}]'s arguments are {_told(arguments)}, expected an object or JSON text"
            raise RowFault("wrong type", detail)
        calls.append(
            {
                key: {name: part for name, part in field.items() if part is not None} if key == "function" else field
                for key, field in given.items()
                if field is not None
            }
        )
    return calls


def _from_json(value: Any, place: str) -> Any:
    """Return a value that tables keep as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RowFault("wrong type", f"{place} is text but not JSON ({error})") from None


def _content(value: Any, place: str) -> str:
    """Return a content as text: a string, or a list of text parts joined as templates for such lists join them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise RowFault("wrong type", f"{place} is {_told(value)}, expected text")
    texts: list[str] = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _MEDIA:
            raise Media("a message with images, video or sound", f"{place}[{index}]; this version trains on text alone")
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise RowFault("wrong type", f"{place}[{index}] is {_told(part)}, expected text or a part of type text")
        texts.append(text)
    return "".join(texts)


def _tools(value: Any) -> tuple[Mapping[str, Any], ...] | None:
    """Return the tools of a row, given as a list or as JSON text (tables keep them so)."""
    if value is None or value in ("", []):
        return None
    value = _from_json(value, "tools")
    if not isinstance(value, list | tuple) or not all(isinstance(tool, Mapping) for tool in value):
        raise RowFault("wrong type", f"tools is {_told(value)}, expected a list of objects")
    return tuple(value) or None


def _filled_text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise RowFault("wrong type", f"{column} is {_told(value)}, expected text")
    if not value.strip():
        raise RowFault("empty text", column)
    return value


def _columns_found(values: Mapping[str, Any]) -> str:
    """Return why a row has no kind, by its columns."""
    filled = [column for column, value in values.items() if value is not None]
    if "prompt" in filled:
        return "prompt without completion"
    if "completion" in filled:
        return "completion without prompt"
    return f"found {', '.join(filled) or 'no column with a value'}; expected {EXPECTED}"


def _told(value: Any) -> str:
    """Return a value's type in words, with the value where it is short."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", dict: "an object", list: "a list"}
    name = "null" if value is None else names.get(type(value), type(value).__name__)
    short = json.dumps(value, ensure_ascii=False, default=repr)
    return f"{name} ({short})" if value is not None and len(short) <= 40 else name
