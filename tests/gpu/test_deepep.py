"""DeepEP on two GPUs against torch's collectives: outputs, every gradient, a process without tokens, recomputation.

Each check is this file run by two processes (`torchrun --nproc-per-node 2 tests/gpu/test_deepep.py` runs them all).
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from halo_core import process_group
from halo_core.expert_parallel import recall
from halo_core.expert_parallel.all_to_all import AllToAll
from halo_core.expert_parallel.choose import neighbours, open_dispatcher
from halo_core.expert_parallel.dispatcher import Exchange
from halo_core.expert_parallel.experts import ParallelExperts
from halo_core.kernels.experts import choice
from halo_core.kernels.experts.weights import ExpertWeights
from halo_core.ranks import ranks_from

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.skipif(importlib.util.find_spec("deep_ep") is None, reason="needs DeepEP"),
]

EXPERTS, SLOTS, WIDTH = 8, 2, 64
LIMIT = 600
"""Seconds after which processes that wait for each other are ended."""

CASES = [
    # tokens per rank, experts forced, hidden size (2880 and 64 are filled up on their way), recomputation
    ((300, 200), (), 64, "plain"),
    ((4096, 4096), (), 2880, "resend"),
    ((300, 0), (), 2048, "resend"),  # rank 1 sends nothing
    ((300, 0), (0, 1), 64, "plain"),  # rank 1 neither sends nor receives
    ((0, 0), (), 64, "plain"),
    ((257, 511), (6, 7), 256, "keep"),  # all rows go to rank 1
]


def launched(*words: str) -> str:
    """Run this file on two GPUs and return what rank 0 printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(port)}  # fmt: skip
    running = [
        subprocess.Popen([sys.executable, __file__, *words], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]  # fmt: skip
    try:
        texts = [process.communicate(timeout=LIMIT)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert all(process.returncode == 0 for process in running), "\n".join(texts)
    return texts[0]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_outputs_and_every_gradient_equal_those_of_torchs_collectives(number: int) -> None:
    assert f"case {number}: same" in launched(str(number))


CONFIG = """
model_name_or_path: tiny
family: lfm2
dataset_name: {folder}/rows.jsonl
max_length: 128
max_steps: 8
learning_rate: 0.001
dtype: bfloat16
optim: adamw_torch
per_device_train_batch_size: 4
expert_parallel_size: 2
save_strategy: "no"
"""


@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_a_run_by_deepep_has_the_losses_of_one_by_torchs_collectives(tmp_path: Path, checkpointing: str) -> None:
    rows = [{"prompt": f"count to {n}", "completion": " ".join(map(str, range(n)))} for n in range(1, 25)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(folder=tmp_path))
    losses = {}
    for name in ("deepep", "all_to_all"):
        words = ("--nproc", "2", f"output_dir={tmp_path / name}", f"ep_dispatcher={name}",
                 f"gradient_checkpointing={checkpointing}")  # fmt: skip
        ran = subprocess.run([sys.executable, "-m", "halo_core.cli.main", "train", str(config), *words], check=False,
                             capture_output=True, text=True, timeout=LIMIT,
                             env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert f"tokens by {name}" in ran.stdout
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
    assert len(losses["deepep"]) == 8
    assert losses["deepep"] == pytest.approx(losses["all_to_all"], abs=0.02)


def layer(by: Any, counts: tuple[int, ...], chosen: tuple[int, ...], hidden_size: int, how: str) -> dict[str, Tensor]:
    """Return what a layer of experts gives, forward and backward, by one dispatcher."""
    rank, device = dist.get_rank(), torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator().manual_seed(rank)
    scores = torch.rand(counts[rank], EXPERTS, generator=generator)
    scores[:, list(chosen)] += 2
    ids = scores.topk(SLOTS).indices.to(device)
    hidden = torch.randn(counts[rank], hidden_size, generator=generator).to(device, torch.bfloat16).requires_grad_()
    weights = torch.rand(counts[rank], SLOTS, generator=generator).to(device).requires_grad_()
    generator.manual_seed(3)
    shapes = {"gate_up": (EXPERTS, 2 * WIDTH, hidden_size), "down": (EXPERTS, hidden_size, WIDTH)}
    own = slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2)
    tensors = {
        name: (torch.randn(shape, generator=generator) * shape[2] ** -0.5)[own].to(device, torch.bfloat16)
        for name, shape in shapes.items()
    }
    experts = ExpertWeights(
        activation=lambda inner: torch.nn.functional.silu(inner.chunk(2, -1)[0]) * inner.chunk(2, -1)[1],
        is_transposed=False, is_concatenated=True, has_gate=True, has_bias=False,
        **{name: tensor.requires_grad_() for name, tensor in tensors.items()},
    )  # fmt: skip
    call = ParallelExperts(dispatcher=by, compute=choice.kernel("grouped", may_skip=True))
    if how == "plain":
        output = call(experts, hidden, ids, weights)
    else:
        tickets: deque[Any] = deque()
        output = torch.utils.checkpoint.checkpoint(
            lambda h, w: call(experts, h, ids, w), hidden, weights, use_reentrant=False,
            context_fn=lambda: (recall.FirstPass(tickets), recall.SecondPass(tickets)),
        )  # fmt: skip
    output.float().square().sum().backward()
    return {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad, "gate_up": experts.gate_up.grad,
            "down": experts.down.grad}  # type: ignore[dict-item]  # fmt: skip


def compare(number: int) -> None:
    """Compare one case; raises where results differ by more than a rounding of bf16."""
    counts, chosen, hidden_size, how = CASES[number]
    group = dist.group.WORLD
    assert group is not None
    exchange = Exchange(ep=2, per_machine=neighbours(), num_experts=EXPERTS, num_slots=SLOTS, hidden_size=hidden_size,
                        dtype=torch.bfloat16, device=torch.device("cuda", torch.cuda.current_device()))  # fmt: skip
    ours, chosen_one = open_dispatcher("deepep", exchange, group)
    ours.recomputation = "keep" if how == "keep" else "resend"  # type: ignore[misc]
    other, unasked = open_dispatcher("auto", exchange, group)
    assert chosen_one.name == unasked.name == "deepep"
    other.close()
    found = layer(ours, counts, chosen, hidden_size, how)
    again = layer(ours, counts, chosen, hidden_size, how)
    expected = layer(AllToAll(group=group, num_experts=EXPERTS), counts, chosen, hidden_size, how)
    ours.close()
    for what, value in expected.items():
        assert found[what].dtype == value.dtype and found[what].shape == value.shape
        scale = float(value.abs().max()) if value.numel() else 0.0
        apart = float((found[what].float() - value.float()).abs().max()) if value.numel() else 0.0
        print(f"case {number} rank {dist.get_rank()} {what}: {apart:.2e} of {scale:.2e}, "
              f"equal {torch.equal(found[what], value)}, repeated {torch.equal(found[what], again[what])}", flush=True)
        assert apart <= 2**-7 * scale, what  # two roundings of bf16
    process_group.barrier()
    if dist.get_rank() == 0:
        print(f"case {number}: same", flush=True)


if __name__ == "__main__":
    with process_group.joined(ranks_from(os.environ), timeout=120):
        for asked in sys.argv[1:] or range(len(CASES)):
            compare(int(asked))
