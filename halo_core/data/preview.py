"""Rows and packs as the model will see them: text with what is learnt of it, special tokens, place.

Not for printing (`cli/data.py`) nor for training on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from halo_core.config import RunConfig
from halo_core.data.prepare import Prepared, Split, opened, prepare, prepared_folder, read_split
from halo_core.data.read import Record
from halo_core.data.rows import Row
from halo_core.data.sources import Source
from halo_core.data.units import Packs, is_packed, units_of
from halo_core.data.waiting import Waiting, silent
from halo_core.errors import Problem, Refused


@dataclass(frozen=True, kw_only=True)
class Run:
    """A stretch of text, decoded: whether it is learnt, and whether it is one special token."""

    text: str
    is_learnt: bool
    is_special: bool


@dataclass(frozen=True, kw_only=True)
class Document:
    """One row, or a piece of one: where it stands ("" where that is not known any more) and its text.

    tokens: how many there are; supervised: how many of them are learnt.
    """

    row_id: int
    place: str
    start: int
    tokens: int
    supervised: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One unit of a batch: a row, or a pack with its number and its documents in order."""

    documents: tuple[Document, ...]
    pack: int | None = None


def preview(
    config: RunConfig, tokenizer: Any, count: int, *, row: int | None = None, waiting: Waiting = silent
) -> list[Shown]:
    """Return the first `count` units of the training rows in the order of the data, or the one that holds row `row`.

    Without packing no more rows are read than are needed; packs are known when all rows are.

    Raises:
        Refused: as a run would be, by the rows that were read; or `row` is none of those kept.
    """
    if is_packed(config, evaluation=False) or prepared_folder(config) is not None:
        return _of_all(config, tokenizer, count, row, waiting)
    split = opened(replace(config, eval_strategy="no"), tokenizer)[0]
    found: list[Row] = []
    places: dict[int, str] = {}
    wanted = _Wanted(count=count, row=row, kept=found, places=places)
    sources = [replace(source, records=wanted.of(source), weight=1.0) for source in split.sources]
    shown = Split(name=split.name, sources=sources, limit=split.limit)
    try:
        read_split(shown, replace(config, dataset_num_proc=1), tokenizer, wanted, silent)
    except Refused:
        if row is not None and row not in places:
            raise Refused(_no_row(row, f"the rows are 0 to {wanted.passed - 1}")) from None
        raise
    if row is not None:
        found = [replace(found[0], row_id=row)]
    return [Shown(documents=(_document(one, tokenizer, places[one.row_id]),)) for one in found[:count]]


@dataclass(kw_only=True)
class _Wanted:
    """Hands on records until enough rows are kept, or one record alone; a sink for the rows."""

    count: int
    row: int | None
    kept: list[Row]
    places: dict[int, str]
    passed: int = 0

    def add(self, row: Row) -> None:
        self.kept.append(row)

    def of(self, source: Source) -> Any:
        def records() -> Iterator[Record]:
            for record in source.records():
                if self.row is None and len(self.kept) >= self.count:
                    return
                if not record.is_blank:
                    number = self.passed
                    self.passed += 1
                    if self.row is not None and number != self.row:
                        if number > self.row:
                            return
                        continue
                    self.places[number] = record.place
                yield record

        return records


def _of_all(config: RunConfig, tokenizer: Any, count: int, row: int | None, waiting: Waiting) -> list[Shown]:
    """Return packs, or rows of a prepared folder."""
    config = replace(config, eval_strategy="no")
    prepared = prepare(config, tokenizer, waiting=waiting, may_cache=True)
    units = units_of(config, prepared).train
    if row is None:
        numbers: Sequence[int] = range(min(count, len(units)))
    else:
        numbers = [number for number, unit in enumerate(units) if any(d.row_id == row for d in unit.documents)]
        if not numbers:
            raise Refused(_no_row(row, _why_not(prepared)))
    found = [units[number] for number in numbers]
    places = _places(config, tokenizer, {document.row_id for unit in found for document in unit.documents})
    return [
        Shown(
            documents=tuple(_document(one, tokenizer, places.get(one.row_id, "")) for one in unit.documents),
            pack=number if isinstance(units, Packs) else None,
        )
        for number, unit in zip(numbers, found, strict=True)
    ]


def _places(config: RunConfig, tokenizer: Any, row_ids: set[int]) -> dict[int, str]:
    """Return where rows stand, by reading past the others; none for a prepared folder, which knows no files."""
    if prepared_folder(config) is not None:
        return {}
    left = set(row_ids)
    places: dict[int, str] = {}
    number = 0
    for source in opened(config, tokenizer)[0].sources:
        for record in source.records():
            if not left:
                return places
            if record.is_blank:
                continue
            if number in left:
                left.remove(number)
                places[number] = record.place
            number += 1
    return places


def _no_row(row: int, why: str) -> Problem:
    return Problem(key="--row", value=row, why=f"there is no such row: {why}", remedy="give the number of a kept row")


def _why_not(prepared: Prepared) -> str:
    account = prepared.account.train
    return f"it is dropped, or beyond the {account.rows_read} rows read, numbered from 0"


def _document(row: Row, tokenizer: Any, place: str) -> Document:
    return Document(
        row_id=row.row_id,
        place=place,
        start=row.start,
        tokens=len(row.input_ids),
        supervised=row.num_targets,
        runs=tuple(runs_of(row, tokenizer)),
    )


def runs_of(row: Row, tokenizer: Any) -> Iterator[Run]:
    """Yield the text of a row in stretches of tokens that are learnt or not; special tokens stand alone.

    The first token is never learnt, because nothing stands before it to tell it from.
    """
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    ids = list(row.input_ids)
    learnt = [flag and position > 0 for position, flag in enumerate(row.supervised)]
    begin = 0
    while begin < len(ids):
        is_special = ids[begin] in special
        end = begin + 1
        while not is_special and end < len(ids) and learnt[end] == learnt[begin] and ids[end] not in special:
            end += 1
        yield Run(text=_decoded(tokenizer, ids, begin, end), is_learnt=bool(learnt[begin]), is_special=is_special)
        begin = end


def _decoded(tokenizer: Any, ids: Sequence[int], begin: int, end: int) -> str:
    """Return the text of the tokens from `begin` to `end` as it stands behind those before them."""
    # A few tokens before are enough: decoders that drop a leading space drop it there.
    before = ids[max(0, begin - 4) : begin]
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    lead = str(tokenizer.decode(before, **options)) if before else ""
    both = str(tokenizer.decode([*before, *ids[begin:end]], **options))
    return both[len(lead) :] if both.startswith(lead) else str(tokenizer.decode(ids[begin:end], **options))
