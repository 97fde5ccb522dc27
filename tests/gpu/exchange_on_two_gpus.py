"""Run as a script, one process per GPU: experts on two devices beside all of them on one, and what waits for a device.

Not a test: `test_exchange_on_two_gpus.py` starts it. Arguments: rank, a file through which the ranks meet.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from halo_core.expert_parallel.all_to_all import AllToAll
from halo_core.expert_parallel.experts import ParallelExperts
from halo_core.kernels.experts import choice
from halo_core.kernels.experts.weights import ExpertWeights

EXPERTS, SLOTS, HIDDEN, WIDTH = 32, 4, 256, 128


def view(tensors: dict[str, Any]) -> ExpertWeights:
    """Return the experts' weights as a kernel reads them."""

    def activation(inner: Tensor) -> Tensor:
        gate, up = inner.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    return ExpertWeights(activation=activation, is_transposed=False, is_concatenated=True, has_gate=True,
                         has_bias=True, **tensors)  # fmt: skip


def made(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the same random tensor on every process."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2).to("cuda", dtype)


def tokens_of(rank: int, count: int, forced: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, expert ids and routing weights of one process."""
    scores = torch.rand(count, EXPERTS, generator=torch.Generator().manual_seed(rank)).cuda()
    if forced:
        scores[:, :SLOTS] += 1  # all on the first process
    weights, ids = scores.topk(SLOTS)
    hidden = made(100 + rank, (count, HIDDEN), dtype).requires_grad_()
    return hidden, ids, weights.softmax(-1).to(dtype).detach().requires_grad_()


def compared(counts: tuple[int, int], forced: bool, dtype: torch.dtype, kernel: str) -> dict[str, float]:
    """Return the largest difference of each result, relative to its largest value."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cuda", (2,))
    shapes = {"gate_up": (EXPERTS, 2 * WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH),
              "gate_up_bias": (EXPERTS, 2 * WIDTH), "down_bias": (EXPERTS, HIDDEN)}  # fmt: skip
    tensors = {name: made(seed, shape, dtype) for seed, (name, shape) in enumerate(shapes.items())}
    whole = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    parts = [tokens_of(r, counts[r], forced, dtype) for r in range(2)]
    joined = [torch.cat([part[i] for part in parts]) for i in range(3)]
    compute = choice.kernel(kernel, may_skip=False)
    wanted = compute(view(whole), joined[0], joined[1], joined[2])
    wanted.float().square().sum().backward()
    output_of = wanted.split(list(counts))[rank]

    own = {
        name: torch.nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None))
        for name, tensor in tensors.items()
    }
    hidden, ids, weights = tokens_of(rank, counts[rank], forced, dtype)
    call = ParallelExperts(
        dispatcher=AllToAll(group=mesh.get_group(), num_experts=EXPERTS), compute=choice.kernel(kernel, may_skip=True)
    )
    output = call(view(own), hidden, ids, weights)
    output.float().square().sum().backward()
    pairs = {"output": (output, output_of), "hidden": (hidden.grad, parts[rank][0].grad),
             "weights": (weights.grad, parts[rank][2].grad)}  # fmt: skip
    pairs |= {name: (own[name].grad.full_tensor(), whole[name].grad) for name in own}
    return {name: gap(found, expected) for name, (found, expected) in pairs.items()}


def gap(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest value; not a number where either has one."""
    if not expected.numel():
        return 0.0
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def waits(kernel: str) -> int:
    """Return how often one layer's forward and backward wait for the device."""
    hidden, ids, weights = tokens_of(dist.get_rank(), 512, False, torch.bfloat16)
    tensors = {"gate_up": made(0, (EXPERTS // 2, 2 * WIDTH, HIDDEN), torch.bfloat16),
               "down": made(1, (EXPERTS // 2, HIDDEN, WIDTH), torch.bfloat16),
               "gate_up_bias": made(2, (EXPERTS // 2, 2 * WIDTH), torch.bfloat16),
               "down_bias": made(3, (EXPERTS // 2, HIDDEN), torch.bfloat16)}  # fmt: skip
    call = ParallelExperts(
        dispatcher=AllToAll(group=dist.group.WORLD, num_experts=EXPERTS), compute=choice.kernel(kernel, may_skip=True)
    )
    call(view(tensors), hidden, ids, weights).sum().backward()  # libraries and communicators begin by waiting
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        call(view(tensors), hidden, ids, weights).sum().backward()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in heard)


def main(rank: int, store: str) -> None:
    """Print one line of JSON."""
    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    cases = (("even", (300, 200), False), ("forced", (300, 200), True), ("empty", (64, 0), True))
    for dtype in (torch.float32, torch.bfloat16):
        for name, counts, forced in cases:
            found[f"{dtype}-{name}".removeprefix("torch.")] = compared(counts, forced, dtype, "grouped")
    found["waits"] = waits("grouped")
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
