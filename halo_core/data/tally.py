"""Counts what happens to the rows of one split, and turns the counts into an account and into problems.

Not for judging rows: whoever reads, renders and tokenises them reports here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from halo_core.data.account import Dropped, Repeated, SplitAccount
from halo_core.data.examples import EXPECTED, Kind, Media, NoKind, RowFault, hint_for
from halo_core.data.read import Record
from halo_core.errors import Problem

LISTED_FAULTS = 20
"""How many bad rows a refusal names; it counts all of them."""
_LISTED_PLACES = 5


@dataclass(kw_only=True)
class Tally:
    """The counts of one split while it is being read; `on_bad_row` is `error` or `skip`."""

    name: str
    on_bad_row: str
    sources: dict[str, int] = field(default_factory=dict)
    rows_read: int = 0
    blank_lines: int = 0
    faults: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    num_faults: int = 0
    media: list[tuple[str, str]] = field(default_factory=list)
    kinds_of_file: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    without_kind: dict[str, int] = field(default_factory=dict)
    columns_of_file: dict[str, tuple[str, ...]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, Dropped] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)

    @property
    def refuses(self) -> bool:
        """Whether it is already certain that the split is refused, so that no more tokens need to be made."""
        return bool(self.media) or (self.on_bad_row == "error" and self.num_faults > 0)

    def read(self, record: Record, key: str) -> None:
        """Count a record that is a row."""
        self.rows_read += 1
        self.sources[record.file] = self.sources.get(record.file, 0) + 1
        self.keys[record.file] = key
        if record.values is not None and record.file not in self.columns_of_file:
            self.columns_of_file[record.file] = tuple(str(column) for column in record.values)

    def is_of(self, record: Record, kind: Kind) -> None:
        """Remember the kind of a row, by file: a file holds one."""
        places = self.kinds_of_file.setdefault(record.file, {}).setdefault(kind, [])
        if len(places) < _LISTED_PLACES:
            places.append(record.place)

    def fault(self, file: str, place: str, fault: RowFault) -> None:
        """Count a bad row, and drop it."""
        if isinstance(fault, Media):
            self.media.append((file, f"{place}: {fault.text()}"))
            return
        if isinstance(fault, NoKind):
            self.without_kind[file] = self.without_kind.get(file, 0) + 1
        self.num_faults += 1
        if sum(len(lines) for lines in self.faults.values()) < LISTED_FAULTS:
            self.faults.setdefault((file, self.keys[file]), []).append(f"{place}: {fault.text()}")
        self.drop(fault.reason, place)

    def drop(self, reason: str, first: str, tokens: int = 0) -> None:
        """Count a dropped row of `tokens` tokens; `first` is shown of the first row with this reason."""
        known = self.dropped.get(reason, Dropped(rows=0, tokens=0, first=first))
        self.dropped[reason] = Dropped(rows=known.rows + 1, tokens=known.tokens + tokens, first=known.first)

    def drop_many(self, reason: str, rows: int, tokens: int) -> None:
        """Count rows dropped together, which need no place of their own."""
        self.dropped[reason] = Dropped(rows=rows, tokens=tokens, first="")

    def note(self, text: str) -> None:
        """Count a row about which a person should know something."""
        self.notes[text] = self.notes.get(text, 0) + 1

    def account(
        self,
        *,
        rows: int,
        tokens: int,
        supervised: int,
        cut_rows: int,
        cut_tokens: int,
        longest: int,
        kinds: Mapping[str, tuple[int, str]],
        repeated: Mapping[str, Repeated],
    ) -> SplitAccount:
        """Return the account; the arguments are what was kept, as in `SplitAccount`."""
        again = sum(more.tokens for more in repeated.values())
        return SplitAccount(
            name=self.name,
            sources=dict(self.sources),
            rows_read=self.rows_read,
            blank_lines=self.blank_lines,
            rows=rows,
            tokens_read=tokens - again + cut_tokens + sum(dropped.tokens for dropped in self.dropped.values()),
            tokens=tokens,
            supervised_tokens=supervised,
            cut_rows=cut_rows,
            cut_tokens=cut_tokens,
            longest=longest,
            dropped=dict(self.dropped),
            kinds=dict(kinds),
            notes=dict(self.notes),
            repeated=dict(repeated),
        )

    def problems(self) -> list[Problem]:
        """Return why these rows cannot be trained on, as far as reading and rendering tell."""
        problems = [*self._media_problems(), *self._kind_problems()]
        listed = {file for file, rows in self.without_kind.items() if rows == self.sources[file]}
        if self.on_bad_row == "error":
            faults = {place: lines for place, lines in self.faults.items() if place[0] not in listed}
            unlisted = self.num_faults - sum(self.without_kind[file] for file in listed)
            shown = sum(len(lines) for lines in faults.values())
            for number, ((file, key), lines) in enumerate(faults.items()):
                total = f"{unlisted} of {self.rows_read} {self.name} rows cannot be used" if number == 0 else "also"
                more = f"\n      and {unlisted - shown} more" if number == len(faults) - 1 and unlisted > shown else ""
                problems.append(
                    Problem(
                        key=key,
                        value=file,
                        why="\n      ".join([f"{total}:", *lines]) + more,
                        remedy="correct the rows, or set on_bad_row: skip to leave them out and count them",
                    )
                )
        return problems

    def _media_problems(self) -> list[Problem]:
        if not self.media:
            return []
        file, told = self.media[0]
        more = f" (and {len(self.media) - 1} more rows)" if len(self.media) > 1 else ""
        remedy = "take the images, video or sound out of the rows, or use rows of text"
        return [Problem(key=self.keys[file], value=file, why=f"{told}{more}", remedy=remedy)]

    def _kind_problems(self) -> list[Problem]:
        problems: list[Problem] = []
        for file, count in self.without_kind.items():
            if count == self.sources[file]:
                columns = self.columns_of_file[file]
                why = f"no row has the expected columns; found {', '.join(columns)}; expected {EXPECTED}"
                problems.append(Problem(key=self.keys[file], value=file, why=why, remedy=hint_for(columns)))
        for file, kinds in self.kinds_of_file.items():
            if len(kinds) > 1:
                told = "; ".join(f"{kind} in {', '.join(places)}" for kind, places in kinds.items())
                why = f"the file mixes kinds of rows: {told}"
                remedy = "give one kind of row a file; several files can be listed in datasets"
                problems.append(Problem(key=self.keys[file], value=file, why=why, remedy=remedy))
        return problems
