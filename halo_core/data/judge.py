"""Judges records a chunk at a time: each becomes a row of tokens, or the reason why it is none.

Not for counting (`tally.py`) nor for length limits (`keep.py`): what is said here of a row depends on that row alone,
so any number of processes may say it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from halo_core.config import RunConfig
from halo_core.data.examples import Example, Kind, RowFault, columns_read, example_of
from halo_core.data.read import Record
from halo_core.data.spans import Supervision, assistant_supervision, completion_supervision, whole_supervision
from halo_core.data.template import ChatTemplate, Conversation, chat_template_of
from halo_core.data.tokens import Tokens, tokens_of
from halo_core.errors import Problem, Refused

NOTE_NO_END = "the tokenizer has no end token (eos_token), so none is learnt"

ROWS_AT_ONCE = 256
"""Records of a chunk."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What became of one record: `fault`, or tokens (int32) with a flag each.

    kind: None where the record never got so far. unread: columns that nobody reads. notes: what a person should know
    of the row. joins: a token joins what is learnt with what comes before.
    """

    kind: Kind | None
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fault: RowFault | None = None
    input_ids: array[int] = field(default_factory=lambda: array("i"))
    supervised: bytes = b""
    joins: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a chunk: one answer per record, or the problems that stop all reading.

    has_markers, writes_date: facts of the chat template, None where no record needed it.
    """

    rows: tuple[Judged, ...] = ()
    problems: tuple[Problem, ...] = ()
    has_markers: bool | None = None
    writes_date: bool | None = None


@dataclass(kw_only=True)
class Judge:
    """Judges chunks under one configuration; compiles the chat template when the first conversation needs it."""

    config: RunConfig
    tokenizer: Any
    template: ChatTemplate | None = None

    def __call__(self, records: Sequence[Record], *, tokenise: bool = True) -> Outcome:
        """Return the outcome of a chunk of records, none of them blank.

        tokenise: false where it is certain that the rows are refused, so that only faults are still looked for.
        """
        try:
            halves = [self._rendered(record) for record in records]
        except Refused as refused:
            return Outcome(problems=refused.problems)
        rows = self._tokenised(halves) if tokenise else [half.judged for half in halves]
        return Outcome(
            rows=tuple(rows),
            has_markers=None if self.template is None else self.template.has_markers,
            writes_date=None if self.template is None else self.template.writes_date,
        )

    def _rendered(self, record: Record) -> _Half:
        """Return a record as text with what is learnt of it, or judged where it has a fault."""
        kind: Kind | None = None
        unread: tuple[str, ...] = ()
        try:
            if record.values is None:
                raise record.fault or AssertionError("a record has values or a fault")
            example = example_of(record.values)
            kind = example.kind
            read = columns_read(kind)
            unread = tuple(
                str(column) for column, value in record.values.items() if value is not None and column not in read
            )
            if is_chat(example):
                self.template = self.template or chat_template_of(self.tokenizer, record.place)
                supervision = _chat_supervision(self.template, example, self.config)
            else:
                supervision = _text_supervision(example, self.config, self.tokenizer.eos_token)
            _refuse_half_characters(supervision.text)
        except RowFault as fault:
            return _Half(judged=Judged(kind=kind, unread=unread, fault=fault))
        judged = Judged(kind=kind, unread=unread, notes=tuple(supervision.notes))
        return _Half(judged=judged, supervision=supervision, is_chat=is_chat(example))

    def _tokenised(self, halves: Sequence[_Half]) -> list[Judged]:
        """Return the rows with their tokens; conversations and plain texts are each tokenised in one call."""
        rows = [half.judged for half in halves]
        for chats in (True, False):
            own = [
                (index, half.supervision)
                for index, half in enumerate(halves)
                if half.supervision is not None and half.is_chat == chats
            ]
            made = tokens_of(
                self.tokenizer,
                [supervision.text for _, supervision in own],
                [supervision.spans for _, supervision in own],
                others=[supervision.others for _, supervision in own],
                add_special_tokens=not chats,
            )
            for (index, _), tokens in zip(own, made, strict=True):
                rows[index] = _with_tokens(rows[index], tokens)
        return rows


@dataclass(frozen=True, kw_only=True)
class _Half:
    """A record that waits for its tokens, or has a fault."""

    judged: Judged
    supervision: Supervision | None = None
    is_chat: bool = False


def is_chat(example: Example) -> bool:
    """Return whether a chat template renders the row."""
    return example.kind == "messages" or (example.kind == "prompt+completion" and not isinstance(example.prompt, str))


def _with_tokens(row: Judged, made: Tokens | RowFault) -> Judged:
    if isinstance(made, RowFault):
        return Judged(kind=row.kind, unread=row.unread, notes=row.notes, fault=made)
    return Judged(
        kind=row.kind,
        unread=row.unread,
        notes=row.notes,
        input_ids=array("i", made.input_ids),
        supervised=bytes(made.supervised),
        joins=made.joins,
    )


def _chat_supervision(template: ChatTemplate, example: Example, config: RunConfig) -> Supervision:
    """Return the rendered conversation of a row with what is learnt of it."""
    prompt = example.prompt if isinstance(example.prompt, tuple) else ()
    completion = example.completion if isinstance(example.completion, tuple) else ()
    conversation = Conversation(
        messages=example.messages or (*prompt, *completion),
        tools=example.tools,
        template_kwargs=example.template_kwargs,
    )
    if example.kind == "messages":
        if config.assistant_only_loss:
            return assistant_supervision(template, conversation, last_only=config.train_on_last_assistant_only)
    elif config.completion_only_loss is not False:
        return completion_supervision(
            template,
            conversation,
            first=len(prompt),
            assistant_only=config.assistant_only_loss,
            last_only=config.train_on_last_assistant_only,
        )
    return whole_supervision(template, conversation)


def _text_supervision(example: Example, config: RunConfig, eos_token: str | None) -> Supervision:
    """Return a plain text, ended by the end token as TRL ends it, with what is learnt of it."""
    text = example.text if example.kind == "text" else f"{example.prompt}{example.completion}"
    notes = () if eos_token else (NOTE_NO_END,)
    ended = text if not eos_token or text.endswith(eos_token) else f"{text}{eos_token}"
    if example.kind == "text" or config.completion_only_loss is False:
        return Supervision(text=ended, spans=None, notes=notes)
    return Supervision(text=ended, spans=((len(example.prompt), len(ended)),), notes=notes)


def _refuse_half_characters(text: str) -> None:
    """Refuse a text that no tokenizer takes: JSON can write one half of a character that UTF-16 makes of two."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as fault:
        half = ascii(text[fault.start])[1:-1]
        raise RowFault("half a character", f"{half} stands alone, which is no Unicode text") from None
