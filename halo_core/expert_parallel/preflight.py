"""The first exchange of tokens, before weights are read: versions and devices compared, rows sent and summed.

Not for choosing a dispatcher. A transport that cannot work here fails now, in a known time and with the rank's name.
"""

from __future__ import annotations

import itertools
from datetime import timedelta

import torch
import torch.distributed as dist

from halo_core import process_group
from halo_core.errors import Problem, Refused
from halo_core.expert_parallel.dispatcher import Dispatcher, Exchange
from halo_core.ranks import spans

KEY = "ep_dispatcher"
OTHER = "ep_dispatcher: all_to_all"

TIMEOUT = 120.0
"""Seconds that a process waits for the others: all of them have done nothing since they met."""

LAST_MOMENT = 1.0
"""Seconds that are left to the others once one has not come in time."""

_CALLS = itertools.count()


def facts(version: str, device: torch.device) -> dict[str, str]:
    """Return what must be the same on all processes. version: of the transport's own package."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"version": version, "torch": torch.__version__, "CUDA": str(torch.version.cuda), "device": name}


def agree(name: str, here: dict[str, str], timeout: float = TIMEOUT) -> None:
    """Check that every process is here, with the same dispatcher on the same software; a collective.

    here: this process's `facts`. timeout: seconds.

    Raises:
        Refused: naming ranks that did not come and what is known of the others, or what they differ in.
    """
    missing = _missing(timeout)
    if missing:
        why = f"{spans(missing)} did not come to the first exchange of tokens within {timeout:.0f} seconds"
        told = ", ".join(f"{key} {value}" for key, value in here.items())
        remedy = f"look at what was said there last (here: {told})"
        raise Refused(Problem(key=KEY, value=name, why=why, remedy=remedy), everywhere=0 not in missing)
    process_group.agree(name, here, remedy=f"give every process the same software and GPUs, or {OTHER}")


def exchange_once(dispatcher: Dispatcher, exchange: Exchange, place: int) -> None:
    """Send a few rows to every process and back, and compare; a collective of all processes.

    place: this process's among the `ep` that share the experts.

    Raises:
        Refused: on every process, when any got other rows or sums than it should.
    """
    per_rank = exchange.num_experts // exchange.ep
    slots = min(exchange.num_slots, exchange.ep)
    # Token t goes to `slots` processes from t on; its rows are small whole numbers, exact in any dtype.
    tokens = torch.arange(2 * exchange.ep, device=exchange.device)
    owners = (tokens.unsqueeze(1) + torch.arange(slots, device=exchange.device)) % exchange.ep
    hidden = (tokens % 7 + place + 1).to(exchange.dtype).unsqueeze(1).repeat(1, exchange.hidden_size)
    weights = torch.ones(owners.shape, device=exchange.device)
    with torch.no_grad():
        rows, local_ids, local_weights, ticket = dispatcher.dispatch(hidden, owners * per_rank, weights)
        back = dispatcher.combine(rows, ticket)
    wrong = []
    # Every process is an owner equally often, so everyone receives as many rows as it sends.
    if len(rows) != owners.numel() or not bool((local_weights.sum(1) == 1).all()):
        wrong.append("other rows arrived than were sent")
    if not torch.equal((local_ids == 0).float(), local_weights.float()):
        wrong.append("rows arrived for other experts than they were sent to")
    if not torch.equal(back, hidden * slots):
        wrong.append("sums came back wrong")
    process_group.collect_problems(
        Problem(key=KEY, value=dispatcher.name, why=f"in a first exchange of tokens {fault}", remedy=OTHER)
        for fault in wrong
    )


def _missing(timeout: float) -> list[int]:
    """Return the ranks that do not come, told by the store through which all have met: a collective has no names."""
    call = next(_CALLS)  # one round per exchange that is opened, the same number on every process
    store = dist.PrefixStore(f"halo/exchange/{call}", dist.distributed_c10d._get_default_store())
    store.set(str(dist.get_rank()), "here")
    missing: list[int] = []
    for rank in range(dist.get_world_size()):
        try:
            store.wait([str(rank)], timedelta(seconds=LAST_MOMENT if missing else timeout))
        except RuntimeError:  # its type depends on the kind of store
            missing.append(rank)
    return missing
