"""From the configuration to tokenised rows and their account, before any model is loaded.

Not for batches (`collate.py`) nor for their order (`order.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halo_core.config import RunConfig
from halo_core.data.account import Account, SplitAccount
from halo_core.data.examples import Example, Kind, RowFault, columns_read, example_of
from halo_core.data.rows import Row, Rows
from halo_core.data.sources import Source, evaluation_sources, training_sources
from halo_core.data.spans import Supervision, assistant_supervision, completion_supervision
from halo_core.data.tally import Tally
from halo_core.data.template import ChatTemplate, Conversation, Span, chat_template_of, set_up_tokenizer
from halo_core.data.tokens import Tokens, tokens_of
from halo_core.errors import Problem, Refused

NOTE_JOINS = "a token joins the end of the prompt and the beginning of what is learnt; a prompt alone has other tokens"
NOTE_NO_END = "the tokenizer has no end token (eos_token), so none is learnt"
NOTE_DATE = "the chat template writes today's date: a run resumed on another day sees other tokens"

_ROWS_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Rows ready to be batched, and the account of how they came about."""

    train: Sequence[Row]
    evaluation: Sequence[Row] | None
    account: Account


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A row as text, waiting for its tokens."""

    row_id: int
    place: str
    file: str
    kind: Kind
    text: str
    spans: tuple[Span, ...] | None
    is_chat: bool


def prepare(config: RunConfig, tokenizer: Any, rows: Iterable[Mapping[str, Any]] | None = None) -> Prepared:
    """Return the tokenised rows of a run: a pure function of the configuration, the tokenizer and the data.

    `config` is the run's configuration; `tokenizer` a transformers tokenizer, on which `chat_template_path`
    is set in place; `rows`, where given, stand in for `dataset_name`.

    Raises:
        Refused: everything found wrong with the data, all at once: nothing to read, bad rows under
            `on_bad_row: error`, rows over `max_length` under `overlong: error`, no row left, a template that does not
            tell what the assistant wrote.
    """
    problems: list[Problem] = []

    def collected(step: Any, *arguments: Any) -> Any:
        try:
            return step(*arguments)
        except Refused as refused:
            problems.extend(refused.problems)
            return None

    collected(set_up_tokenizer, config, tokenizer)
    training = collected(training_sources, config, rows)
    evaluated = collected(evaluation_sources, config, rows is not None)
    if problems:
        raise Refused(problems)
    train = collected(_prepare_split, "training", training, config, tokenizer)
    evaluation = collected(_prepare_split, "evaluation", evaluated, config, tokenizer) if evaluated else None
    if problems:
        raise Refused(problems)
    notes: list[str] = []
    if config.eval_dataset and evaluated is None:
        notes.append("eval_dataset is not read, because eval_strategy is no")
    account = Account(train=train[1], evaluation=evaluation[1] if evaluation else None, notes=tuple(notes))
    return Prepared(train=train[0], evaluation=evaluation[0] if evaluation else None, account=account)


def pad_id_of(tokenizer: Any) -> int:
    """Return the id that fills the end of short rows; any will do, because padding is known by its position."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0


def _prepare_split(
    name: str, sources: Sequence[Source], config: RunConfig, tokenizer: Any
) -> tuple[Rows, SplitAccount]:
    """Return the rows of one split and their account, or raise all that is wrong with it."""
    tally = Tally(name=name, on_bad_row=config.on_bad_row)
    keeper = _Keeper(tally=tally, max_length=config.max_length, overlong=config.overlong)
    pieces: list[_Piece] = []
    template: ChatTemplate | None = None

    for source in sources:
        for record in source.records():
            if record.is_blank:
                tally.blank_lines += 1
                continue
            row_id = tally.rows_read
            tally.read(record, source.key)
            try:
                if record.values is None:
                    raise record.fault or AssertionError("a record has values or a fault")
                example = example_of(record.values)
                tally.is_of(record, example.kind)
                for column, value in record.values.items():
                    if value is not None and column not in columns_read(example.kind):
                        tally.note(f"column {column} is not read")
                if _is_chat(example):
                    template = template or chat_template_of(tokenizer, record.place)
                    supervision = _chat_supervision(template, example, config)
                else:
                    supervision = _text_supervision(example, config, tokenizer.eos_token)
                _refuse_half_characters(supervision.text)
            except RowFault as fault:
                tally.fault(record.file, record.place, fault)
                continue
            for note in supervision.notes:
                tally.note(note)
            pieces.append(
                _Piece(
                    row_id=row_id,
                    place=record.place,
                    file=record.file,
                    kind=example.kind,
                    text=supervision.text,
                    spans=supervision.spans,
                    is_chat=_is_chat(example),
                )
            )
            if len(pieces) == _ROWS_AT_ONCE:
                _keep(pieces, keeper, tokenizer)
                pieces.clear()
    _keep(pieces, keeper, tokenizer)

    if template is not None and template.writes_date:
        tally.notes[NOTE_DATE] = tally.rows_read
    problems = [*tally.problems(), *keeper.problems(sources[0].key)]
    if problems:
        raise Refused(problems)
    return keeper.rows, keeper.account(_learnt(config, template))


