"""The bytes a benchmark reports: counted as torch counts, and equal to what the model and its routing must cost.

Not for times. Two processes, so that a ring sends a tensor's other half and an exchange the other process's rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from halo_core import runtime
from halo_core.bench import measure, random_weights, receipt
from halo_core.bench.wire import Traffic, WireCount
from halo_core.cli import bench
from halo_core.data.collate import collate
from halo_core.data.rows import Row
from halo_core.expert_parallel.traffic import layer_traffic
from halo_core.methods.sft import Sft
from halo_core.models import sockets
from halo_core.models.build import build_meta
from halo_core.models.hidden import Head, last_hidden
from halo_core.optim.build import build_optimizer
from halo_core.registry import size
from halo_core.trainer.parallel import build_parallel
from halo_core.trainer.recompute import enable_recompute
from halo_core.trainer.step import run_step
from tests.distributed import ranks

SEQ, STEPS, WARMUP = 24, 2, 1
KINDS = {
    "all_gather": ("_allgather_base_", "allgather_into_tensor_coalesced_"),
    "reduce_scatter": ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    "all_reduce": ("allreduce_",),
    "all_to_all": ("alltoall_base_",),
}
FLOAT, COUNT = 4, 8
TOLERANCE = 1e-5
"""fp32, the same sums in another order."""


def planned(family: str, words: tuple[str, ...], world: int) -> Any:
    options = bench.Options(model="tiny", family=family, seq=SEQ, batch=2 // world, steps=STEPS)
    checked = measure.complete(bench.planned(words, options, world))
    return checked, runtime.resolve(checked)


def measured(family: str, words: tuple[str, ...], world: int) -> dict[str, Any]:
    checked, resolved = planned(family, words, world)
    found = measure.measure(checked, resolved, steps=STEPS, warmup=WARMUP, say=lambda line: None)
    return receipt.build(checked, resolved, found, warmup=WARMUP)["result"]


class Observed:
    """One process's model of two, and a step to be watched."""

    def __init__(self, family: str, words: tuple[str, ...]) -> None:
        self.checked, resolved = planned(family, words, 2)
        self.config, architecture = self.checked.config, self.checked.architecture
        parallel = build_parallel(self.checked.plan.degrees, architecture, self.checked.model_config, resolved.device)
        self.model = build_meta(architecture, self.checked.model_config, dtype=torch.float32,
                                attention=resolved.attention, experts=parallel.experts(resolved))  # fmt: skip
        self.sharded = parallel.cut(self.model, architecture, self.config)
        random_weights.fill(self.model, resolved.device, seed=0)
        if self.config.gradient_checkpointing:
            enable_recompute(self.model, routes=True)
        self.head = Head(self.model, architecture, resolved.head_kernel)
        self.optimizer = build_optimizer(self.model, self.config)
        generator = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(0, self.model.config.vocab_size, (SEQ + 5 * dist.get_rank(),), generator=generator)
        self.method = Sft(collate_rows=collate)
        row = Row(row_id=0, input_ids=tokens.tolist(), supervised=[True] * len(tokens))
        self.batch = self.method.collate([row], 0)
        self.ids: list[torch.Tensor] = []
        for socket in sockets.of(self.model).by_path.values():
            socket.listener = lambda ids: self.ids.append(ids.clone())

    def step(self) -> None:
        self.ids.clear()
        run_step(model=self.model, model_hidden=last_hidden, head=self.head, method=self.method, batches=[self.batch],
                 optimizer=self.optimizer, max_grad_norm=1.0, device=torch.device("cpu"),
                 sharded=self.sharded)  # fmt: skip


def watched(family: str, words: tuple[str, ...]) -> dict[str, Any]:
    """Return what one step costs by our count, torch's count of calls, and what the model and its routing must cost."""
    one = Observed(family, words)
    one.step()  # the first makes what later ones find made
    with WireCount() as wire:
        one.step()
    ids = [chosen.clone() for chosen in one.ids]
    with CommDebugMode() as torchs:
        one.step()
    calls = {str(operation).rpartition(".")[2]: count for operation, count in torchs.get_comm_counts().items()}
    experts = {id(p) for _, m in sockets.experts_modules(one.model, one.checked.architecture) for p in m.parameters()}
    cut_twice = [p for p in one.model.parameters() if isinstance(p, DTensor)]
    gathered = sum(p.numel() for p in cut_twice if id(p) not in experts or one.config.expert_parallel_size == 1)
    others: list[Any] = [None, None]
    dist.all_gather_object(others, ids)
    config = one.checked.model_config
    num_experts = size(one.checked.architecture.spec.names.num_experts, config)
    traffic = [
        layer_traffic(list(of_ranks), num_experts=num_experts, hidden_size=config["hidden_size"], itemsize=FLOAT)
        for of_ranks in zip(*others, strict=True)
    ]
    return {"wire": wire.by_kind, "torch": calls, "gathered": gathered, "traffic": traffic,
            "slots": ids[0].shape[1] if ids else 0, "hidden": config["hidden_size"]}  # fmt: skip


