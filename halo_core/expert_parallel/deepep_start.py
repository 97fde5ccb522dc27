"""Starts DeepEP before any weight is read: its module, its buffer, and a first exchange of rows that must arrive.

Not for the exchange of a run (`deepep.py`) nor for whether to use it (`choose.py`). What goes wrong here is told with
versions, device and ranks, instead of a kernel that waits in the middle of a step.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from halo_core.errors import Problem, Refused
from halo_core.expert_parallel import preflight
from halo_core.expert_parallel.deepep import DeepEp, open_buffer
from halo_core.expert_parallel.dispatcher import Exchange, Recomputation


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
    exchange: Exchange,
    group: dist.ProcessGroup,
    *,
    recomputation: Recomputation = "resend",
    timeout: float = preflight.TIMEOUT,
) -> DeepEp:
    """Return a dispatcher through which rows have travelled; a collective of all processes of the run.

    module: `load()`. group: the processes that share the experts. timeout: seconds to wait for one that does not come.

    Raises:
        Refused: a process does not come or has other versions, DeepEP cannot start, or rows arrive altered.
    """
    here = preflight.facts(version_of(module), exchange.device)
    preflight.agree("deepep", here, timeout)
    try:
        opened = DeepEp(
            group=group,
            num_experts=exchange.num_experts,
            hidden_size=exchange.hidden_size,
            buffer=open_buffer(module, group, exchange.hidden_size),
            index_dtype=getattr(module, "topk_idx_t", torch.int64),
            recomputation=recomputation,
        )
        preflight.exchange_once(opened, exchange, group.rank())
    except Refused:
        raise
    except Exception as fault:  # whatever DeepEP or CUDA raises: there is a way out, and no weight has been read
        said = (str(fault).strip() or type(fault).__name__).splitlines()[0]
        why = f"DeepEP cannot exchange rows on rank {dist.get_rank()}: {said}"
        told = ", ".join(f"{key} {value}" for key, value in here.items())
        remedy = f"see that the GPUs reach each other (nvidia-smi topo -m; here: {told}), or {preflight.OTHER}"
        raise Refused(Problem(key=preflight.KEY, value="deepep", why=why, remedy=remedy)) from fault
    return opened


def version_of(module: Any) -> str:
    """Return the version of the distribution that a module is from."""
    names = importlib.metadata.packages_distributions().get(module.__name__, ())
    return importlib.metadata.version(names[0]) if names else str(getattr(module, "__version__", "unknown"))


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
