"""The rule between dispatchers: what was asked for, or the fastest that can run here, with the reason.

Not for starting one. `auto` takes DeepEP where every process can use it, and torch's collectives otherwise.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from halo_core.arithmetic import DEEPEP_INSTALL, DEEPEP_SIZES
from halo_core.errors import Problem, Refused
from halo_core.expert_parallel.deepep import dtype_problem, sent_width
from halo_core.expert_parallel.deepep_start import load
from halo_core.topology import AXES, Topology

WIDEST = 7936
"""Elements of a row: half of it, with a barrier of 8 bytes, must fit into the 8 KiB that a warp of DeepEP has."""


def choose(
    ep_dispatcher: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_ranks: int,
    hidden_size: int,
    load: Callable[[], Any] = load,
) -> tuple[str, str]:
    """Return the dispatcher that this process would use, and why; see `agreed` for all of them.

    ep_dispatcher: as configured. dtype: of tokens. num_ranks: processes that share the experts. load: imports DeepEP.

    Raises:
        Refused: DeepEP was asked for and cannot be used.
    """
    if ep_dispatcher == "all_to_all":
        return "all_to_all", "asked for"
    problem = _obstacle(dtype, device, num_ranks, hidden_size, load)
    if ep_dispatcher == "deepep":
        if problem is not None:
            raise Refused(problem)
        return "deepep", "asked for"
    if problem is not None:
        return "all_to_all", problem.why
    return "deepep", "DeepEP is installed and the tokens are bfloat16"


def agreed(ep_dispatcher: str, own: tuple[str, str], topology: Topology) -> tuple[str, str]:
    """Return what all processes use, and why; a collective. own: this process's `choose`.

    Raises:
        Refused: DeepEP was asked for, and processes that share experts are on several machines.
    """
    answers: list[Any] = [None] * topology.world
    dist.all_gather_object(answers, (*own, socket.gethostname()))
    for rank, (name, why, _) in enumerate(answers):
        if name != own[0]:
            one = rank if name == "all_to_all" else topology.rank
            return "all_to_all", f"rank {one}: {why if name == 'all_to_all' else own[1]}"
    if own[0] != "deepep" or not _is_split([host for _, _, host in answers], topology):
        return own
    why = "processes that share experts are on several machines, and DeepEP is used within one"
    if ep_dispatcher == "deepep":
        remedy = "an expert_parallel_size that divides the processes of a machine, or ep_dispatcher: all_to_all"
        raise Refused(Problem(key="ep_dispatcher", value="deepep", why=why, remedy=remedy), everywhere=True)
    return "all_to_all", why


def _obstacle(
    dtype: torch.dtype, device: torch.device, num_ranks: int, hidden_size: int, load: Callable[[], Any]
) -> Problem | None:
    """Return why DeepEP cannot be used by this process."""
    if device.type != "cuda":
        return _problem(f"DeepEP moves tokens between GPUs, and this run is on {device.type}")
    if dtype != torch.bfloat16:
        return dtype_problem(dtype)
    if num_ranks not in DEEPEP_SIZES:
        sizes = ", ".join(map(str, DEEPEP_SIZES))
        return _problem(f"DeepEP is made for {sizes} processes that share experts, not {num_ranks}")
    if sent_width(hidden_size) > WIDEST:
        return _problem(f"a hidden size of {hidden_size} is above the {WIDEST} that DeepEP can send")
    try:
        load()
    except ModuleNotFoundError as fault:
        if fault.name == "deep_ep":
            return _problem("DeepEP is not installed", f"{DEEPEP_INSTALL}, or ep_dispatcher: all_to_all")
        return _problem(f"DeepEP cannot be imported: {fault}")
    except Exception as fault:  # a library that does not load raises whatever it likes
        return _problem(f"DeepEP cannot be imported: {fault}")
    return None


def _is_split(hosts: list[str], topology: Topology) -> bool:
    """Return whether processes that share experts are on several hosts. hosts: of every rank."""
    places: dict[tuple[int, ...], set[str]] = {}
    for rank, host in enumerate(hosts):
        other = replace(topology, rank=rank)
        places.setdefault(tuple(other.coordinate(axis) for axis in AXES if axis != "ep"), set()).add(host)
    return any(len(found) > 1 for found in places.values())


def _problem(why: str, remedy: str = "ep_dispatcher: all_to_all") -> Problem:
    return Problem(key="ep_dispatcher", value="deepep", why=why, remedy=remedy)
