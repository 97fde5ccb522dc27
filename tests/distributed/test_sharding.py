"""How a model is cut: who sums each gradient, what is gathered when, what stays whole. Not for loss or weights."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from halo_core import registry
from halo_core.arithmetic import Degrees
from halo_core.data.collate import collate
from halo_core.data.rows import Row
from halo_core.expert_parallel.all_to_all import AllToAll
from halo_core.expert_parallel.experts import ParallelExperts
from halo_core.kernels.experts.reference import reference
from halo_core.methods.sft import Sft
from halo_core.models import sockets
from halo_core.models.build import build_meta
from halo_core.models.hidden import Head, last_hidden
from halo_core.models.load import load_weights
from halo_core.models.tiny import write_tiny
from halo_core.sharding.owners import by_owner, owners
from halo_core.sharding.shard import shard
from halo_core.topology import AXES, Topology, build_meshes
from halo_core.trainer.step import run_step
from tests.distributed import ranks

ARCHITECTURES = {a.name: a for a in registry.load().architectures()}
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a maker of tiny folders."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("sharding") / name
        write_tiny(ARCHITECTURES[name], folder)
        return folder

    return make


def cut(
    name: str, folder: Path, sizes: dict[str, int], *, before: Any = None, read: bool = True, **options: Any
) -> Any:
    """Return this process's part of a model, and what a step asks of it. before(model): between sockets and cutting."""
    architecture = ARCHITECTURES[name]
    topology = Topology(degrees=Degrees(**{axis: sizes.get(axis, 1) for axis in AXES}), rank=dist.get_rank())
    meshes = build_meshes(topology, "cpu")
    experts: Any = reference
    if topology.size("ep") > 1:
        experts = ParallelExperts(
            dispatcher=AllToAll(group=meshes.ep.get_group(), num_experts=8), compute=reference
        )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    dtype = options.pop("dtype", torch.float32)
    model = build_meta(architecture, config, dtype=dtype, experts=experts if architecture.spec.is_moe else None)
    if before is not None:
        before(model)
    modules = dict(sockets.experts_modules(model, architecture))
    sharded = shard(model, architecture, topology, meshes, experts=modules, **options)
    if read:
        load_weights(model, folder, architecture)
    return model, sharded


def rows(count: int) -> list[Row]:
    return [Row(row_id=n, input_ids=[3 + n, 4, 5, 6 + n, 7], supervised=[True] * 5) for n in range(count)]


def step(model: Any, sharded: Any, name: str, batches: int, rate: float = 0.0) -> Any:
    """Run one step of so many micro-batches with plain SGD."""
    method = Sft(collate_rows=collate)
    return run_step(
        model=model, model_hidden=last_hidden, head=Head(model, ARCHITECTURES[name]), method=method,
        batches=[method.collate([row], 1) for row in rows(batches)], sharded=sharded, max_grad_norm=None, device=CPU,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "experts"),
    [
        ({"ep": 2}, "dispatch"),
        ({"shard": 2, "ep": 2}, "experts"),
        ({"replicate": 2, "ep": 2}, "experts"),
        ({"shard": 2}, "dense"),
    ],
)
def test_every_parameter_has_one_owner(sizes: dict[str, int], experts: str, folder_of: Any) -> None:
    def found() -> tuple[dict[str, int], set[str]]:
        model, sharded = cut("gpt_oss", folder_of("gpt_oss"), sizes, read=False)
        of = owners(model, sharded.meshes)
        assert len(of) == len(list(model.parameters()))
        return by_owner(of), {owner for name, owner in of.items() if ".experts." in name}

    folder_of("gpt_oss")
    world = int(torch.tensor(list(sizes.values())).prod())
    counts, of_experts = ranks.run(world, found)[0]
    assert of_experts == {experts}
    assert sum(counts.values()) == counts.get("dense", 0) + (counts.get(experts, 0) if experts != "dense" else 0)


