"""What the processes of a run settle before they go on: did it work everywhere, and who sees the same folder.

Not for forming groups (`process_group.py`). In a run of one process nobody is asked, and nothing is written.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from halo_core import process_group
from halo_core.checkpoint.atomic import SaveFailed
from halo_core.errors import Refused

T = TypeVar("T")

TOKEN = ".seen-by-"
"""Beginning of the name of an empty file that shows which processes see a folder; it exists for a moment."""


class PeerFailed(RuntimeError):
    """Another process failed by a fault of ours; its own traceback is in its own output."""


def gathered(value: T, group: Any = None) -> list[T]:
    """Return every process's value, by rank; a collective. Values travel pickled.

    group, here and below: a `process_group.side_group` where another thread than the main one asks.
    """
    world = process_group.world()
    if world == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * world
    dist.all_gather_object(values, value, group=group)
    return values


def agreed(act: Callable[[], T], group: Any = None) -> list[T]:
    """Run `act`, which must not communicate, and return what it gave on every process, by rank; a collective.

    Raises:
        SaveFailed, Refused: on every process, when `act` raised it on one.
        PeerFailed: `act` raised anything else on another process.
    """
    if process_group.world() == 1:
        return [act()]
    result: T | None = None
    own: Exception | None = None
    try:
        result = act()
    except Exception as error:  # told to the others first, then raised again
        own = error
    outcomes = gathered(_told(own, result), group)
    if own is not None and not isinstance(own, (SaveFailed, Refused)):
        raise own
    failed = [(rank, kind, what) for rank, (kind, what) in enumerate(outcomes) if kind != "done"]
    faults = [f"rank {rank} failed: {what}" for rank, kind, what in failed if kind == "fault"]
    if faults:
        raise PeerFailed(faults[0])
    if any(kind == "refused" for _, kind, _ in failed):
        process_group.collect_problems(own.problems if isinstance(own, Refused) else (), group)
    for rank, _, (what, remedy) in failed:
        raise SaveFailed(what=f"on rank {rank}: {what}", remedy=remedy) from own
    return [what for _, what in outcomes]


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The processes that see one folder as this one does: all of them, or those of one machine. rank: this one's.

    group: through which they agree.
    """

    rank: int
    ranks: tuple[int, ...]
    group: Any = None

    @property
    def leads(self) -> bool:
        """Return whether this process makes and renames what they share."""
        return self.rank == self.ranks[0]

    def agreed(self, act: Callable[[], T]) -> tuple[list[T], list[T]]:
        """Run `act` on every process of the run; return the results of those that share the folder, and of the rest.

        Raises:
            As `agreed`.
        """
        results = list(enumerate(agreed(act, self.group)))
        return [own for rank, own in results if rank in self.ranks], [
            other for rank, other in results if rank not in self.ranks
        ]


def sharing(folder: Path, group: Any = None) -> Sharing:
    """Return who sees `folder`, which is made where it does not exist; a collective.

    Found out rather than declared: the lowest undecided rank makes a file, and who finds it shares its folder. A
    folder that is mounted on some machines and not on others is then no special case.

    Raises:
        SaveFailed: the folder cannot be made or written.
    """
    rank, world = process_group.rank(), process_group.world()
    if world == 1:
        return Sharing(rank=0, ranks=(0,))
    undecided = list(range(world))
    own: tuple[int, ...] = ()
    while undecided:
        leader = undecided[0]
        names = agreed(lambda leader=leader: _token(folder) if rank == leader else None, group)  # type: ignore[misc]
        path = folder / str(names[leader])
        sees = gathered(rank in undecided and path.exists(), group)
        members = tuple(other for other in undecided if sees[other])
        if rank == leader:
            path.unlink(missing_ok=True)
        if rank in members:
            own = members
        undecided = [other for other in undecided if not sees[other]]
    return Sharing(rank=rank, ranks=own, group=group)


def once_per_folder(folder: Path, act: Callable[[], T], group: Any = None) -> T:
    """Run `act` on one process of those that share `folder`, and return what it gave on all of these; a collective.

    Raises:
        As `agreed`.
    """
    shared = sharing(folder, group)
    results = agreed(lambda: act() if shared.leads else None, group)
    return results[shared.ranks[0]]  # type: ignore[return-value]


def _token(folder: Path) -> str:
    name = f"{TOKEN}{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            os.fsync(file.fileno())
    except OSError as error:
        raise SaveFailed(what=f"{folder} could not be written: {error}",
                         remedy="check that the folder can be written to, then resume") from error
    return name


def _told(error: Exception | None, result: Any) -> tuple[str, Any]:
    if error is None:
        return "done", result
    if isinstance(error, SaveFailed):
        return "save", (error.what, error.remedy)
    if isinstance(error, Refused):
        return "refused", None
    return "fault", f"{type(error).__name__}: {error}"
