"""DeepEP's adapter, over a stand-in for DeepEP, against the reference dispatcher. Not for DeepEP: `tests/gpu`."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from halo_core.errors import Refused
from halo_core.expert_parallel import recall
from halo_core.expert_parallel.all_to_all import AllToAll
from halo_core.expert_parallel.deepep import DeepEp, open_buffer, sent_width
from halo_core.expert_parallel.experts import ParallelExperts
from halo_core.kernels.experts import choice
from halo_core.kernels.experts.weights import ExpertWeights
from tests.distributed import fake_deep_ep, ranks

EXPERTS, SLOTS, WIDTH = 8, 2, 12


def dispatcher(kind: str, hidden_size: int, recomputation: str = "resend") -> Any:
    group = dist.group.WORLD
    assert group is not None
    common: dict[str, Any] = {"group": group, "num_experts": EXPERTS, "recomputation": recomputation}
    if kind == "all_to_all":
        return AllToAll(**common)
    buffer = open_buffer(fake_deep_ep.module(), group, hidden_size)
    return DeepEp(**common, hidden_size=hidden_size, buffer=buffer)


def experts_of(rank: int, world: int, hidden_size: int) -> ExpertWeights:
    def activation(inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    generator = torch.Generator().manual_seed(3)
    shapes = {"gate_up": (EXPERTS, 2 * WIDTH, hidden_size), "down": (EXPERTS, hidden_size, WIDTH)}
    own = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.2)[own].bfloat16().requires_grad_()
        for name, shape in shapes.items()
    }
    return ExpertWeights(activation=activation, is_transposed=False, is_concatenated=True, has_gate=True,
                         has_bias=False, **tensors)  # fmt: skip


def layer(kind: str, how: str, counts: tuple[int, ...], chosen: tuple[int, ...], hidden_size: int) -> dict[str, Any]:
    """Return what a layer of experts gives, forward and backward, by one dispatcher."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    scores = torch.rand(counts[rank], EXPERTS, generator=generator)
    scores[:, list(chosen)] += 2
    ids = scores.topk(SLOTS).indices
    hidden = torch.randn(counts[rank], hidden_size, generator=generator).bfloat16().requires_grad_()
    weights = torch.rand(counts[rank], SLOTS, generator=generator).requires_grad_()
    by = dispatcher(kind, hidden_size, "keep" if how == "keep" else "resend")
    experts = experts_of(rank, world, hidden_size)
    call = ParallelExperts(dispatcher=by, compute=choice.kernel("reference", may_skip=True))
    if how == "plain":
        output = call(experts, hidden, ids, weights)
    else:
        tickets: deque[Any] = deque()
        output = torch.utils.checkpoint.checkpoint(
            lambda h, w: call(experts, h, ids, w), hidden, weights, use_reentrant=False,
            context_fn=lambda: (recall.FirstPass(tickets), recall.SecondPass(tickets)),
        )  # fmt: skip
    output.float().square().sum().backward()
    by.close()
    by.close()
    calls = (fake_deep_ep.Buffer.firsts, fake_deep_ep.Buffer.repeats, fake_deep_ep.Buffer.sums)
    found = {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad, "gate_up": experts.gate_up.grad,
             "down": experts.down.grad}  # fmt: skip
    return {"found": found, "calls": calls, "closed": fake_deep_ep.Buffer.destroyed}


CASES = [
    # tokens per rank, experts forced, hidden size, recomputation; dispatches with layout, without, and sums
    ((13, 9), (), 24, "plain", (1, 1, 2)),
    ((13, 9), (), 256, "resend", (1, 2, 2)),
    ((13, 9), (), 24, "keep", (1, 1, 2)),
    ((7, 0), (0, 1), 24, "resend", (1, 2, 2)),  # rank 1 neither sends nor receives
    ((7, 0, 12, 5), (), 24, "plain", (1, 1, 2)),
    ((7, 3, 12, 5), (6, 7), 24, "resend", (1, 2, 2)),  # all rows go to the last rank
]


@pytest.mark.parametrize(("counts", "chosen", "hidden_size", "how", "calls"), CASES)
def test_forward_and_every_gradient_have_the_bits_of_the_reference(
    counts: tuple[int, ...], chosen: tuple[int, ...], hidden_size: int, how: str, calls: tuple[int, int, int]
) -> None:
    """A token has two rows at most, so their sum has one order. The order of received rows is the same as well."""
    ours, theirs = (
        ranks.run(len(counts), layer, kind, how, counts, chosen, hidden_size) for kind in ("deepep", "all_to_all")
    )
    for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one["calls"] == calls, "the same operations on every rank, and a layout once"
        assert one["closed"] == 1
        for what, expected in other["found"].items():
            assert one["found"][what].dtype == expected.dtype
            assert torch.equal(one["found"][what], expected), (rank, what)


def test_gradients_of_slots_that_live_elsewhere_stay_out_of_the_sum() -> None:
    def backward() -> Tensor:
        by = dispatcher("deepep", 24)
        weights = torch.ones(4, SLOTS, requires_grad=True)
        ids = torch.tensor([[0, 4]]).expand(4, SLOTS)
        _, _, local_weights, _ = by.dispatch(torch.ones(4, 24, dtype=torch.bfloat16), ids, weights)
        (local_weights * (dist.get_rank() + 1)).sum().backward()  # every slot of every row, as a careless kernel would
        assert weights.grad is not None
        return weights.grad

    for gradient in ranks.run(2, backward):
        assert torch.equal(gradient, torch.tensor([[1.0, 2.0]]).expand(4, SLOTS))


def test_tokens_of_another_dtype_are_refused_with_the_way_out() -> None:
    def sent() -> str:
        with pytest.raises(Refused) as caught:
            dispatcher("deepep", 24).dispatch(torch.ones(4, 24), torch.zeros(4, 1).long(), torch.ones(4, 1))
        return str(caught.value)

    for text in ranks.run(2, sent):
        assert "ep_dispatcher: deepep" in text and "float32" in text and "dtype: bfloat16" in text


@pytest.mark.parametrize(("hidden_size", "width"), [(24, 256), (256, 256), (2048, 2048), (2816, 2816), (2880, 3072)])
def test_rows_are_filled_up_to_whole_warps(hidden_size: int, width: int) -> None:
    assert sent_width(hidden_size) == width