@cache
def both(family: str, words: tuple[str, ...]) -> list[dict[str, Any]]:
    return ranks.run(2, watched, family, words)


PLAIN = ("gradient_checkpointing=false",)
EP = ("expert_parallel_size=2",)


@pytest.mark.parametrize(
    ("family", "words"),
    [("lfm2", EP), ("gpt_oss", (*EP, *PLAIN)), ("qwen3", ("fsdp_reshard_after_forward=true",))],
)
def test_calls_are_those_that_torch_counts(family: str, words: tuple[str, ...]) -> None:
    for one in both(family, words):
        expected = {kind: sum(one["torch"].get(name, 0) for name in names) for kind, names in KINDS.items()}
        assert sum(expected.values()) == sum(one["torch"].values()), one["torch"]
        ours = {kind: traffic.calls for kind, traffic in one["wire"].items()}
        assert ours == {kind: count for kind, count in expected.items() if count}


def test_bytes_are_those_of_weights_gradients_and_rows() -> None:
    """Without recomputation and with weights kept from forward to backward each weight is gathered and summed once."""
    found = both("gpt_oss", (*EP, *PLAIN))
    for one in found:
        assert one["wire"]["all_gather"].sent == one["gathered"] * FLOAT // 2
        assert one["wire"]["reduce_scatter"].sent == one["gathered"] * FLOAT // 2
    # A row leaves with its slots and comes back as a sum; in backward the same two ways, and the slots' gradients once.
    hidden, slots = found[0]["hidden"] * FLOAT, found[0]["slots"]
    expected = 0
    for layer in found[0]["traffic"]:
        rows = (layer.per_destination - 2 * COUNT) // (2 * hidden + slots * 2 * FLOAT)
        expected += rows * (4 * hidden + slots * 3 * FLOAT) + 2 * COUNT
    assert expected > 0
    assert sum(one["wire"]["all_to_all"].sent for one in found) == expected


def test_a_recomputed_layer_sends_its_rows_again() -> None:
    kept, again = (both("gpt_oss", (*EP, *words))[0]["wire"] for words in (PLAIN, ()))
    assert again["all_to_all"].sent > kept["all_to_all"].sent
    assert again["all_gather"] == kept["all_gather"]


@pytest.mark.parametrize("family", ["gpt_oss", "lfm2"])
def test_layouts_start_from_the_same_weights_and_rows(family: str) -> None:
    words = ("learning_rate=0.1", "optim=sgd", "moe_balancing=auto")
    one = measured(family, words, 1)
    for layout in (("expert_parallel_size=2",), ()):
        several = ranks.run(2, measured, family, (*words, *layout), 2)
        assert several[0]["losses"] == several[1]["losses"]
        assert several[0]["wire"] == several[1]["wire"], "one number for all"
        for what in ("losses", "grad_norms"):
            assert several[0][what] == pytest.approx(one[what], abs=TOLERANCE, rel=TOLERANCE)
    assert one["losses"][-1] != one["losses"][0]


def several_kinds() -> dict[str, Traffic]:
    mine = torch.ones(6, 5)
    with WireCount() as wire:
        receive, send = ([4, 1], [4, 2]) if dist.get_rank() == 0 else ([2, 5], [1, 5])
        dist.all_to_all_single(torch.empty(sum(receive), 5), mine, receive, send)
        dist.all_to_all_single(torch.empty(6, 5), mine)
        dist.all_reduce(mine)
        dist.broadcast(mine, 0)
        functional_all_reduce(mine, "sum", dist.group.WORLD).sum()
        dist.barrier()
        mine.square().sum()
    return wire.by_kind


def test_what_leaves_a_process_is_counted_by_hand() -> None:
    rank_0, rank_1 = ranks.run(2, several_kinds)
    row, tensor = 5 * FLOAT, 30 * FLOAT
    assert rank_0["all_to_all"] == Traffic(calls=2, handed=2 * tensor, sent=2 * row + 3 * row)
    assert rank_1["all_to_all"] == Traffic(calls=2, handed=2 * tensor, sent=1 * row + 3 * row)
    # A ring of two sends half of the tensor to be summed, and half of the sum.
    assert rank_0["all_reduce"] == Traffic(calls=2, handed=2 * tensor, sent=2 * tensor)
    assert rank_0["broadcast"] == Traffic(calls=1, handed=tensor, sent=tensor // 2)


def unknown() -> None:
    with WireCount():
        dist.gather(torch.ones(2), [torch.empty(2), torch.empty(2)] if dist.get_rank() == 0 else None)


def test_a_collective_that_is_not_known_is_an_error_and_not_nothing() -> None:
    with pytest.raises(ranks.RankFailed, match="gather_ are not counted"):
        ranks.run(2, unknown)
