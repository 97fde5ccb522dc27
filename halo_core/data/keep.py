"""Keeps the judged rows that fit `max_length` and teach something, and counts what becomes of all the others.

Not for judging a row by itself (`judge.py`) nor for where kept rows go: to memory (`rows.py`) or files (`stored.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from halo_core.data.account import Repeated, SplitAccount
from halo_core.data.judge import Judged
from halo_core.data.rows import Row
from halo_core.data.tally import Tally
from halo_core.errors import Problem

NOTE_JOINS = "a token joins the end of the prompt and the beginning of what is learnt; a prompt alone has other tokens"


class Sink(Protocol):
    """Where kept rows go."""

    def add(self, row: Row) -> None:
        """Take one more row."""


class Keeper:
    """Takes judged rows in their order, holds them against a length, and keeps those that teach something.

    limit: tokens of the longest row, None for any. overlong: what becomes of longer ones. sets: the configuration's
    keys of the data sets, in the order in which their rows come.
    """

    def __init__(self, *, tally: Tally, sink: Sink, limit: int | None, overlong: str, sets: Sequence[str]) -> None:
        self.tally = tally
        self.kept_of = dict.fromkeys(sets, 0)
        self._sink = sink
        self._limit = limit
        self._overlong = overlong
        self._kinds: list[str] = []
        # Of each kept row: its kind, its tokens, and those of them to be learnt.
        self._kind_of = array("b")
        self._lengths = array("q")
        self._targets = array("q")
        self._cut_rows = self._cut_tokens = self._longest = 0
        self._over: list[tuple[str, int]] = []
        # The smallest limit that would have left one row.
        self._needed: int | None = None

    def add(self, row_id: int, place: str, key: str, judged: Judged) -> None:
        """Keep a row of the data set `key`, cut it, or drop it and count why."""
        assert judged.kind is not None, "a row without a kind has a fault"
        ids, flags = judged.input_ids, judged.supervised
        length = len(ids)
        reason = "nothing to learn: no token follows the first"
        if self._limit is not None and length > self._limit:
            if self._overlong == "error":
                self._over.append((place, length))
            if self._overlong != "truncate":
                self._need(length)
                self.tally.drop(f"longer than max_length {self._limit}", f"{place}, {length} tokens", length)
                return
            self._need(flags.index(1, 1) + 1 if any(flags[1:]) else length)
            ids, flags = ids[: self._limit], flags[: self._limit]
            reason = f"nothing to learn within max_length {self._limit}"
        targets = sum(flags[1:])
        if targets == 0:
            self.tally.drop(reason, f"{place}, {length} tokens", length)
            return
        if judged.joins:
            self.tally.note(NOTE_JOINS)
        self._sink.add(Row(row_id=row_id, input_ids=ids, supervised=flags))  # type: ignore[arg-type]  # 0 and 1
        self.kept_of[key] += 1
        if judged.kind not in self._kinds:
            self._kinds.append(judged.kind)
        self._kind_of.append(self._kinds.index(judged.kind))
        self._lengths.append(len(ids))
        self._targets.append(targets)
        self._longest = max(self._longest, len(ids))
        if len(ids) < length:
            self._cut_rows += 1
            self._cut_tokens += length - len(ids)

    def __len__(self) -> int:
        return len(self._lengths)

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
            return [Problem(key="max_length", value=self._limit, why=why, remedy=remedy)]
        if len(self) or self.tally.refuses or self.tally.problems():
            return []
        told = "; ".join(
            f"{dropped.rows} dropped: {reason} (first: {dropped.first})"
            for reason, dropped in self.tally.dropped.items()
        )
        why = f"none of the {self.tally.rows_read} {self.tally.name} rows is left: {told}"
        if self._needed is not None:
            remedy = f"raise max_length to {self._needed} or more"
            remedy += ", or set overlong: truncate" if self._overlong == "drop" else ""
            return [Problem(key="max_length", value=self._limit, why=why, remedy=remedy)]
        value = ", ".join(self.tally.sources)
        return [Problem(key=key, value=value, why=why, remedy="correct the rows, or give others")]

    def account(self, learnt: Mapping[str, str], seen: np.ndarray, weights: Mapping[str, float]) -> SplitAccount:
        """Return the account of the split.

        learnt: what is learnt of each kind of row. seen [rows] int64: how often an epoch sees each kept row.
        weights: data set -> how often its rows are to be seen.
        """
        kinds, lengths, targets = (np.asarray(column, dtype=np.int64) for column in
                                   (self._kind_of, self._lengths, self._targets))  # fmt: skip
        repeated: dict[str, Repeated] = {}
        begin = 0
        for key, count in self.kept_of.items():
            own = slice(begin, begin + count)
            begin += count
            weight = weights.get(key, 1.0)
            left_out, more = seen[own] == 0, np.maximum(seen[own] - 1, 0)
            if left_out.any():
                self.tally.drop_many(
                    f"left out by weight {weight:g} of {key}", int(left_out.sum()), int(lengths[own][left_out].sum())
                )
            if more.any():
                repeated[f"weight {weight:g} of {key}"] = Repeated(
                    rows=int(more.sum()), tokens=int((more * lengths[own]).sum())
                )
        kept = np.bincount(kinds[seen > 0], minlength=len(self._kinds)).tolist()
        return self.tally.account(
            rows=int(np.count_nonzero(seen)),
            tokens=int((seen * lengths).sum()),
            supervised=int((seen * targets).sum()),
            cut_rows=self._cut_rows,
            cut_tokens=self._cut_tokens,
            longest=int(lengths[seen > 0].max()) if seen.any() else 0,
            kinds={kind: (count, learnt[kind]) for kind, count in zip(self._kinds, kept, strict=True) if count},
            repeated=repeated,
        )
