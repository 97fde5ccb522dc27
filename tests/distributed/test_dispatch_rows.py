"""The plan of rows, and bytes on the wire, on simulated ranks: no process group. Not for sending anything."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from halo_core.expert_parallel import rows, traffic

EXPERTS, SLOTS = 8, 3


def routing(tokens: int, seed: int = 0, experts: int = EXPERTS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).topk(SLOTS).indices


@pytest.mark.parametrize(("tokens", "ranks"), [(17, 2), (17, 4), (1, 8), (5, 1), (0, 4)])
def test_rows_are_one_per_token_and_destination_ordered_by_destination_then_token(tokens: int, ranks: int) -> None:
    ids = routing(tokens)
    per_rank = EXPERTS // ranks
    expected = sorted({(int(e) // per_rank, t) for t in range(tokens) for e in ids[t]})
    wanted = rows.destinations(ids, per_rank, ranks)
    plan = rows.plan(ids, wanted, per_rank, int(wanted.sum()))
    found = list(zip(plan.destination_of_row.tolist(), plan.token_of_row.tolist(), strict=True))
    assert found == expected
    for token in range(tokens):
        own = [index for index in plan.rows_of_token[token].tolist() if index < len(found)]
        assert own == [index for index, (_, t) in enumerate(expected) if t == token]
        for slot in range(SLOTS):
            assert found[int(plan.row_of_slot[token, slot])] == (int(ids[token, slot]) // per_rank, token)


def test_a_slot_keeps_its_expert_and_weight_on_one_row_and_is_skipped_on_all_others() -> None:
    ids, per_rank = routing(11), 2
    weights = torch.rand(11, SLOTS)
    wanted = rows.destinations(ids, per_rank, 4)
    plan = rows.plan(ids, wanted, per_rank, int(wanted.sum()))
    local_ids, local_weights = rows.local_slots(ids, weights, plan, per_rank)
    carried = torch.zeros(11, EXPERTS)
    for row, slot in itertools.product(range(len(local_ids)), range(SLOTS)):
        expert, weight = int(local_ids[row, slot]), local_weights[row, slot]
        if expert == per_rank:
            assert weight == 0
        else:
            carried[plan.token_of_row[row], expert + per_rank * plan.destination_of_row[row]] += weight
    assert torch.equal(carried, torch.zeros(11, EXPERTS).scatter_(1, ids, weights))


def test_a_tokens_rows_are_summed_and_wider_than_bf16() -> None:
    # Half of the last digit of 1 in bf16, twice: added one after the other in bf16, both would be lost.
    values = torch.tensor([[1.0], [2.0**-8], [2.0**-8], [5.0]], dtype=torch.bfloat16)
    index = torch.tensor([[0, 1, 2], [3, 4, 4]])
    assert rows.summed(values, index).flatten().tolist() == [1.0 + 2.0**-7, 5.0]
    assert rows.summed(values[:0], torch.zeros(2, 1, dtype=torch.int64)).tolist() == [[0.0], [0.0]]


def test_bytes_are_those_of_rows_that_leave() -> None:
    ids = [torch.tensor([[0, 1], [0, 2]]), torch.tensor([[2, 3], [1, 2]])]
    # One token of each rank has an expert on the other; one of them has both its experts there: none here.
    found = traffic.layer_traffic(ids, num_experts=4, hidden_size=8, itemsize=2)
    assert found.per_destination == 2 * (2 * 16 + 2 * 8) + 2 * 8
    assert found.per_pair == 2 * 2 * 16 + 2 * 8
    assert found.all_reduce == 2 * 4 * 16


@pytest.mark.parametrize("ranks", [2, 8])
def test_one_row_per_destination_is_less_than_one_per_pair_for_the_shapes_of_a_20b_model(ranks: int) -> None:
    tokens, experts, slots = 4096, 32, 4
    ids = [
        torch.rand(tokens, experts, generator=torch.Generator().manual_seed(rank)).topk(slots).indices
        for rank in range(ranks)
    ]
    found = traffic.layer_traffic(ids, num_experts=experts, hidden_size=2880, itemsize=2)
    # By hand: each of the other ranks is hit by none of a token's 4 experts with the chance of drawing from the rest.
    per_rank = experts // ranks
    missed = 1.0
    for drawn in range(slots):
        missed *= (experts - per_rank - drawn) / (experts - drawn)
    expected = tokens * ranks * (ranks - 1) * (1 - missed) * (2 * 2880 * 2 + slots * 8)
    assert found.per_destination == pytest.approx(expected, rel=0.02)
    assert found.per_destination < found.per_pair
    assert found.per_destination < found.all_reduce
