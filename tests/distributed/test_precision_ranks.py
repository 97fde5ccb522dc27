"""Precision over several processes: fp32 sums, routers in fp32 as units of their own, bf16 runs by 1, 2 and 4.

Not for the noise of a shard's elements: the optimizer's own tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from halo_core import registry
from halo_core.config import read
from halo_core.data.collate import collate
from halo_core.data.rows import Row
from halo_core.expert_parallel.experts import ParallelExperts
from halo_core.kernels.experts.reference import reference
from halo_core.methods.sft import Sft
from halo_core.models import sockets
from halo_core.models.build import build_meta
from halo_core.models.fp32_router import routers
from halo_core.models.hidden import Head, last_hidden
from halo_core.models.load import load_weights
from halo_core.models.tiny import write_tiny
from halo_core.optim.build import build_optimizer
from halo_core.plan import Degrees
from halo_core.sharding.norm import local
from halo_core.testing.cases import shake
from halo_core.trainer.parallel import build_parallel
from halo_core.trainer.step import run_step
from tests.distributed import ranks

ARCHITECTURES = {architecture.name: architecture for architecture in registry.load().architectures()}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return tiny model folders, every weight away from its neutral value."""
    made = {}
    for name in ("lfm2", "lfm2_moe", "gemma4_moe", "gpt_oss"):
        made[name] = tmp_path_factory.mktemp(name)
        write_tiny(ARCHITECTURES[name], made[name])
        shake(made[name])
    return made


def cut(name: str, folder: Path, sizes: dict[str, int], **keys: Any) -> tuple[Any, Any, Any]:
    """Return (model, what a step asks of it, configuration), built as a run builds them."""
    architecture = ARCHITECTURES[name]
    model_config = json.loads((folder / "config.json").read_text())
    config = read(None, given={"bf16": True, "optim": "adamw_torch", **keys}).config
    degrees = Degrees(**{axis: sizes.get(axis, 1) for axis in ("replicate", "shard", "cp", "ep", "etp")})
    parallel = build_parallel(degrees, architecture, model_config, CPU, dtype=torch.bfloat16)
    kernel: Any = reference
    if parallel.dispatcher is not None:
        kernel = ParallelExperts(dispatcher=parallel.dispatcher, compute=reference)
    model = build_meta(
        architecture, model_config, dtype=torch.bfloat16, experts=kernel, fp32_router=config.fp32_router
    )
    sharded = parallel.cut(model, architecture, config)
    load_weights(model, folder, architecture)
    return model, sharded, config


def rows(rank: int) -> list[Row]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, 500, (2, 9), generator=generator).tolist()
    return [Row(row_id=2 * rank + n, input_ids=one, supervised=[False] + [True] * 8) for n, one in enumerate(ids)]


def summed(folder: Path, sizes: dict[str, int], keys: dict[str, Any]) -> tuple[list[float], str]:
    """Return the distinct values of one summed gradient, and its dtype: rank 0 gives 1, every other one 2^-8."""
    model, sharded, _ = cut("lfm2", folder, sizes, **keys)
    passes = keys.get("gradient_accumulation_steps", 1)
    for number in range(1, passes + 1):
        sharded.micro_batch(is_last=number == passes)
        hidden = last_hidden(model, collate(rows(0)[:1], 1))
        value = 1.0 if dist.get_rank() == 0 and number == 1 else 2.0**-8
        ((model.model.embedding_norm.weight * value).sum() + (hidden * 0).sum()).backward()
    gradient = model.model.embedding_norm.weight.grad
    return gradient.full_tensor().float().unique().tolist(), str(gradient.dtype)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("replicate", [1, 2])
