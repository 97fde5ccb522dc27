"""DeepEP's `Buffer` in a few lines over gloo, so that what is built on its interface runs on CPUs.

Not a test, and no proof of DeepEP: that runs on GPUs (`tests/gpu`). Everything is gathered everywhere and picked.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Config:
    """DeepEP's settings, as far as the size of a buffer goes."""

    def get_nvl_buffer_size_hint(self, row_bytes: int, num_ranks: int) -> int:
        return row_bytes * num_ranks * 256


class Buffer:
    """The interface within one machine. firsts: dispatches with a layout; repeats: with a handle; sums: combines."""

    firsts = repeats = sums = destroyed = 0

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int, explicitly_destroy: bool) -> None:
        assert explicitly_destroy and num_rdma_bytes == 0
        self.group, self.rank, self.world = group, group.rank(), group.size()
        assert num_nvl_bytes > 0

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def destroy(self) -> None:
        assert self.group is not None, "destroyed twice"
        self.group = None
        Buffer.destroyed += 1

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        per_rank = num_experts // self.world
        wanted = torch.stack([(topk_idx // per_rank == rank).any(1) for rank in range(self.world)], dim=1)
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts).int()
        return wanted.sum(0).int(), None, per_expert, wanted, None

    def dispatch(
        self, x: Tensor, handle: Any = None, num_tokens_per_rank: Any = None, is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None, topk_idx: Any = None, topk_weights: Any = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert x.dtype is torch.bfloat16 and x.is_contiguous() and x.shape[1] % 256 == 0
        if handle is not None:
            assert topk_idx is None
            Buffer.repeats += 1
            tokens = [part[wanted[:, self.rank]] for part, wanted in zip(self._all(x), handle, strict=True)]
            return torch.cat(tokens), None, None, None, None, None
        Buffer.firsts += 1
        assert topk_idx.dtype is torch.int64 and topk_weights.dtype is torch.float32 and topk_weights.is_contiguous()
        handle = self._all(is_token_in_rank)
        mine = len(num_tokens_per_expert) // self.world
        rows, ids, weights = [], [], []
        for part, wanted, theirs, weighed in zip(
            self._all(x), handle, self._all(topk_idx), self._all(topk_weights), strict=True
        ):
            here = wanted[:, self.rank]
            rows.append(part[here])
            ids.append(torch.where(theirs // mine == self.rank, theirs % mine, -1)[here])
            weights.append(torch.where(theirs // mine == self.rank, weighed, 0.0)[here])
        return torch.cat(rows), torch.cat(ids), torch.cat(weights), [], handle, None

    def combine(self, x: Tensor, handle: Any, topk_weights: Any = None) -> tuple[Any, ...]:
        assert x.dtype is torch.bfloat16 and x.is_contiguous() and x.shape[1] % 256 == 0
        assert topk_weights is None or (topk_weights.dtype is torch.float32 and topk_weights.is_contiguous())
        Buffer.sums += 1
        return self._sums(x, handle), None if topk_weights is None else self._sums(topk_weights, handle), None

    def _sums(self, rows: Tensor, handle: Any) -> Tensor:
        total = torch.zeros(len(handle[self.rank]), rows.shape[1])
        for other, theirs in enumerate(self._all(rows)):
            before = sum(int(handle[rank][:, other].sum()) for rank in range(self.rank))
            here = handle[self.rank][:, other]
            total[here] += theirs[before : before + int(here.sum())].float()
        return total.to(rows.dtype)

    def _all(self, value: Tensor) -> list[Tensor]:
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, self.group)
        return values


def module() -> ModuleType:
    """Return a module that looks like DeepEP to whoever imports it; its class may be spoilt."""
    made = ModuleType("deep_ep")
    made.Buffer = type("Buffer", (Buffer,), {})  # type: ignore[attr-defined]
    return made