def _is_chat(example: Example) -> bool:
    return example.kind == "messages" or (example.kind == "prompt+completion" and not isinstance(example.prompt, str))


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
            return assistant_supervision(template, conversation)
    elif config.completion_only_loss is not False:
        only = config.assistant_only_loss
        return completion_supervision(template, conversation, first=len(prompt), assistant_only=only)
    return Supervision(text=template.render(conversation), spans=None)


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


def _learnt(config: RunConfig, template: ChatTemplate | None) -> dict[str, str]:
    """Return what is learnt of each kind of row, in words."""
    marked = template is not None and template.has_markers
    source = "by the template's generation markers" if marked else "told from renders, the template has no markers"
    return {
        "messages": f"the assistant's turns, {source}"
        if config.assistant_only_loss
        else "every token (assistant_only_loss: false)",
        "prompt+completion": "the completion"
        if config.completion_only_loss is not False
        else "every token (completion_only_loss: false)",
        "text": "every token",
    }


def _keep(pieces: Sequence[_Piece], keeper: _Keeper, tokenizer: Any) -> None:
    """Tokenise the pieces, conversations and plain texts each in one call, and hand them on in their order."""
    if keeper.tally.refuses:
        return
    made: dict[int, Tokens | RowFault] = {}
    for is_chat in (True, False):
        own = [piece for piece in pieces if piece.is_chat == is_chat]
        tokens = tokens_of(
            tokenizer,
            [piece.text for piece in own],
            [piece.spans for piece in own],
            add_special_tokens=not is_chat,
        )
        made.update(zip((piece.row_id for piece in own), tokens, strict=True))
    for piece in pieces:
        keeper.add(piece, made[piece.row_id])


class _Keeper:
    """Takes tokenised rows, holds them against `max_length`, and keeps those from which something can be learnt."""

    def __init__(self, *, tally: Tally, max_length: int | None, overlong: str) -> None:
        self.rows = Rows()
        self.tally = tally
        self._max_length = max_length
        self._overlong = overlong
        self._tokens = self._supervised = self._cut_rows = self._cut_tokens = self._longest = 0
        self._over: list[tuple[str, int]] = []
        # The smallest max_length that would have left one row.
        self._needed: int | None = None

    def add(self, piece: _Piece, made: Tokens | RowFault) -> None:
        """Keep a row, cut it, or drop it and count why."""
        if isinstance(made, RowFault):
            self.tally.fault(piece.file, piece.place, made)
            return
        ids, flags = made.input_ids, made.supervised
        length = len(ids)
        reason = "nothing to learn: no token follows the first"
        if self._max_length is not None and length > self._max_length:
            if self._overlong == "error":
                self._over.append((piece.place, length))
            if self._overlong != "truncate":
                self._need(length)
                why = f"longer than max_length {self._max_length}"
                self.tally.drop(why, f"{piece.place}, {length} tokens", length)
                return
            self._need(flags.index(True, 1) + 1 if any(flags[1:]) else length)
            ids, flags = ids[: self._max_length], flags[: self._max_length]
            reason = f"nothing to learn within max_length {self._max_length}"
        row = Row(row_id=piece.row_id, input_ids=ids, supervised=flags)
        if row.num_targets == 0:
            self.tally.drop(reason, f"{piece.place}, {length} tokens", length)
            return
        if made.joins:
            self.tally.note(NOTE_JOINS)
        self.rows.add(row)
        self.tally.kept[piece.kind] = self.tally.kept.get(piece.kind, 0) + 1
        self._tokens += len(ids)
        self._supervised += row.num_targets
        self._longest = max(self._longest, len(ids))
        if len(ids) < length:
            self._cut_rows += 1
            self._cut_tokens += length - len(ids)

    def _need(self, length: int) -> None:
        self._needed = length if self._needed is None else min(self._needed, length)

    def problems(self, key: str) -> list[Problem]:
        """Return why the kept rows are not enough: some are too long for `overlong: error`, or none is left."""
        if self._over:
            first, length = self._over[0]
            longest = max(length for _, length in self._over)
            why = (
                f"{len(self._over)} of {self.tally.rows_read} {self.tally.name} rows are longer; the first is "
                f"{first} with {length} tokens, the longest has {longest}"
            )
            remedy = f"raise max_length to {longest}, or set overlong: drop or truncate"
            return [Problem(key="max_length", value=self._max_length, why=why, remedy=remedy)]
        if self.rows or self.tally.refuses or self.tally.problems():
            return []
        told = "; ".join(
            f"{dropped.rows} dropped: {reason} (first: {dropped.first})"
            for reason, dropped in self.tally.dropped.items()
        )
        why = f"none of the {self.tally.rows_read} {self.tally.name} rows is left: {told}"
        if self._needed is not None:
            remedy = f"raise max_length to {self._needed} or more"
            remedy += ", or set overlong: truncate" if self._overlong == "drop" else ""
            return [Problem(key="max_length", value=self._max_length, why=why, remedy=remedy)]
        value = ", ".join(self.tally.sources)
        return [Problem(key=key, value=value, why=why, remedy="correct the rows, or give others")]

    def account(self, learnt: Mapping[str, str]) -> SplitAccount:
        """Return the account of the split."""
        return self.tally.account(
            rows=len(self.rows),
            tokens=self._tokens,
            supervised=self._supervised,
            cut_rows=self._cut_rows,
            cut_tokens=self._cut_tokens,
            longest=self._longest,
            learnt=learnt,
        )
