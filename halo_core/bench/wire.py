"""Counts what one process hands to collectives, and what of it leaves the process.

Not for the bytes a routing would cost (`halo_core.expert_parallel.traffic`), nor for kernels that exchange memory by
themselves: those are no collectives of torch. Every operation passes through Python meanwhile, so this is no state to
take times in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Collectives of one kind on one process. calls: how many.

    handed: bytes of the tensors given to them. sent: bytes that leave the process, by ring or pairwise exchange.
    """

    calls: int = 0
    handed: int = 0
    sent: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(calls=self.calls + other.calls, handed=self.handed + other.handed, sent=self.sent + other.sent)


@dataclass(frozen=True, kw_only=True)
class _Form:
    """How a collective's arguments are read: which holds what this process gives, and which says how it is split."""

    kind: str
    given: int
    splits: int | None = None


_FORMS: Mapping[str, _Form] = {
    "c10d::_allgather_base_": _Form(kind="all_gather", given=1),
    "c10d::allgather_": _Form(kind="all_gather", given=1),
    "c10d::allgather_into_tensor_coalesced_": _Form(kind="all_gather", given=1),
    "c10d::_reduce_scatter_base_": _Form(kind="reduce_scatter", given=1),
    "c10d::reduce_scatter_": _Form(kind="reduce_scatter", given=1),
    "c10d::reduce_scatter_tensor_coalesced_": _Form(kind="reduce_scatter", given=1),
    "c10d::allreduce_": _Form(kind="all_reduce", given=0),
    "c10d::allreduce_coalesced_": _Form(kind="all_reduce", given=0),
    "c10d::alltoall_base_": _Form(kind="all_to_all", given=1, splits=4),
    "c10d::broadcast_": _Form(kind="broadcast", given=0),
    "_c10d_functional::all_gather_into_tensor": _Form(kind="all_gather", given=0),
    "_c10d_functional::all_gather_into_tensor_coalesced": _Form(kind="all_gather", given=0),
    "_c10d_functional::reduce_scatter_tensor": _Form(kind="reduce_scatter", given=0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": _Form(kind="reduce_scatter", given=0),
    "_c10d_functional::all_reduce": _Form(kind="all_reduce", given=0),
    "_c10d_functional::all_reduce_": _Form(kind="all_reduce", given=0),
    "_c10d_functional::all_reduce_coalesced": _Form(kind="all_reduce", given=0),
    "_c10d_functional::all_to_all_single": _Form(kind="all_to_all", given=0, splits=2),
    "_c10d_functional::broadcast": _Form(kind="broadcast", given=0),
}
_SENDS_NOTHING = ("wait_tensor", "wrap_tensor_autograd", "barrier")


class WireCount(TorchDispatchMode):
    """A context in which every collective of this process is counted: `by_kind`, kind -> `Traffic`."""

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: dict[str, Traffic] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a distributed tensor first says what it does; its collectives come back here
        if isinstance(func, torch._ops.OpOverload) and func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, func: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
        name = func._schema.name
        if any(word in name for word in _SENDS_NOTHING):
            return
        form = _FORMS.get(name)
        if form is None:
            raise NotImplementedError(f"bytes of {name} are not counted")
        group = _group(func, args)
        handed = sum(tensor.numel() * tensor.itemsize for tensor in _tensors(args[form.given]))
        splits = None if form.splits is None else args[form.splits]
        sent = _sent(form.kind, handed, splits, group)
        self.by_kind[form.kind] = self.by_kind.get(form.kind, Traffic()) + Traffic(calls=1, handed=handed, sent=sent)


def _sent(kind: str, handed: int, splits: list[int] | None, group: dist.ProcessGroup) -> int:
    """Return the bytes that leave this process: in a gather or reduction by ring, in an exchange by pairs."""
    size = group.size()
    if kind == "all_gather":
        return handed * (size - 1)
    if kind == "all_to_all" and splits:
        rows = sum(splits)
        return handed - (handed // rows * splits[group.rank()] if rows else 0)
    share = handed * (size - 1) // size
    return 2 * share if kind == "all_reduce" else share


def _group(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> dist.ProcessGroup:
    for argument, declared in zip(args, func._schema.arguments, strict=False):
        if declared.name == "group_name":
            return _resolve_process_group(argument)
        if declared.name == "process_group":
            return dist.ProcessGroup.unbox(argument)
    raise NotImplementedError(f"{func} names no group of processes")


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    else:
        for part in given:
            yield from _tensors(part)