def test_a_parameter_that_nobody_sums_is_an_error_with_its_name(folder_of: Any) -> None:
    def added_later() -> None:
        model, sharded = cut("qwen3_moe", folder_of("qwen3_moe"), {"ep": 2}, read=False)
        model.model.layers[1].mlp.register_parameter("late", nn.Parameter(torch.zeros(3)))
        owners(model, sharded.meshes)

    folder_of("qwen3_moe")
    with pytest.raises(ranks.RankFailed, match=r"nobody sums the gradients of model\.layers\.1\.mlp\.late"):
        ranks.run(2, added_later)


def test_an_expert_tensor_that_is_not_over_all_experts_is_an_error(folder_of: Any) -> None:
    def with_a_scale(model: Any) -> None:
        experts = model.model.layers[1].mlp.experts
        experts.register_parameter("scale", nn.Parameter(torch.empty(5, device="meta")))

    folder_of("qwen3_moe")
    with pytest.raises(ranks.RankFailed, match=r"mlp\.experts does not hold its experts as tensors over all"):
        ranks.run(2, lambda: cut("qwen3_moe", folder_of("qwen3_moe"), {"ep": 2}, before=with_a_scale, read=False))


def test_classes_keep_their_names_and_buffers_stay_whole(folder_of: Any) -> None:
    def looked_at() -> tuple[str, str, Any, bool, list[str]]:
        model, _ = cut("lfm2_moe", folder_of("lfm2_moe"), {"shard": 2, "ep": 2})
        block = model.model.layers[1].feed_forward
        found = [path for path, _ in sockets.experts_modules(model, ARCHITECTURES["lfm2_moe"])]
        bias = block.expert_bias
        return (type(model).__name__, type(model.model.layers[1]).__name__, (bias.dtype, bias.shape),
                isinstance(bias, DTensor), found)  # fmt: skip

    folder_of("lfm2_moe")
    for model, layer, bias, is_cut, found in ranks.run(4, looked_at):
        assert (model, layer) == ("Lfm2MoeForCausalLM", "Lfm2MoeDecoderLayer")
        assert bias == (torch.float32, (8,)) and not is_cut
        assert found == [f"model.layers.{n}.feed_forward.experts" for n in (1, 2, 3)]


def test_a_module_of_another_dtype_is_a_unit_of_its_own_and_keeps_its_dtype(folder_of: Any) -> None:
    def wide_router(model: Any) -> None:
        for layer in model.model.layers[1:]:
            gate = layer.mlp.gate
            gate.weight = nn.Parameter(torch.empty_like(gate.weight, dtype=torch.float32))
            gate.register_forward_pre_hook(lambda _, given: (given[0].float(),))

    def trained() -> tuple[bool, Any, Any]:
        model, sharded = cut(
            "qwen3_moe", folder_of("qwen3_moe"), {"ep": 2}, before=wide_router, dtype=torch.bfloat16
        )
        outcome = step(model, sharded, "qwen3_moe", 2, rate=0.1)
        gate = model.model.layers[1].mlp.gate
        return isinstance(gate, FSDPModule), gate.weight.dtype, outcome.grad_norm

    folder_of("qwen3_moe")
    for is_unit, dtype, norm in ranks.run(2, trained):
        assert is_unit and dtype == torch.float32 and norm > 0


def test_a_module_of_several_dtypes_is_said_to_be_impossible(folder_of: Any) -> None:
    def mixed(model: Any) -> None:
        experts = model.model.layers[0].mlp.router
        experts.bias = nn.Parameter(torch.empty_like(experts.bias, dtype=torch.float32))

    folder_of("gpt_oss")
    with pytest.raises(ranks.RankFailed, match="GptOssTopKRouter holds parameters of several dtypes"):
        ranks.run(
            2,
            lambda: cut(
                "gpt_oss", folder_of("gpt_oss"), {"shard": 2}, before=mixed, dtype=torch.bfloat16, read=False
            ),
        )


