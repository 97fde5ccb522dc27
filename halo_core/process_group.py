"""Joins the processes of one run into a group and lets them agree: on facts, on refusals, on whether to stop.

Not for starting processes (`cli/launch.py`) and not for the mesh (`topology.py`). torch is imported when several
processes join; in a run of one process every function here returns at once, and nothing is imported.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Any

from halo_core.errors import Problem, Refused, shown
from halo_core.ranks import Ranks, spans

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

TIMEOUT = 1800.0
"""Seconds that ranks wait for each other where no configuration has said anything yet."""

PARTING = 10.0
"""Seconds that rank 0 waits for the others to have read what it holds."""

LONGEST_VALUE = 80
"""Characters of a value shown in a refusal."""


def join(ranks: Ranks, *, timeout: float = TIMEOUT) -> Ranks:
    """Form the process group of all ranks and return `ranks`; with one process, nothing is formed.

    On a CUDA machine this process's device becomes torch's current device; CUDA tensors travel by NCCL and everything
    on the host by gloo, otherwise all is gloo. timeout: seconds after which waiting for another rank is an error.

    Raises:
        Refused: ranks that never came, two ranks on one GPU, or ranks of one machine that are no neighbours.
    """
    if ranks.world == 1:
        return ranks
    import torch
    import torch.distributed as dist

    store = _store(ranks, timeout)
    device = _device(ranks)
    places = _roll_call(store, ranks, f"{socket.gethostname()} {_identity(device)}", timeout)
    problems = placement_problems([tuple(place.split(" ", 1)) for place in places])  # type: ignore[misc]
    if problems:
        raise Refused(problems, everywhere=True)
    if device is not None:
        torch.cuda.set_device(device)
    backend = "gloo" if device is None else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world,
                            timeout=timedelta(seconds=timeout), device_id=device)
    return ranks


def leave() -> None:
    """Wait for every rank, then dissolve the group. Only after a good end: a failed rank leaves by its exit alone."""
    if world() > 1:
        import torch.distributed as dist

        barrier()
        dist.destroy_process_group()


@contextmanager
def joined(ranks: Ranks, *, timeout: float = TIMEOUT) -> Iterator[Ranks]:
    """Join for the time of a block; leave at its good end."""
    yield join(ranks, timeout=timeout)
    leave()


def world() -> int:
    """Return the number of processes that have joined: 1 where none has."""
    dist = _distributed()
    return 1 if dist is None else int(dist.get_world_size())


def rank() -> int:
    """Return this process's number among those that have joined."""
    dist = _distributed()
    return 0 if dist is None else int(dist.get_rank())


def barrier() -> None:
    """Wait on the host until every rank is here. Kernels that a device still runs are not waited for."""
    any_rank(False)


def side_group(timeout: float) -> Any:
    """Return a group of all ranks whose collectives on the host run beside those of the default group.

    For a thread of its own: two threads that use one group would meet the wrong partners. None with one process. A
    collective: every rank makes its side groups at the same points. timeout: seconds that one collective may take.
    """
    dist = _distributed()
    return None if dist is None else dist.new_group(backend="cpu:gloo", timeout=timedelta(seconds=timeout))


def any_rank(flag: bool) -> bool:
    """Return whether `flag` is true on any rank; a collective on the host."""
    dist = _distributed()
    if dist is None:
        return flag
    import torch

    flags = torch.tensor([int(flag)])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags.item())


def from_rank_0(value: Any) -> Any:
    """Return rank 0's value on every rank, such as the moment at which the run began; it travels pickled."""
    dist = _distributed()
    if dist is None:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def agree(name: str, value: object, remedy: str = "give every process the same") -> None:
    """Check that every rank has the same value; of mappings, each key is compared. A collective.

    Values are compared as JSON, with what JSON has no form for as text.

    Raises:
        Refused: on every rank, with each difference and the ranks that have it.
    """
    if world() == 1:
        return
    answers = _gathered(_flat(name, value))
    problems = []
    for key in sorted(set().union(*answers)):
        holders: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            holders.setdefault(answer.get(key, "nothing"), []).append(rank)
        if len(holders) > 1:
            said = "; ".join(f"{_shortened(text)} on {spans(ranks)}" for text, ranks in holders.items())
            problems.append(Problem(where=key, why=f"the processes of this run differ: {said}", remedy=remedy))
    if problems:
        raise Refused(problems, everywhere=True)


def collect_problems(problems: Iterable[Problem], group: Any = None) -> None:
    """Raise every rank's problems on every rank; return where no rank has any. A collective.

    A problem that not every rank has is told with the ranks that have it. group: a `side_group`, or all's own.

    Raises:
        Refused: with all problems, in the order of ranks.
    """
    own = [replace(problem, value=None if problem.key is None else shown(problem.value)) for problem in problems]
    if world() == 1:
        if own:
            raise Refused(own)
        return
    holders: dict[Problem, list[int]] = {}
    for rank, theirs in enumerate(_gathered(own, group)):
        for problem in theirs:
            ranks = holders.setdefault(problem, [])
            if rank not in ranks:
                ranks.append(rank)
    if holders:
        everyone = world()
        raise Refused([problem if len(ranks) == everyone else _placed(problem, ranks)
                       for problem, ranks in holders.items()], everywhere=True)


