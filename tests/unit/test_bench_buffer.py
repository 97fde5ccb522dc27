"""What leaves by DeepEP's buffer is counted from what is given to it, by hand on a buffer that only answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from halo_core.bench.buffer_count import KIND, BufferCount, counted
from halo_core.bench.wire import Traffic
from halo_core.expert_parallel.deepep import DeepEp

BF16, FP32, INT64 = 2, 4, 8
HIDDEN, SLOTS = 512, 2
IN_RANK = torch.tensor([[True, True], [False, True], [True, False]])
"""Three tokens of process 0 of two: two rows stay, two leave."""
RECEIVED = 7
"""Rows that process 0 receives, of which five come from the other."""


class Answering:
    """A buffer that answers in the form of DeepEP's and moves nothing."""

    def dispatch(self, rows: torch.Tensor, **named: Any) -> tuple[Any, ...]:
        return rows.new_zeros(RECEIVED, rows.shape[1]), None, None, None, named.get("handle") or object(), None

    def combine(self, rows: torch.Tensor, handle: Any, **named: Any) -> tuple[Any, ...]:
        return rows.new_zeros(len(IN_RANK), rows.shape[1]), named.get("topk_weights"), None

    def destroy(self) -> str:
        return "destroyed"


def test_rows_with_all_that_goes_beside_them_are_counted_both_ways() -> None:
    count = BufferCount(Answering(), rank=0)
    rows = torch.zeros(3, HIDDEN, dtype=torch.bfloat16)
    ids, weights = torch.zeros(3, SLOTS, dtype=torch.int64), torch.zeros(3, SLOTS)
    received, *_, handle, _ = count.dispatch(rows, is_token_in_rank=IN_RANK, topk_idx=ids, topk_weights=weights)
    first = HIDDEN * BF16 + SLOTS * (INT64 + FP32)
    assert count.traffic == Traffic(calls=1, handed=3 * first, sent=2 * first)
    count.dispatch(rows, handle=handle)
    again = HIDDEN * BF16
    assert count.traffic == Traffic(calls=2, handed=3 * (first + again), sent=2 * (first + again))
    count.combine(received, handle)
    count.combine(received, handle, topk_weights=torch.zeros(RECEIVED, SLOTS))
    back = 2 * HIDDEN * BF16 + SLOTS * FP32
    assert count.traffic == Traffic(
        calls=4, handed=3 * (first + again) + RECEIVED * back, sent=2 * (first + again) + 5 * back
    )
    assert count.destroy() == "destroyed", "everything else is the buffer's own"


def test_a_dispatcher_gets_its_own_buffer_back() -> None:
    buffer = Answering()
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    dispatcher = DeepEp(group=group, num_experts=8, hidden_size=HIDDEN, buffer=buffer)
    with counted(dispatcher) as found:
        dispatcher.buffer.dispatch(torch.zeros(3, HIDDEN), is_token_in_rank=IN_RANK)
    assert dispatcher.buffer is buffer
    assert found[KIND].calls == 1
    with counted(None) as nothing:
        pass
    assert nothing == {}
