"""What a batch is made of: rows one by one, or packs of several, with what packing adds to the account.

Not for choosing what shares a pack (`packing.py`) nor for tensors (`collate.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np

from halo_core.data.account import Account, PackingAccount, SplitAccount
from halo_core.data.packing import Layout, Pieces, cut, lay_out, splits
from halo_core.data.rows import Row, Rows
from halo_core.errors import Problem, Refused

if TYPE_CHECKING:
    from halo_core.config import RunConfig
    from halo_core.data.prepare import Prepared

FIRST_OF_ROW = "first of their row: nothing stands before it"
FIRST_OF_PIECE = "first of a later piece of a row that was cut: nothing stands before it"


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Several rows, or pieces of rows, that share one row of a batch as documents of their own."""

    rows: tuple[Row, ...]

    @property
    def documents(self) -> tuple[Row, ...]:
        """The documents of this unit, in order."""
        return self.rows


Unit: TypeAlias = Row | Pack


class Packs(Sequence[Pack]):
    """The packs of a layout over rows, each made when it is asked for: some 25 bytes a piece beside the rows."""

    def __init__(self, rows: Rows, layout: Layout) -> None:
        self.rows = rows
        self.layout = layout

    def __len__(self) -> int:
        return len(self.layout)

    @overload
    def __getitem__(self, index: int) -> Pack: ...

    @overload
    def __getitem__(self, index: slice) -> list[Pack]: ...

    def __getitem__(self, index: int | slice) -> Pack | list[Pack]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        which = slice(self.layout.borders[number], self.layout.borders[number + 1])
        pieces = self.layout.pieces
        found = zip(*(column[which].tolist() for column in (pieces.rows, pieces.starts, pieces.ends)), strict=True)
        return Pack(rows=tuple(self.rows.piece(row, start, end) for row, start, end in found))

    def feed(self, update: Callable[[Any], object]) -> int:
        """Give `update` the bytes of every document, and return how many there are; see `Rows.feed_pieces`."""
        pieces, borders = self.layout.pieces, self.layout.borders
        counts = np.diff(borders)
        packs = np.zeros(len(pieces.rows), dtype=np.int64)
        packs[borders[:-1]] = np.where(counts > 1, counts, 0)
        self.rows.feed_pieces(update, pieces.rows, pieces.starts, pieces.ends, packs)
        return len(pieces.rows)

    @property
    def num_rows(self) -> int:
        """The number of rows of the data that are in the packs, in whole or in part."""
        return len(np.unique(self.layout.pieces.rows))


@dataclass(frozen=True, kw_only=True)
class Units:
    """What a run trains and evaluates on, unit by unit, and the whole account of it."""

    train: Sequence[Unit]
    evaluation: Sequence[Unit] | None
    account: Account


def is_packed(config: RunConfig, *, evaluation: bool) -> bool:
    """Return whether the rows of a split are packed; for evaluation `eval_packing: null` means as in training."""
    if evaluation and config.eval_packing is not None:
        return config.eval_packing
    return config.packing


def longest_row(config: RunConfig, *, evaluation: bool) -> int | None:
    """Return the length above which a row of a split follows `overlong`: none where packing cuts long rows."""
    cuts = is_packed(config, evaluation=evaluation) and splits(config.packing_strategy)
    return None if cuts else config.max_length


def units_of(config: RunConfig, prepared: Prepared) -> Units:
    """Return the rows as the units of batches: packed where the configuration asks for it, else as they are.

    A pure function of rows and configuration: every process, and a resumed run, makes the same packs.

    Raises:
        Refused: cutting long rows has left no piece from which something can be learnt.
    """
    train, training = _units(config, prepared.train, prepared.account.train, evaluation=False)
    evaluation, evaluated = prepared.evaluation, prepared.account.evaluation
    units: Sequence[Unit] | None = evaluation
    if evaluation is not None and evaluated is not None:
        units, evaluated = _units(config, evaluation, evaluated, evaluation=True)
    return Units(train=train, evaluation=units, account=replace(prepared.account, train=training, evaluation=evaluated))


def num_rows(units: Sequence[Unit]) -> int:
    """Return the number of rows of the data in `units`; a row in several pieces counts once."""
    return units.num_rows if isinstance(units, Packs) else len(units)


def pack(rows: Rows, max_length: int, strategy: str) -> tuple[Packs, PackingAccount]:
    """Return the packs of rows, and their account.

    A piece of a cut row from which nothing is learnt is left out and counted: documents never see each other, so it
    could change nothing, and a pack of such pieces alone would be a step without a loss.
    """
    pieces = cut(rows.lengths, max_length, strategy)
    learnt, lost, left_out, left_out_tokens = _what_pieces_teach(rows, pieces)
    layout = lay_out(pieces.taken(learnt), max_length)
    account = PackingAccount(
        strategy=strategy,
        max_length=max_length,
        packs=len(layout),
        documents=len(layout.pieces.rows),
        tokens=int(layout.pieces.lengths.sum()),
        cut_rows=int(np.count_nonzero(np.bincount(pieces.rows, minlength=len(rows)) > 1)),
        left_out_pieces=left_out,
        left_out_tokens=left_out_tokens,
        lost_targets=lost,
    )
    return Packs(rows, layout), account


def _what_pieces_teach(rows: Rows, pieces: Pieces) -> tuple[np.ndarray, int, int, int]:
    """Return which pieces to keep [pieces] bool, the targets lost at cuts, and the pieces and tokens left out.

    Whole rows are always kept: whoever prepared them has judged them.
    """
    lengths = rows.lengths
    if not len(lengths):
        return np.ones(0, dtype=bool), 0, 0, 0
    flags = rows.flags
    # Pieces in the order of the data lie one behind the other, so each ends where the next begins.
    begins = rows.ends[pieces.rows] + pieces.starts
    at_begin = flags[begins]
    targets = np.add.reduceat(flags, begins, dtype=np.int64) - at_begin
    is_piece = pieces.lengths < lengths[pieces.rows]
    learnt = (targets > 0) | ~is_piece
    lost = int(at_begin[pieces.starts > 0].sum(dtype=np.int64))
    return learnt, lost, int(np.count_nonzero(~learnt)), int(pieces.lengths[~learnt].sum())


def _units(
    config: RunConfig, rows: Rows, account: SplitAccount, *, evaluation: bool
) -> tuple[Sequence[Unit], SplitAccount]:
    account = account.without_targets(int(rows.flags[rows.ends[:-1]].sum(dtype=np.int64)), FIRST_OF_ROW)
    if not is_packed(config, evaluation=evaluation):
        return rows, account
    assert config.max_length is not None, "packing without max_length is refused with the configuration"
    packs, packed = pack(rows, config.max_length, config.packing_strategy)
    if not len(packs):
        why = f"cutting the {account.name} rows leaves no piece with a token to be learnt and one before it"
        remedy = "raise max_length, or set packing_strategy: bfd"
        raise Refused(Problem(key="max_length", value=config.max_length, why=why, remedy=remedy))
    supervised = account.supervised_tokens - packed.lost_targets
    account = replace(account, tokens=packed.tokens, supervised_tokens=supervised, packing=packed)
    return packs, account.without_targets(packed.lost_targets, FIRST_OF_PIECE)