@contextmanager
def together(group: Any = None) -> Iterator[None]:
    """Make a refusal inside the block one that every rank raises; the block itself may not communicate.

    group: a `side_group`, whose timeout is then how much longer one rank's block may take than another's; or all's own.

    Raises:
        Refused: see `collect_problems`.
    """
    problems: Sequence[Problem] = ()
    try:
        yield
    except Refused as refusal:
        problems = refusal.problems
    collect_problems(problems, group)


def placement_problems(places: Sequence[tuple[str, str]]) -> list[Problem]:
    """Return what is wrong with where ranks run. places: (host, identity of its GPU or "") of each rank, in order."""
    problems = []
    runs = [host for host, _ in groupby(host for host, _ in places)]
    scattered = sorted({host for host in runs if runs.count(host) > 1})
    if scattered:
        where = [rank for rank, (host, _) in enumerate(places) if host == scattered[0]]
        problems.append(Problem(where=f"host {scattered[0]}",
                                why=f"its processes are {spans(where)}, which are not neighbours, so groups that "
                                "should stay on one machine would cross the network",
                                remedy="start the processes machine by machine (SLURM: srun --distribution=block)"))
    holders: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        holders.setdefault(place, []).append(rank)
    for (host, gpu), ranks in holders.items():
        if gpu and len(ranks) > 1:
            problems.append(Problem(where=f"host {host}", why=f"{spans(ranks)} would share one GPU",
                                    remedy="start one process per GPU"))
    return problems


def _distributed() -> Any:
    """Return torch.distributed where a group was formed, otherwise None, without importing torch for the question."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _gathered(value: Any, group: Any = None) -> list[Any]:
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def _device(ranks: Ranks) -> torch.device | None:
    import torch

    if not torch.cuda.is_available():
        return None
    seen = torch.cuda.device_count()
    # A scheduler may show each process its own GPU alone: number 0 then. Processes that share it are found out later.
    return torch.device("cuda", ranks.local_rank if seen > 1 else 0)


def _identity(device: torch.device | None) -> str:
    import torch

    if device is None:
        return ""
    seen = torch.cuda.device_count()
    # A local rank without a GPU of its own counts as sharing one.
    return str(torch.cuda.get_device_properties(device.index % seen).uuid)


def _store(ranks: Ranks, timeout: float) -> dist.Store:
    """Return the store through which ranks meet: an agent's own where it offers it, otherwise rank 0 holds it.

    Raises:
        Refused: it cannot be made or reached.
    """
    import torch.distributed as dist

    is_held_here = ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        # Without waiting for all of them here, one that never comes can be named.
        store = dist.TCPStore(ranks.address, ranks.port, ranks.world, is_held_here, timedelta(seconds=timeout),
                              wait_for_workers=False)
    except dist.DistError as fault:
        where = f"{ranks.address}:{ranks.port}"
        raise Refused(Problem(where=ranks.started_by, why=f"the processes cannot meet at {where}: {_first_line(fault)}",
                              remedy="see that rank 0 runs on that host and that nothing else uses the port "
                              "(MASTER_ADDR and MASTER_PORT choose others)")) from fault
    # A launcher that starts the ranks again keeps its store.
    return dist.PrefixStore(f"halo/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _roll_call(store: dist.Store, ranks: Ranks, answer: str, timeout: float) -> list[str]:
    """Return what every rank answered.

    Raises:
        Refused: some never did, or rank 0, which holds the store, is gone.
    """
    import torch.distributed as dist

    keys = [f"place/{rank}" for rank in range(ranks.world)]
    try:
        store.set(keys[ranks.rank], answer)
        absent = _absent(store, keys, timeout)
        answers = [] if absent else [value.decode() for value in store.multi_get(keys)]
        # It stays until the others have read, also where it then refuses and ends.
        heard = store.add("heard", 1)
        end = time.monotonic() + min(timeout, PARTING)
        while ranks.rank == 0 and heard < ranks.world - len(absent) and time.monotonic() < end:
            time.sleep(0.01)
            heard = store.add("heard", 0)
    except dist.DistNetworkError as fault:
        raise Refused(Problem(where=ranks.started_by, why="rank 0, through which the others meet, is gone",
                              remedy="look at its output")) from fault
    if absent:
        raise Refused(Problem(where=ranks.started_by, why=f"{spans(absent)} of {ranks.world} did not come within "
                              f"{timeout:.0f} seconds", remedy="look at the output of those processes"),
                      everywhere=0 not in absent)
    return answers


def _absent(store: dist.Store, keys: Sequence[str], timeout: float) -> list[int]:
    import torch.distributed as dist

    try:
        store.wait(list(keys), timedelta(seconds=timeout))
    except dist.DistStoreError:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]
    return []


def _flat(name: str, value: object) -> dict[str, str]:
    if isinstance(value, Mapping):
        return {key: text for part, inner in value.items() for key, text in _flat(f"{name}.{part}", inner).items()}
    return {name: value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)}


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _first_line(fault: BaseException) -> str:
    return (str(fault).strip() or type(fault).__name__).splitlines()[0]


def _placed(problem: Problem, ranks: Sequence[int]) -> Problem:
    return replace(problem, where=f"{spans(ranks)}, {problem.where}" if problem.where else spans(ranks))
