"""The rule between dispatchers: what was asked for, or what can run here, with the reason.

Not for starting one. `auto` takes DeepEP where every process can use it, and torch's collectives otherwise.
"""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from halo_core import process_group
from halo_core.arithmetic import DEEPEP_INSTALL, DEEPEP_SIZES
from halo_core.errors import Problem, Refused
from halo_core.expert_parallel import deepep_start, preflight
from halo_core.expert_parallel.all_to_all import AllToAll
from halo_core.expert_parallel.deepep import dtype_problem, sent_width
from halo_core.expert_parallel.dispatcher import Dispatcher, Exchange

WIDEST = 7936
"""Elements of a row: half of it, with a barrier of 8 bytes, must fit into the 8 KiB that a warp of DeepEP has."""

MOST_SLOTS = 32
"""Experts per token: one thread of a warp for each."""


class Choice(NamedTuple):
    """A dispatcher's name, and why it is that one."""

    name: str
    why: str


def open_dispatcher(
    ep_dispatcher: str, exchange: Exchange, group: dist.ProcessGroup, timeout: float = preflight.TIMEOUT
) -> tuple[Dispatcher, Choice]:
    """Return the dispatcher that all processes use, tried once, and the choice; a collective of all processes.

    ep_dispatcher: as configured. group: the processes that share the experts. timeout: seconds to wait for a process.

    Raises:
        Refused: DeepEP was asked for and cannot be used, or what was chosen does not work.
    """
    with process_group.together():
        own = choose(ep_dispatcher, exchange)
    choice = agreed(own)
    if choice.name == "deepep":
        return deepep_start.start(deepep_start.load(), exchange, group, timeout=timeout), choice
    preflight.agree(choice.name, preflight.facts("of torch", exchange.device), timeout)
    dispatcher = AllToAll(group=group, num_experts=exchange.num_experts)
    preflight.exchange_once(dispatcher, exchange, group.rank())
    return dispatcher, choice


def choose(ep_dispatcher: str, exchange: Exchange, load: Callable[[], Any] = deepep_start.load) -> Choice:
    """Return the dispatcher that this process would use, and why; see `agreed` for all of them.

    ep_dispatcher: as configured. load: imports DeepEP.

    Raises:
        Refused: DeepEP was asked for and cannot be used.
    """
    if ep_dispatcher == "all_to_all":
        return Choice("all_to_all", "asked for")
    problem = _obstacle(exchange, load)
    if ep_dispatcher == "deepep":
        if problem is not None:
            raise Refused(problem)
        return Choice("deepep", "asked for")
    if problem is not None:
        return Choice("all_to_all", problem.why)
    return Choice("deepep", "DeepEP is installed and tokens are bfloat16")


def agreed(own: Choice) -> Choice:
    """Return what all processes use, and why: one that cannot use DeepEP decides for all. A collective.

    own: this process's `choose`.
    """
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, own)
    if len({name for name, _ in answers}) == 1:
        return own
    rank, why = next((rank, why) for rank, (name, why) in enumerate(answers) if name == "all_to_all")
    return Choice("all_to_all", f"{why} (rank {rank})")


def neighbours() -> int:
    """Return the largest number of neighbouring ranks that is always on one machine; a collective.

    Ranks of one machine are neighbours: joining has seen to that.
    """
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return math.gcd(*Counter(hosts).values())


def _obstacle(exchange: Exchange, load: Callable[[], Any]) -> Problem | None:
    """Return why DeepEP cannot be used by this process."""
    if exchange.device.type != "cuda":
        return _problem(f"DeepEP moves tokens between GPUs, and this run is on {exchange.device.type}")
    if exchange.dtype != torch.bfloat16:
        return dtype_problem(exchange.dtype)
    if exchange.ep not in DEEPEP_SIZES:
        sizes = ", ".join(map(str, DEEPEP_SIZES))
        return _problem(f"DeepEP is made for {sizes} processes that share experts, not {exchange.ep}")
    if exchange.per_machine % exchange.ep:
        return _problem(
            "processes that share experts are on several machines, and DeepEP is used within one",
            "an expert_parallel_size that divides the processes of each machine, or ep_dispatcher: all_to_all",
        )
    if sent_width(exchange.hidden_size) > WIDEST:
        return _problem(f"a hidden size of {exchange.hidden_size} is above the {WIDEST} that DeepEP can send")
    if exchange.num_slots > MOST_SLOTS:
        return _problem(f"{exchange.num_slots} experts per token are above the {MOST_SLOTS} that DeepEP can send")
    try:
        load()
    except ModuleNotFoundError as fault:
        if fault.name == "deep_ep":
            return _problem("DeepEP is not installed", DEEPEP_INSTALL)
        return _problem(f"DeepEP cannot be imported: {fault}")
    except Exception as fault:  # a library that does not load raises whatever it likes
        return _problem(f"DeepEP cannot be imported: {fault}")
    return None


def _problem(why: str, remedy: str = "ep_dispatcher: all_to_all") -> Problem:
    return Problem(key="ep_dispatcher", value="deepep", why=why, remedy=remedy)
