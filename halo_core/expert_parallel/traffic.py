"""How many bytes one MoE layer puts on the wire, for this exchange and for two others, from a routing alone.

Not for measuring a run. Counted are bytes that leave a process for another one, in one forward pass, all processes
together; what a process keeps costs no wire.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from halo_core.expert_parallel.rows import destinations

ID_BYTES = 4
WEIGHT_BYTES = 4
COUNT_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class LayerTraffic:
    """Bytes of one layer's forward pass.

    per_destination: one row per token and destination process, with ids and weights, there and back (`all_to_all`).
    per_pair: one row per token and expert there and back. all_reduce: the output of all tokens summed over all
    processes by a ring; what it takes to have every token everywhere before is not counted.
    """

    per_destination: int
    per_pair: int
    all_reduce: int


def layer_traffic(ids_of_ranks: list[Tensor], *, num_experts: int, hidden_size: int, itemsize: int) -> LayerTraffic:
    """Return the bytes of a layer. ids_of_ranks: expert ids [T, K] of each process. itemsize: bytes of an element."""
    num_ranks = len(ids_of_ranks)
    per_rank = num_experts // num_ranks
    row = hidden_size * itemsize
    rows = pairs = tokens = 0
    for rank, ids in enumerate(ids_of_ranks):
        wanted = destinations(ids, per_rank, num_ranks)
        rows += int(wanted.sum()) - int(wanted[:, rank].sum())
        pairs += int((ids // per_rank != rank).sum())
        tokens += len(ids)
    slots = ids_of_ranks[0].shape[1]
    counts = num_ranks * (num_ranks - 1) * COUNT_BYTES
    return LayerTraffic(
        per_destination=rows * (2 * row + slots * (ID_BYTES + WEIGHT_BYTES)) + counts,
        per_pair=pairs * 2 * row + counts,
        all_reduce=2 * (num_ranks - 1) * tokens * row,
    )
