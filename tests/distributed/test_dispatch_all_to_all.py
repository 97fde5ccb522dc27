"""Experts on several processes against all experts in one: outputs and every gradient. Not for whole models."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from halo_core.expert_parallel import recall
from halo_core.expert_parallel.all_to_all import AllToAll
from halo_core.expert_parallel.experts import ParallelExperts
from halo_core.expert_parallel.local import Local
from halo_core.kernels.experts import choice
from halo_core.kernels.experts.reference import reference
from halo_core.kernels.experts.weights import ExpertWeights
from tests.distributed import ranks

EXPERTS, SLOTS, HIDDEN, WIDTH = 8, 2, 16, 12
TOLERANCE = 1e-6
"""fp32, the same products in another order."""


def expert_tensors(bias: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"gate_up": (EXPERTS, 2 * WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    if bias:
        shapes |= {"gate_up_bias": (EXPERTS, 2 * WIDTH), "down_bias": (EXPERTS, HIDDEN)}
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def view(tensors: dict[str, Any]) -> ExpertWeights:
    def activation(inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    return ExpertWeights(activation=activation, is_transposed=False, is_concatenated=True, has_gate=True,
                         has_bias="down_bias" in tensors, **tensors)  # fmt: skip


def tokens_of(rank: int, count: int, chosen: tuple[int, ...] | None) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(count, HIDDEN, generator=generator)
    scores = torch.rand(count, EXPERTS, generator=generator)
    if chosen is not None:
        scores[:, list(chosen)] += 2
    weights, ids = scores.topk(SLOTS)
    return hidden, ids, weights.softmax(-1)


def one_process(counts: tuple[int, ...], chosen: tuple[int, ...] | None, bias: bool) -> dict[str, Any]:
    tensors = {name: tensor.requires_grad_() for name, tensor in expert_tensors(bias).items()}
    parts = [tokens_of(rank, count, chosen) for rank, count in enumerate(counts)]
    hidden, ids, weights = (torch.cat([part[i] for part in parts]) for i in range(3))
    hidden.requires_grad_()
    weights.requires_grad_()
    output = reference(view(tensors), hidden, ids, weights)
    output.square().sum().backward()
    split = lambda tensor: [part.detach() for part in tensor.split(list(counts))]  # noqa: E731
    return {
        "output": split(output), "hidden": split(hidden.grad), "weights": split(weights.grad),
        "experts": {name: tensor.grad for name, tensor in tensors.items()},
    }


def several_processes(
    counts: tuple[int, ...], chosen: tuple[int, ...] | None, bias: bool, kernel: str, how: str
) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    experts = {
        name: torch.nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None))
        for name, tensor in expert_tensors(bias).items()
    }
    hidden, ids, weights = tokens_of(rank, counts[rank], chosen)
    hidden.requires_grad_()
    weights.requires_grad_()
    issued: list[str] = []
    plain = dist.all_to_all_single

    def counted(output: Tensor, *rest: Any, **options: Any) -> Any:
        issued.append(f"{output.dtype} {tuple(output.shape[1:])}")
        return plain(output, *rest, **options)

    dist.all_to_all_single = counted
    dispatcher = AllToAll(
        group=mesh.get_group(), num_experts=EXPERTS, recomputation="keep" if how == "keep" else "resend"
    )
    call = ParallelExperts(dispatcher=dispatcher, compute=choice.kernel(kernel, may_skip=True))
    if how == "plain":
        output = call(view(experts), hidden, ids, weights)
    else:
        tickets: deque[Any] = deque()
        output = torch.utils.checkpoint.checkpoint(
            lambda h, w: call(view(experts), h, ids, w), hidden, weights, use_reentrant=False,
            context_fn=lambda: (recall.FirstPass(tickets), recall.SecondPass(tickets)),
        )
    output.square().sum().backward()
    return {
        "output": output.detach(), "hidden": hidden.grad, "weights": weights.grad, "issued": issued,
        "experts": {name: tensor.grad.full_tensor() for name, tensor in experts.items()},
        "placed": all(tensor.grad.placements == tensor.placements for tensor in experts.values()),
    }


CASES = [
    # tokens per rank, experts forced, biases, kernel, recomputation
    ((13, 9), None, True, "grouped", "plain"),
    ((13, 9), (0, 5), False, "reference", "keep"),
    ((13, 0), (0, 1), True, "grouped", "resend"),  # rank 1 neither sends nor receives
    ((7, 0, 12, 5), None, False, "grouped", "resend"),
    ((7, 3, 12, 5), (6, 7), True, "grouped", "keep"),  # all rows go to the last rank
    ((1, 1, 0, 1), (2, 4), False, "reference", "plain"),
]


@pytest.mark.parametrize(("counts", "chosen", "bias", "kernel", "how"), CASES)
def test_outputs_and_every_gradient_equal_one_process(
    counts: tuple[int, ...], chosen: tuple[int, ...] | None, bias: bool, kernel: str, how: str
) -> None:
    expected = one_process(counts, chosen, bias)
    found = ranks.run(len(counts), several_processes, counts, chosen, bias, kernel, how)
    for rank, one in enumerate(found):
        for what in ("output", "hidden", "weights"):
            assert one[what].shape == expected[what][rank].shape
            assert torch.allclose(one[what], expected[what][rank], rtol=0, atol=TOLERANCE), (rank, what)
        for name, gradient in expected["experts"].items():
            assert torch.allclose(one["experts"][name], gradient, rtol=0, atol=10 * TOLERANCE), (rank, name)
        assert one["placed"]


@pytest.mark.parametrize(("how", "number"), [("plain", 7), ("resend", 9), ("keep", 7)])
def test_collectives_are_the_same_whatever_the_routing(how: str, number: int) -> None:
    """Counts, rows, slots, sums, and three gradients; a recomputation repeats rows and slots, or nothing."""
    even = ranks.run(2, several_processes, (13, 9), None, True, "grouped", how)
    forced = ranks.run(2, several_processes, (4, 0), (0, 1), True, "grouped", how)
    lists = [one["issued"] for one in (*even, *forced)]
    assert all(issued == lists[0] for issued in lists)
    assert len(lists[0]) == number
    assert sum(issued.startswith("torch.int64") for issued in lists[0]) == 1, "counts are exchanged once"


def test_a_lost_weight_gradient_would_be_seen() -> None:
    expected = one_process((13, 9), None, False)
    assert all(float(gradient.abs().max()) > 1000 * TOLERANCE for gradient in expected["weights"])


def test_one_process_alone_dispatches_to_itself() -> None:
    hidden, ids, weights = tokens_of(0, 5, None)
    call = ParallelExperts(dispatcher=Local(), compute=reference)
    tensors = expert_tensors(True)
    assert torch.equal(call(view(tensors), hidden, ids, weights), reference(view(tensors), hidden, ids, weights))


def test_bf16_weights_travel_as_fp32_and_get_bf16_gradients() -> None:
    def narrow() -> tuple[Any, ...]:
        hidden, ids, weights = tokens_of(dist.get_rank(), 4, None)
        weights = weights.bfloat16().requires_grad_()
        dispatcher = AllToAll(group=dist.group.WORLD, num_experts=EXPERTS)
        _, _, local, _ = dispatcher.dispatch(hidden.bfloat16(), ids, weights)
        local.sum().backward()
        return local.dtype, weights.grad.dtype, weights.grad.unique().tolist()

    assert ranks.run(2, narrow) == [(torch.float32, torch.bfloat16, [1.0])] * 2