def test_a_sum_over_processes_that_bf16_loses_is_kept(world: int, replicate: int, folders: dict[str, Path]) -> None:
    """1 + n/256 for n other processes: bf16 rounds each addition back to 1; fp32 rounds the sum once."""
    sizes = {"shard": world // replicate, "replicate": replicate}
    wide = ranks.run(world, summed, folders["lfm2"], sizes, {"fp32_grad_reduce": True})
    narrow = ranks.run(world, summed, folders["lfm2"], sizes, {})
    exact = torch.tensor(1.0 + (world - 1) * 2.0**-8)
    assert wide == [([float(exact.bfloat16())], "torch.bfloat16")] * world
    if world == 2:
        assert narrow == wide, "one addition is rounded once, whatever it is made in"
        return
    assert float(exact.bfloat16()) > 1.0
    assert all(found[0] < float(exact.bfloat16()) for found, _ in narrow), "bf16 sums lose it, so this can fail"


def test_deferred_sums_over_micro_batches_stay_fp32_unless_given_up(folders: dict[str, Path]) -> None:
    """1 + 15/256 over 2 processes and 8 passes."""
    keys = {"gradient_accumulation_steps": 8, "fsdp_defer_grad_sync": True}
    exact = float(torch.tensor(1.0 + 15 * 2.0**-8).bfloat16())
    kept = ranks.run(2, summed, folders["lfm2"], {"shard": 2}, keys)
    assert kept == [([exact], "torch.bfloat16")] * 2
    lost = ranks.run(2, summed, folders["lfm2"], {"shard": 2}, {**keys, "grad_accumulation_dtype": "bfloat16"})
    assert all(found[0] < exact for found, _ in lost)


def units(name: str, folder: Path, sizes: dict[str, int]) -> tuple[list[str], list[str], list[str], set[str]]:
    """Return paths of routers, of those that are units, names of fp32 weights, and dtypes of their gradients."""
    model, sharded, config = cut(name, folder, sizes, fp32_router=True, fp32_grad_reduce=True)
    architecture = ARCHITECTURES[name]
    found = dict(routers(model, architecture))
    optimizer = build_optimizer(model, config)
    seen: dict[str, str] = {}
    right = optimizer.update

    def update(gradients: Any, scale: Any) -> None:
        seen.update({n: str(g.dtype) for n, g in gradients.items()})
        right(gradients, scale)

    optimizer.update = update
    before = {n: local(p).clone() for n, p in model.named_parameters() if p.dtype == torch.float32}
    method = Sft(collate_rows=collate)
    run_step(
        model=model, model_hidden=last_hidden, head=Head(model, architecture), method=method, optimizer=optimizer,
        batches=[method.collate(rows(dist.get_rank()), 1)], max_grad_norm=1.0, device=CPU, sharded=sharded,
    )
    sockets.check_called(model)
    wide = [n for n, p in model.named_parameters() if p.dtype == torch.float32]
    moved = all(not torch.equal(before[n], local(p)) for n, p in model.named_parameters()
                if n in before and local(p).numel())
    assert moved, "a router did not move"
    return (list(found), [path for path, router in found.items() if isinstance(router, FSDPModule)], wide,
            {seen[n] for n in wide})


@pytest.mark.parametrize(("name", "sizes"), [
    ("gemma4_moe", {"shard": 2}), ("gpt_oss", {"ep": 2}), ("lfm2_moe", {"ep": 2, "shard": 2}),
])
def test_every_fp32_router_is_a_unit_of_its_own(name: str, sizes: dict[str, int], folders: dict[str, Path]) -> None:
    world = 4 if len(sizes) == 2 else 2
    for found, own, wide, dtypes in ranks.run(world, units, name, folders[name], sizes):
        assert found == own and found
        assert len(wide) == len(found) * {"gemma4_moe": 3, "gpt_oss": 2, "lfm2_moe": 1}[name]
        assert all(any(key.startswith(f"{path}.") for path in found) for key in wide)
        assert dtypes == {"torch.float32"}


def trained(
    name: str, folder: Path, sizes: dict[str, int], keys: dict[str, Any]
) -> tuple[list[float], dict[str, Any]]:
    """Return the losses of two steps and every weight after them, the same rows whatever the number of processes."""
    model, sharded, config = cut(name, folder, sizes, learning_rate=1e-3, **keys)
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    architecture, method = ARCHITECTURES[name], Sft(collate_rows=collate)
    optimizer = build_optimizer(model, config)
    every = [rows(number) for number in range(4)]
    mine = every[rank::world]
    losses = []
    for _ in range(2):
        outcome = run_step(
            model=model, model_hidden=last_hidden, head=Head(model, architecture), method=method, optimizer=optimizer,
            batches=[method.collate(part, 1) for part in mine], max_grad_norm=1.0, device=CPU, sharded=sharded,
        )
        losses.append(outcome.loss)
    whole = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().float().clone()
             for n, p in model.named_parameters()}
    return losses, whole


@pytest.mark.parametrize(("name", "sizes"), [
    ("lfm2_moe", {"shard": 2}), ("lfm2_moe", {"replicate": 2}), ("lfm2_moe", {"ep": 2}),
    ("gpt_oss", {"ep": 2, "shard": 2}),
])
def test_a_bf16_run_of_several_processes_is_that_of_one_within_rounding(
    name: str, sizes: dict[str, int], folders: dict[str, Path]
) -> None:
    world = 4 if len(sizes) == 2 else 2
    keys = {"fp32_router": True, "fp32_grad_reduce": True, "gradient_accumulation_steps": 4}
    ((losses, one),) = ranks.run(1, trained, name, folders[name], {}, keys)
    several = ranks.run(world, trained, name, folders[name], sizes, keys)
    for found, weights in several:
        assert found[0] == pytest.approx(losses[0], abs=2e-2)  # bf16 activations, summed in other orders
        assert found[1] == pytest.approx(losses[1], abs=0.1 * (losses[0] - losses[1]))
        assert all(torch.equal(weights[n], several[0][1][n]) for n in weights), "processes hold different weights"
        for n, weight in weights.items():
            # A first step of AdamW goes the whole rate in the direction of a sign, which noise may turn.
            assert (weight - one[n]).abs().max() <= 4.5e-3 + 2.0**-7 * one[n].abs().max(), n
