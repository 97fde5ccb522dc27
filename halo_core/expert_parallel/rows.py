"""Which rows a process sends: one per token and destination, ordered by destination, then by token.

Not for sending them: pure functions of the routing, without waiting for the device once the number of rows is known.
Shapes: T tokens, K experts per token, W processes, D = min(K, W) destinations a token can have, N rows sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The rows of one process, as indices, int64.

    token_of_row [N]; destination_of_row [N]. rows_of_token [T, D]: a token's rows, N where it has fewer than D.
    row_of_slot [T, K]: the row that carries a slot to its expert.
    """

    token_of_row: Tensor
    destination_of_row: Tensor
    rows_of_token: Tensor
    row_of_slot: Tensor


def destinations(ids: Tensor, experts_per_rank: int, num_ranks: int) -> Tensor:
    """Return [T, W] bool: whether a token goes to a process. ids [T, K]: the experts of each token, of all experts."""
    wanted = torch.zeros((len(ids), num_ranks), dtype=torch.bool, device=ids.device)
    return wanted.scatter_(1, ids // experts_per_rank, True)


def plan(ids: Tensor, wanted: Tensor, experts_per_rank: int, num_rows: int) -> Rows:
    """Return the rows of these tokens. wanted: as `destinations` gives it. num_rows: how many of it are true, N."""
    num_tokens, num_ranks = wanted.shape
    most = min(ids.shape[1], num_ranks)
    # Counted along destinations first: [W, T] flattened, so that what goes to one process lies together.
    row = (wanted.T.reshape(-1).cumsum(0) - 1).view(num_ranks, num_tokens).T
    # Where nothing is wanted, everything is written to one place more, which is cut off.
    token = torch.arange(num_tokens, device=ids.device).unsqueeze(1).expand(-1, num_ranks)
    token_of_row = torch.empty(num_rows + 1, dtype=torch.int64, device=ids.device)
    token_of_row.scatter_(0, torch.where(wanted, row, num_rows).reshape(-1), token.reshape(-1))
    nth = torch.where(wanted, wanted.cumsum(1) - 1, most)
    rows_of_token = torch.full((num_tokens, most + 1), num_rows, dtype=torch.int64, device=ids.device)
    rows_of_token.scatter_(1, nth, row)
    return Rows(
        token_of_row=token_of_row[:num_rows],
        destination_of_row=torch.repeat_interleave(
            torch.arange(num_ranks, device=ids.device), wanted.sum(0), output_size=num_rows
        ),
        rows_of_token=rows_of_token[:, :most],
        row_of_slot=row.gather(1, ids // experts_per_rank),
    )


def local_slots(ids: Tensor, weights: Tensor, rows: Rows, experts_per_rank: int) -> tuple[Tensor, Tensor]:
    """Return (local_ids [N, K], local_weights [N, K]) that travel with the rows; weights [T, K]."""
    ids = ids[rows.token_of_row]
    mine = ids // experts_per_rank == rows.destination_of_row.unsqueeze(1)
    return (
        torch.where(mine, ids % experts_per_rank, experts_per_rank),
        torch.where(mine, weights[rows.token_of_row], 0.0),
    )


def summed(values: Tensor, rows_of_token: Tensor) -> Tensor:
    """Return [T, H]: the sum of each token's rows of `values` [N, H], in at least fp32, in the order of destinations.

    One gather per destination a token can have, and never an addition in an order that changes from run to run.
    """
    num_rows = len(values)
    shape = (len(rows_of_token), *values.shape[1:])
    if not num_rows:
        return values.new_zeros(shape)
    total = torch.zeros(shape, dtype=torch.promote_types(values.dtype, torch.float32), device=values.device)
    for index in rows_of_token.unbind(1):
        row = values[index.clamp(max=num_rows - 1)]
        total += row.masked_fill((index == num_rows).unsqueeze(1), 0.0)
    return total.to(values.dtype)
