"""The account of the data: what was read, what was dropped and why, what is learnt; in lines and as numbers.

Not for deciding any of it: `prepare.py` counts, this tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from halo_core.errors import counted


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Rows dropped for one reason: how many, their tokens (0 where the row never got so far), and the first place."""

    rows: int
    tokens: int
    first: str


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """What an epoch sees again of rows that it has seen: how many times a row comes once more, and their tokens."""

    rows: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class PackingAccount:
    """What packing made of the kept rows of a split.

    `documents` are the rows and pieces of rows in the `packs`, of `tokens` together. `cut_rows` were cut into pieces;
    `left_out_pieces` of them hold nothing to learn and are in no pack. `lost_targets` are tokens to be learnt that
    begin a later piece, so that nothing stands before them.
    """

    strategy: str
    max_length: int
    packs: int
    documents: int
    tokens: int
    cut_rows: int = 0
    left_out_pieces: int = 0
    left_out_tokens: int = 0
    lost_targets: int = 0

    @property
    def efficiency(self) -> float:
        """The part of the packs that is filled with tokens, from 0 to 1."""
        return self.tokens / (self.packs * self.max_length) if self.packs else 0.0

    def lines(self) -> list[str]:
        """Return the account as lines for a person."""
        lines = [
            f"  packed ({self.strategy}): {counted(self.documents, 'document')} in {counted(self.packs, 'pack')} of at "
            f"most {self.max_length} tokens, {self.efficiency:.1%} filled"
        ]
        if self.cut_rows:
            lines.append(f"  cut into pieces: {counted(self.cut_rows, 'row')}, each piece a document of its own")
        if self.left_out_pieces:
            lines.append(
                f"  left out: {counted(self.left_out_pieces, 'piece')} of cut rows with nothing to learn, "
                f"{counted(self.left_out_tokens, 'token')}"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Return the account as plain numbers and texts, fit for JSON."""
        return {**vars(self), "efficiency": self.efficiency}


@dataclass(frozen=True, kw_only=True)
class SplitAccount:
    """One set of rows, for training or evaluation.

    `rows_read` = `rows` + rows of all `dropped`; `tokens_read` = `tokens` + `cut_tokens` + tokens of all `dropped` +
    those that packing left out - those of `repeated`, reason -> rows seen more than once. `tokens` are what one epoch
    trains on, `supervised_tokens` the targets of the loss; these and `lost_targets`, reason -> count, are all the
    tokens to be learnt. `kinds`: kind of row -> (rows kept, what of them is learnt). `notes`: what a person should know
    -> rows it concerns. `packing`: where the rows are packed.
    """

    name: str
    sources: Mapping[str, int]
    rows_read: int
    blank_lines: int
    rows: int
    tokens_read: int
    tokens: int
    supervised_tokens: int
    cut_rows: int = 0
    cut_tokens: int = 0
    longest: int = 0
    dropped: Mapping[str, Dropped] = field(default_factory=dict)
    kinds: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)
    lost_targets: Mapping[str, int] = field(default_factory=dict)
    repeated: Mapping[str, Repeated] = field(default_factory=dict)
    packing: PackingAccount | None = None

    def without_targets(self, count: int, reason: str) -> SplitAccount:
        """Return the same account, which tells that `count` tokens to be learnt are no targets, and why."""
        return replace(self, lost_targets={**self.lost_targets, reason: count}) if count else self

    @property
    def supervised_share(self) -> float:
        """The part of the kept tokens that are targets, from 0 to 1."""
        return self.supervised_tokens / self.tokens if self.tokens else 0.0

    def text(self) -> str:
        """Return the account as lines for a person."""
        dropped_rows = sum(dropped.rows for dropped in self.dropped.values())
        lines = [
            f"{self.name} data: {counted(self.rows_read, 'row')} read from {_listed(self.sources)}, "
            f"{self.rows} kept, {dropped_rows} dropped"
        ]
        for reason, dropped in self.dropped.items():
            tokens = f", {counted(dropped.tokens, 'token')}" if dropped.tokens else ""
            first = f" (first: {dropped.first})" if dropped.first else ""
            lines.append(f"  dropped: {counted(dropped.rows, 'row')}{tokens}: {reason}{first}")
        if self.cut_rows:
            lines.append(f"  cut: {counted(self.cut_rows, 'row')} at max_length, {counted(self.cut_tokens, 'token')}")
        lines += [
            f"  repeated: {counted(more.rows, 'row')} more in each epoch, {counted(more.tokens, 'token')}: {reason}"
            for reason, more in self.repeated.items()
        ]
        lines.append(
            f"  tokens: {self.tokens_read} read, {self.tokens} kept, {self.supervised_tokens} supervised "
            f"({self.supervised_share:.1%}); longest row {self.longest}"
        )
        lines += [
            f"  not learnt: {counted(count, 'token')} to be learnt, but {reason}"
            for reason, count in self.lost_targets.items()
        ]
        lines += self.packing.lines() if self.packing else []
        lines += [f"  learnt: {counted(rows, 'row')} of {kind}: {what}" for kind, (rows, what) in self.kinds.items()]
        lines += [f"  note: {note} ({counted(rows, 'row')})" for note, rows in self.notes.items()]
        if self.blank_lines:
            lines.append(f"  blank lines passed over: {self.blank_lines}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the account as plain numbers and texts, fit for JSON."""
        return {
            "rows_read": self.rows_read,
            "rows": self.rows,
            "blank_lines": self.blank_lines,
            "sources": dict(self.sources),
            "dropped": {
                reason: {"rows": dropped.rows, "tokens": dropped.tokens, "first": dropped.first}
                for reason, dropped in self.dropped.items()
            },
            "tokens_read": self.tokens_read,
            "tokens": self.tokens,
            "cut_rows": self.cut_rows,
            "cut_tokens": self.cut_tokens,
            "longest": self.longest,
            "supervised_tokens": self.supervised_tokens,
            "supervised_share": self.supervised_share,
            "kinds": {kind: {"rows": rows, "learnt": what} for kind, (rows, what) in self.kinds.items()},
            "notes": dict(self.notes),
            "lost_targets": dict(self.lost_targets),
            "repeated": {
                reason: {"rows": repeated.rows, "tokens": repeated.tokens}
                for reason, repeated in self.repeated.items()
            },
            "packing": self.packing.as_dict() if self.packing else None,
        }


@dataclass(frozen=True, kw_only=True)
class Account:
    """The account of a run's data: the training rows, and the evaluation rows where there are any."""

    train: SplitAccount
    evaluation: SplitAccount | None = None
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the account as lines for a person."""
        parts = [self.train.text(), *([self.evaluation.text()] if self.evaluation else [])]
        return "\n".join([*parts, *(f"note: {note}" for note in self.notes)])

    def as_dict(self) -> dict[str, Any]:
        """Return the account as plain numbers and texts, fit for JSON."""
        evaluation = self.evaluation.as_dict() if self.evaluation else None
        return {"train": self.train.as_dict(), "evaluation": evaluation, "notes": list(self.notes)}


def _listed(sources: Mapping[str, int]) -> str:
    """Return the names of the sources, with their rows where there are several; long lists are cut."""
    names = [name if len(sources) == 1 else f"{name} ({rows})" for name, rows in sources.items()]
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:8])} and {len(names) - 8} more"
