"""From the configuration to tokenised rows and their account, before any model is loaded.

Not for batches (`collate.py`), packs (`units.py`) nor for their order (`order.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from halo_core import process_group
from halo_core.config import RunConfig
from halo_core.data import cache, prepared
from halo_core.data.account import Account, SplitAccount
from halo_core.data.judge import NOTE_NO_END, ROWS_AT_ONCE
from halo_core.data.keep import NOTE_JOINS, Keeper, Sink
from halo_core.data.made_from import limit_of
from halo_core.data.read import Record
from halo_core.data.rows import Rows
from halo_core.data.sources import Source, evaluation_sources, is_prepared, training_sources
from halo_core.data.tally import Tally
from halo_core.data.tokenizer_setup import set_up_tokenizer
from halo_core.data.waiting import Waiting, silent
from halo_core.data.weights import gathered, positions, seen_of
from halo_core.data.workers import judged
from halo_core.errors import Problem, Refused
from halo_core.ranks import local_world_from

__all__ = [
    "NOTE_DATE", "NOTE_JOINS", "NOTE_NO_END", "Prepared", "Split", "opened", "pad_id_of", "prepare", "prepared_folder",
    "read_split",
]  # fmt: skip

NOTE_DATE = "the chat template writes today's date: on another day the rows are others, and resuming is refused"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Rows ready to be batched, and the account of how they came about."""

    train: Rows
    evaluation: Rows | None
    account: Account


@dataclass(frozen=True, kw_only=True)
class Split:
    """What one split is read from. limit: tokens of the longest row that is kept, None for any."""

    name: str
    sources: Sequence[Source]
    limit: int | None

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each data set, by its key."""
        return {source.key: source.weight for source in self.sources}


def prepare(
    config: RunConfig,
    tokenizer: Any,
    rows: Iterable[Mapping[str, Any]] | None = None,
    *,
    waiting: Waiting = silent,
    may_cache: bool = False,
) -> Prepared:
    """Return the tokenised rows of a run: a pure function of the configuration, the tokenizer and the data.

    `config` is the run's configuration; `tokenizer` a transformers tokenizer, on which `chat_template_path`
    is set in place; `rows`, where given, stand in for `dataset_name`. `waiting` shows the progress. `may_cache`: rows
    of files are taken from the cache and kept there, where `dataset_cache` says so.

    Raises:
        Refused: everything found wrong with the data, all at once: nothing to read, bad rows under
            `on_bad_row: error`, rows over `max_length` under `overlong: error`, no row left, a template that does not
            tell what the assistant wrote, a prepared folder that does not belong to this configuration.
    """
    folder = None if rows is not None else prepared_folder(config)
    if folder is not None:
        return _from_folder(folder, config, tokenizer, waiting, may_cache)
    splits = opened(config, tokenizer, rows)
    is_kept = may_cache and config.dataset_cache and rows is None
    unread = config.eval_dataset and len(splits) == 1
    notes = ["eval_dataset is not read, because eval_strategy is no"] if unread else []
    return _prepared(splits, config, tokenizer, waiting, is_kept, notes)


def prepared_folder(config: RunConfig) -> Path | None:
    """Return the folder of `halo data prepare` that `dataset_name` names, or None where it names something else."""
    if config.datasets or not isinstance(config.dataset_name, str):
        return None
    path = Path(config.dataset_name).expanduser()
    return path if is_prepared(path) else None


def opened(config: RunConfig, tokenizer: Any, rows: Iterable[Mapping[str, Any]] | None = None) -> list[Split]:
    """Return the training split and, where evaluation is asked for, the evaluation split; nothing is read yet.

    Raises:
        Refused: as `prepare`, as far as it can be told without reading rows.
    """
    problems: list[Problem] = []
    sources: dict[str, list[Source] | None] = {}
    for name, step in (
        ("", lambda: set_up_tokenizer(config, tokenizer)),
        ("training", lambda: training_sources(config, rows)),
        ("evaluation", lambda: evaluation_sources(config, rows is not None)),
    ):
        try:
            sources[name] = step()
        except Refused as refused:
            problems.extend(refused.problems)
    if problems:
        raise Refused(problems)
    return [
        Split(name=name, sources=found, limit=limit_of(config, name))
        for name in ("training", "evaluation")
        if (found := sources[name]) is not None
    ]


def pad_id_of(tokenizer: Any) -> int:
    """Return the id that fills the end of short rows; any will do, because padding is known by its position."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0


def read_split(
    split: Split, config: RunConfig, tokenizer: Any, sink: Sink, waiting: Waiting
) -> tuple[SplitAccount, np.ndarray]:
    """Read, judge and tokenise a split into `sink`; return its account, and which rows an epoch sees.

    The latter are positions in the sink, [n] int64: every one of them once, in order, where no set has a weight.

    Raises:
        Refused: with all that is wrong with the split.
    """
    tally = Tally(name=split.name, on_bad_row=config.on_bad_row)
    sets = list(dict.fromkeys(source.key for source in split.sources))
    keeper = Keeper(tally=tally, sink=sink, limit=split.limit, overlong=config.overlong, sets=sets)
    markers: bool | None = None
    writes_date = False
    with waiting(f"{split.name} rows", lambda: _count(split.sources)) as advance:
        chunks = _chunks(split.sources, tally)
        answers = judged(
            chunks, config, tokenizer, num_proc=_own_share(config), tokenise=lambda: not tally.refuses
        )
        for chunk, outcome in answers:
            if outcome.problems:
                raise Refused(outcome.problems)
            markers = markers if outcome.has_markers is None else outcome.has_markers
            writes_date = writes_date or bool(outcome.writes_date)
            first = tally.rows_read
            for record, key, answer in zip(chunk.records, chunk.keys, outcome.rows, strict=True):
                tally.read(record, key)
                if answer.kind is not None:
                    tally.is_of(record, answer.kind)
                for note in (*(f"column {column} is not read" for column in answer.unread), *answer.notes):
                    tally.note(note)
                if answer.fault is not None:
                    tally.fault(record.file, record.place, answer.fault)
            if not tally.refuses:
                rows = zip(chunk.records, chunk.keys, outcome.rows, strict=True)
                for row_id, (record, key, answer) in enumerate(rows, start=first):
                    if answer.fault is None:
                        keeper.add(row_id, record.place, key, answer)
            advance(len(chunk.records))
    if writes_date:
        tally.notes[NOTE_DATE] = tally.rows_read
    problems = [*tally.problems(), *keeper.problems(split.sources[0].key)]
    if problems:
        raise Refused(problems)
    seen = seen_of(keeper.kept_of, split.weights)
    if not seen.any():
        why = f"these weights leave none of the {len(seen)} rows"
        raise Refused(Problem(key="datasets", value=list(split.weights.values()), why=why, remedy="raise a weight"))
    return keeper.account(_learnt(config, markers), seen, split.weights), positions(seen)


