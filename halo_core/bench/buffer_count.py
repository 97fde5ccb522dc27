"""Counts what leaves a process by DeepEP's buffer, whose kernels write into other GPUs and are no collectives.

Not for torch's collectives (`wire.py`). Shapes: T tokens of this process, N rows received, H hidden, W processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from halo_core.bench.wire import Traffic
from halo_core.expert_parallel.deepep import DeepEp

KIND = "deepep"


class BufferCount:
    """A buffer that passes everything on and counts: `traffic`. rank: this process's number in the buffer's group."""

    def __init__(self, buffer: Any, rank: int) -> None:
        self.buffer = buffer
        self.rank = rank
        self.traffic = Traffic()
        self._ways: dict[int, tuple[Any, int, int]] = {}
        """The id of a handle -> the handle (so that no other gets its id), rows to others, rows to itself."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.buffer, name)

    def dispatch(self, rows: Tensor, **named: Any) -> Any:
        """Send rows [T, H], for the first time or along the ways of a handle."""
        result = self.buffer.dispatch(rows, **named)
        handle = named.get("handle")
        if handle is None:
            handle = result[4]
            per_rank = named["is_token_in_rank"].sum(0).tolist()
            self._ways[id(handle)] = (handle, sum(per_rank) - per_rank[self.rank], per_rank[self.rank])
        beside = [named[name] for name in ("topk_idx", "topk_weights") if named.get(name) is not None]
        self._add([rows, *beside], leaving=self._ways[id(handle)][1])
        return result

    def combine(self, rows: Tensor, handle: Any, **named: Any) -> Any:
        """Send rows [N, H] back."""
        result = self.buffer.combine(rows, handle, **named)
        beside = [named["topk_weights"]] if named.get("topk_weights") is not None else []
        self._add([rows, *beside], leaving=len(rows) - self._ways[id(handle)][2])
        return result

    def _add(self, given: list[Tensor], *, leaving: int) -> None:
        handed = sum(tensor.numel() * tensor.itemsize for tensor in given)
        row = sum(tensor.shape[1] * tensor.itemsize for tensor in given)
        self.traffic += Traffic(calls=1, handed=handed, sent=leaving * row)


@contextmanager
def counted(dispatcher: Any) -> Iterator[dict[str, Traffic]]:
    """Yield a dictionary that holds, after the block, what left by a dispatcher's buffer; nothing where it has none."""
    found: dict[str, Traffic] = {}
    if not isinstance(dispatcher, DeepEp):
        yield found
        return
    plain = dispatcher.buffer
    dispatcher.buffer = counting = BufferCount(plain, dispatcher.group.rank())
    try:
        yield found
    finally:
        dispatcher.buffer = plain
    found[KIND] = counting.traffic
