"""Starts DeepEP before any weight is read: its module, its buffer, and one exchange of known rows that must arrive.

Not for the exchange of a run (`deepep.py`) nor for whether to use it (`choose.py`). What goes wrong here is told with
versions, device and ranks, and within a known time, instead of a kernel that waits in the middle of a step.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from halo_core.errors import Problem, Refused
from halo_core.expert_parallel.deepep import DeepEp, open_buffer
from halo_core.expert_parallel.dispatcher import Recomputation
from halo_core.ranks import spans

ROWS = 3
"""Tokens of each process in the exchange of known rows."""

_CALLS = itertools.count()


def load() -> Any:
    """Return the module `deep_ep`.

    Raises:
        ImportError: it is not there, or what it needs is not, or it is something else than the DeepEP known here.
    """
    _load_nvshmem()
    module = importlib.import_module("deep_ep")
    if hasattr(module, "ElasticBuffer"):
        raise ImportError("this release has ElasticBuffer, which no run has proven here yet; 1.2 is known to work")
    if not hasattr(module, "Buffer"):
        raise ImportError("the installed module deep_ep has no Buffer, so it is another package of that name")
    return module


def start(
    module: Any,
    *,
    group: dist.ProcessGroup,
    num_experts: int,
    hidden_size: int,
    device: torch.device,
    recomputation: Recomputation = "resend",
    timeout: float,
) -> DeepEp:
    """Return a dispatcher through which known rows have travelled; a collective of all processes of the run.

    module: `load()`. timeout: seconds to wait for a process that does not come.

    Raises:
        Refused: a process does not come or has other versions, DeepEP cannot start, or rows arrive altered.
    """
    versions = f"DeepEP {_version(module)}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    place = f"{versions}, {name}"
    call = f"halo/deepep/{next(_CALLS)}"
    answers = _roll_call(f"{call}/here", versions, place, timeout)
    if len(set(answers)) > 1:
        said = "; ".join(
            f"{answer} on {spans([rank for rank, other in enumerate(answers) if other == answer])}"
            for answer in dict.fromkeys(answers)
        )
        raise Refused(_problem(f"the processes of this run differ: {said}", "install the same everywhere"),
                      everywhere=True)  # fmt: skip
    fault = ""
    try:
        opened = DeepEp(
            group=group,
            num_experts=num_experts,
            hidden_size=hidden_size,
            buffer=open_buffer(module, group, hidden_size),
            index_dtype=getattr(module, "topk_idx_t", torch.int64),
            recomputation=recomputation,
        )
        _exchange_known_rows(opened, device)
    except Exception as error:  # whatever DeepEP or CUDA raises: a way out exists, and no weight has been read
        fault = (str(error).strip() or type(error).__name__).splitlines()[0]
    answers = _roll_call(f"{call}/exchanged", fault, place, timeout, waits=not fault)
    if any(answers):
        failed = [rank for rank, answer in enumerate(answers) if answer]
        why = f"DeepEP cannot exchange rows, says {spans(failed)}: {answers[failed[0]]} ({place})"
        raise Refused(_problem(why, "see that the GPUs reach each other (nvidia-smi topo -m)"))
    return opened


def _exchange_known_rows(opened: DeepEp, device: torch.device) -> None:
    """Send rows that say whose they are to every process and back.

    Raises:
        ValueError: something else than that arrived.
    """
    rank, world = opened.group.rank(), opened.group.size()
    mine = torch.full((ROWS, opened.hidden_size), rank + 1.0, dtype=torch.bfloat16, device=device)
    first_of_each = torch.arange(world, device=device) * opened.experts_per_rank
    weights = torch.full((ROWS, world), rank + 1.0, device=device)
    with torch.no_grad():
        tokens, ids, routing, ticket = opened.dispatch(mine, first_of_each.repeat(ROWS, 1), weights)
        back = opened.combine(tokens, ticket)
    owners = torch.arange(1.0, world + 1, device=device).repeat_interleave(ROWS)
    slots = torch.arange(world, device=device) == rank
    arrived = (
        tokens.shape == (ROWS * world, opened.hidden_size)
        and bool((tokens == owners.unsqueeze(1)).all())
        and bool((ids == torch.where(slots, 0, opened.experts_per_rank)).all())
        and bool((routing == torch.where(slots, owners.unsqueeze(1), 0.0)).all())
        and bool((back == world * mine).all())
    )
    if not arrived:
        raise ValueError("known rows arrived altered")


def _roll_call(name: str, answer: str, place: str, timeout: float, waits: bool = True) -> list[str]:
    """Return what every process answered; without waiting, own answer alone is known.

    Through the store by which processes met, and not by a collective: so the ones that are missing have names.

    Raises:
        Refused: some never answered.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    keys = [str(number) for number in range(world)]
    store.set(keys[rank], answer)
    if not waits:
        return [answer if number == rank else "" for number in range(world)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as fault:
        absent = [number for number, key in enumerate(keys) if not store.check([key])]
        why = f"{spans(absent)} of {world} did not come to the start of DeepEP within {timeout:.0f} seconds ({place})"
        raise Refused(_problem(why, "look at the output of those processes"), everywhere=0 not in absent) from fault
    return [store.get(key).decode() for key in keys]


def _problem(why: str, remedy: str) -> Problem:
    return Problem(
        key="ep_dispatcher", value="deepep", why=why, remedy=f"{remedy}, or ep_dispatcher: all_to_all"
    )  # fmt: skip


def _load_nvshmem() -> None:
    """Load NVSHMEM as torch's CUDA packages bring it, so that DeepEP finds it without a search path."""
    try:
        found = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        return
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for library in sorted(Path(folder, "lib").glob("libnvshmem_host.so.*")):
            try:
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue  # importing deep_ep then says what is missing


def _version(module: Any) -> str:
    names = importlib.metadata.packages_distributions().get(module.__name__, ())
    return importlib.metadata.version(names[0]) if names else str(getattr(module, "__version__", "of unknown version"))