class Collectives(TorchDispatchMode):
    """Counts what is gathered and what is summed over processes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in str(func):
            self.counts["gather"] += 1
        if "reduce_scatter" in str(func):
            self.counts["reduce"] += 1
        return func(*args, **(kwargs or {}))


def traffic(folder: Path, batches: int, options: dict[str, Any]) -> tuple[Counter[str], bool]:
    """Return the collectives of one step, and whether every parameter is cut after it."""
    model, sharded = cut("lfm2", folder, {"shard": 2}, **options)
    with Collectives() as seen:
        step(model, sharded, "lfm2", batches)
    return seen.counts, all(isinstance(parameter, DTensor) for parameter in model.parameters())


UNITS, BATCHES = 5, 3
"""Four layers and everything else; of ZeRO-3 the last-mentioned stays gathered from forward to backward."""


@pytest.mark.parametrize(
    ("options", "gathers", "reductions"),
    [
        ({}, BATCHES * UNITS, BATCHES * UNITS),
        ({"reshard_after_backward": False, "defer_grad_sync": True}, UNITS, UNITS),
        ({"defer_grad_sync": True}, BATCHES * UNITS, UNITS),
        ({"reshard_after_forward": True}, BATCHES * (2 * UNITS - 1), BATCHES * UNITS),
    ],
    ids=["zero2", "deferred", "summed once", "zero3"],
)
def test_weights_are_gathered_and_gradients_summed_as_often_as_asked(
    options: dict[str, Any], gathers: int, reductions: int, folder_of: Any
) -> None:
    for counts, is_cut in ranks.run(2, traffic, folder_of("lfm2"), BATCHES, options):
        assert counts == {"gather": gathers, "reduce": reductions}
        assert is_cut


def test_after_a_forward_without_backward_settling_makes_shards_of_parameters_again(folder_of: Any) -> None:
    def evaluated() -> tuple[bool, bool]:
        model, sharded = cut("lfm2", folder_of("lfm2"), {"shard": 2})
        with torch.no_grad():
            last_hidden(model, collate(rows(1), 1))
        gathered = any(not isinstance(parameter, DTensor) for parameter in model.parameters())
        sharded.settle()
        return gathered, all(isinstance(parameter, DTensor) for parameter in model.parameters())

    folder_of("lfm2")
    assert ranks.run(2, evaluated) == [(True, True)] * 2


def test_tied_embedding_and_head_stay_one_parameter_through_a_step(folder_of: Any) -> None:
    def stepped() -> tuple[bool, bool, bool]:
        model, sharded = cut("lfm2_moe", folder_of("lfm2_moe"), {"ep": 2})
        weight = model.lm_head.weight
        before = weight.full_tensor().clone()
        step(model, sharded, "lfm2_moe", 2, rate=0.1)
        same = model.lm_head.weight is model.model.embed_tokens.weight is weight
        moved = weight.full_tensor() - before
        # Rows that are no input are only the head's to move, rows of inputs both's.
        return same, bool(moved[1000].abs().max() > 0), bool(moved[4].abs().max() > 0)

    folder_of("lfm2_moe")
    assert ranks.run(2, stepped) == [(True, True, True)] * 2


def test_bf16_gradients_are_summed_over_processes_in_fp32(folder_of: Any) -> None:
    """Two processes with 1 and 2^-8: their sum in bf16 would be 1, and with fp32 it is rounded once."""

    def summed(reduce_dtype: torch.dtype | None) -> list[float]:
        model, sharded = cut(
            "lfm2", folder_of("lfm2"), {"shard": 2}, dtype=torch.bfloat16, reduce_dtype=reduce_dtype,
            defer_grad_sync=True,
        )
        values = (1.0, 2.0**-8, 2.0**-8)
        for number, value in enumerate(values, start=1):
            sharded.micro_batch(is_last=number == len(values))
            hidden = last_hidden(model, collate(rows(1), 1))
            norm = model.model.embedding_norm.weight
            (norm * (value if dist.get_rank() == 0 else 0.0)).sum().add((hidden * 0).sum()).backward()
        return model.model.embedding_norm.weight.grad.full_tensor().float().unique().tolist()

    folder_of("lfm2")
    assert ranks.run(2, summed, torch.float32) == [[1.0 + 2.0**-7]] * 2
    assert ranks.run(2, summed, None) == [[1.0]] * 2