class _Chunk(NamedTuple):
    """Records with the configuration's key of the set that each belongs to."""

    records: list[Record]
    keys: list[str]


def _chunks(sources: Sequence[Source], tally: Tally) -> Iterator[_Chunk]:
    """Yield the records that are rows, some at once; blank lines are counted and passed over."""
    chunk = _Chunk([], [])
    for source in sources:
        for record in source.records():
            if record.is_blank:
                tally.blank_lines += 1
                continue
            chunk.records.append(record)
            chunk.keys.append(source.key)
            if len(chunk.records) == ROWS_AT_ONCE:
                yield chunk
                chunk = _Chunk([], [])
    if chunk.records:
        yield chunk


def _own_share(config: RunConfig) -> int:
    """Return how many processes judge for this one: `dataset_num_proc` is shared by a run's processes of a machine."""
    asked = config.dataset_num_proc or 1
    beside = local_world_from(os.environ) if process_group.world() > 1 else 1
    return max(1, asked // beside)


def _count(sources: Sequence[Source]) -> int | None:
    counts = [source.count() for source in sources]
    return None if any(count is None for count in counts) else sum(count or 0 for count in counts)


def _learnt(config: RunConfig, has_markers: bool | None) -> dict[str, str]:
    """Return what is learnt of each kind of row, in words."""
    source = "by the template's generation markers" if has_markers else "told from renders, the template has no markers"
    said, completion = "the assistant's turns", "the completion"
    if config.train_on_last_assistant_only:
        said, completion = "the last turn of the assistant", "the completion; of messages, the assistant's last"
    return {
        "messages": f"{said}, {source}" if config.assistant_only_loss else "every token (assistant_only_loss: false)",
        "prompt+completion": completion
        if config.completion_only_loss is not False
        else "every token (completion_only_loss: false)",
        "text": "every token",
    }


def _prepared(
    splits: Sequence[Split], config: RunConfig, tokenizer: Any, waiting: Waiting, is_kept: bool, notes: Sequence[str]
) -> Prepared:
    """Return the rows of the splits, all problems of them at once."""
    problems: list[Problem] = []
    made: dict[str, tuple[Rows, SplitAccount]] = {}
    told = list(notes)
    for split in splits:
        try:
            made[split.name] = _rows_of(split, config, tokenizer, waiting, is_kept, told)
        except Refused as refused:
            problems.extend(refused.problems)
    if problems:
        raise Refused(problems)
    train, training = made["training"]
    evaluation, evaluated = made.get("evaluation", (None, None))
    return Prepared(
        train=train, evaluation=evaluation, account=Account(train=training, evaluation=evaluated, notes=tuple(told))
    )


def _rows_of(
    split: Split, config: RunConfig, tokenizer: Any, waiting: Waiting, is_kept: bool, notes: list[str]
) -> tuple[Rows, SplitAccount]:
    """Return the rows of one split, from the cache where they are there."""
    name = cache.name_of(split.name, config, tokenizer, split.sources, split.limit) if is_kept else None
    found = cache.find(name) if name is not None else None
    if found is not None:
        notes.append(f"the {split.name} rows come tokenised from the cache: {cache.folder() / str(name)}")
        return found
    rows = Rows()
    account, which = read_split(split, config, tokenizer, rows, waiting)
    if any(weight != 1.0 for weight in split.weights.values()):
        rows = gathered(rows, which)
    not_kept = cache.keep(name, rows, account) if name is not None else ""
    notes.extend([not_kept] if not_kept else [])
    return rows, account


def _from_folder(folder: Path, config: RunConfig, tokenizer: Any, waiting: Waiting, may_cache: bool) -> Prepared:
    """Return the rows of a prepared folder; evaluation rows that it does not hold are prepared now."""
    set_up_tokenizer(config, tokenizer)
    train, training, evaluation, evaluated, notes = prepared.load(folder, config, tokenizer)
    if config.eval_strategy != "no" and evaluation is None:
        assert config.eval_dataset, "a folder without the evaluation rows asked for is refused"
        sources = evaluation_sources(config)
        assert sources is not None, "evaluation is asked for"
        split = Split(name="evaluation", sources=sources, limit=limit_of(config, "evaluation"))
        kept = may_cache and config.dataset_cache
        more: list[str] = []
        evaluation, evaluated = _rows_of(split, config, tokenizer, waiting, kept, more)
        notes = (*notes, *more)
    account = Account(train=training, evaluation=evaluated, notes=notes)
    return Prepared(train=train, evaluation=evaluation, account=account)
