"""One norm and one clip over gradients that are cut in every way, and what stops a step on every process alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from halo_core.arithmetic import Degrees
from halo_core.data.collate import collate
from halo_core.data.rows import Row
from halo_core.methods.sft import Sft
from halo_core.optim.update import scale_in_place
from halo_core.sharding import norm
from halo_core.sharding.sharded import Sharded
from halo_core.topology import AXES, Meshes, Topology, build_meshes
from halo_core.trainer import gradients
from halo_core.trainer.step import run_step
from halo_core.trainer.stopped import StepFault
from tests.distributed import ranks

CPU = torch.device("cpu")
EXACT = 1e-12
"""Relative, fp64."""


def meshes_of(**sizes: int) -> Meshes:
    degrees = Degrees(**{axis: sizes.get(axis, 1) for axis in AXES})
    return build_meshes(Topology(degrees=degrees, rank=dist.get_rank()), "cpu")


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"rows": (8, 3), "uneven": (5, 2), "replicas": (8, 2), "experts": (8, 4), "whole": (7,), "wide": (2, 8)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def cut_in_every_way() -> tuple[dict[str, Tensor], Meshes]:
    """Return the tensors over 2 replicas x 2 processes: cut, cut unevenly, cut twice, cut late, and not at all."""
    meshes = meshes_of(replicate=2, ep=2)
    pair, both = meshes.ep, meshes.dense
    places: dict[str, tuple[DeviceMesh, list[Any]]] = {
        "rows": (both, [Replicate(), Shard(0)]), "uneven": (both, [Replicate(), Shard(0)]),
        "replicas": (both, [Replicate(), Replicate()]), "wide": (both, [Replicate(), Shard(1)]),
    }  # fmt: skip
    found = {
        name: distribute_tensor(tensor, *places[name], src_data_rank=None)
        for name, tensor in tensors().items()
        if name in places
    }
    holder = nn.Module()
    holder.register_parameter("experts", nn.Parameter(distribute_tensor(tensors()["experts"], pair, [Shard(0)])))
    fully_shard(holder, mesh=meshes.experts)
    found["experts"] = holder.experts.detach()
    found["whole"] = tensors()["whole"]
    return {name: found[name] for name in tensors()}, meshes


def test_each_piece_counts_once() -> None:
    def found() -> tuple[float, float, int]:
        cut, meshes = cut_in_every_way()
        sharded = Sharded(model=None, meshes=meshes, reshard_after_backward=True, defer_grad_sync=False)
        _, total = sharded.loss_and_norm(torch.tensor(0.25), cut.values())
        every = torch.stack([norm.local(tensor).double().square().sum() for tensor in cut.values()]).sum()
        dist.all_reduce(every)
        return total.item(), every.sqrt().item(), sum(norm.counts_here(tensor) for tensor in cut.values())

    exact = torch.cat([tensor.flatten() for tensor in tensors().values()]).double().norm().item()
    for total, every, counted in ranks.run(4, found):
        assert total == pytest.approx(exact, rel=EXACT)
        assert every > 1.1 * exact, "counting every copy would be seen"
        assert counted in (6, 4, 0), "of two replicas one counts, of whole tensors one of four"


def test_clipping_scales_pieces_as_torch_scales_whole_tensors() -> None:
    def clipped() -> dict[str, Tensor]:
        cut, meshes = cut_in_every_way()
        sharded = Sharded(model=None, meshes=meshes, reshard_after_backward=True, defer_grad_sync=False)
        _, total = sharded.loss_and_norm(torch.tensor(0.0), cut.values())
        scale_in_place(cut.values(), gradients.clip_coefficient(total, 0.5))
        return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in cut.items()}

    wanted = [nn.Parameter(tensor) for tensor in tensors().values()]
    for parameter, tensor in zip(wanted, tensors().values(), strict=True):
        parameter.grad = tensor.clone()
    nn.utils.clip_grad_norm_(wanted, 0.5)
    for one in ranks.run(4, clipped):
        for parameter, tensor in zip(wanted, one.values(), strict=True):
            assert parameter.grad is not None and torch.allclose(tensor, parameter.grad, rtol=1e-6, atol=0)


def test_the_loss_is_added_up_over_processes_with_different_rows() -> None:
    def found() -> float:
        sharded = Sharded(model=None, meshes=meshes_of(ep=3), reshard_after_backward=True, defer_grad_sync=False)
        return float(sharded.loss_and_norm(torch.tensor(float(dist.get_rank())), [])[0])

    assert ranks.run(3, found) == [3.0] * 3


def test_what_is_not_finite_anywhere_has_one_name_everywhere() -> None:
    def found() -> list[str | None]:
        cut, meshes = cut_in_every_way()
        sharded = Sharded(model=None, meshes=meshes, reshard_after_backward=True, defer_grad_sync=False)
        names = [sharded.first_not_finite(cut)]
        if dist.get_rank() == 3:  # the last process's piece of one tensor alone
            norm.local(cut["uneven"])[:] = torch.nan
        return [*names, sharded.first_not_finite(cut)]

    assert ranks.run(4, found) == [[None, "uneven"]] * 4


class Lookup(nn.Module):
    """A model of two tensors, its own entrance to `hidden`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)

    def forward(self, batch: Any) -> Tensor:
        return self.out(self.embed(batch.input_ids)).float().log_softmax(-1)


def one_step(rows: list[list[Row]], spoil: bool = False) -> Any:
    """Run a step of this process's rows, one micro-batch; return what came of it, and whether weights moved."""
    meshes = meshes_of(shard=dist.get_world_size())
    model: Any = Lookup()
    fully_shard(model, mesh=meshes.dense)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    before = model.out.weight.full_tensor().clone()
    method = Sft(collate_rows=collate)

    def head(hidden: Tensor, targets: Tensor) -> Tensor:
        hidden = hidden * torch.nan if spoil and dist.get_rank() == 1 else hidden
        return hidden.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (targets >= 0)

    try:
        outcome = run_step(
            model=model, model_hidden=lambda of, batch: of(batch), head=head, method=method,
            batches=[method.collate(rows[dist.get_rank()], 0)], optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            max_grad_norm=None, device=CPU,
            sharded=Sharded(model=model, meshes=meshes, reshard_after_backward=True, defer_grad_sync=False),
        )  # fmt: skip
    except StepFault as fault:
        return str(fault), torch.equal(model.out.weight.full_tensor(), before)
    return outcome.tokens, outcome.supervised_tokens, outcome.row_ids


def row(number: int, *supervised: bool) -> Row:
    return Row(row_id=number, input_ids=list(range(1, len(supervised) + 1)), supervised=list(supervised))


def test_counts_are_of_all_processes_and_rows_of_this_one() -> None:
    rows = [[row(5, False, True, True)], [row(6, False, False)], []]
    assert ranks.run(3, one_step, rows) == [(5, 2, (5,)), (5, 2, (6,)), (5, 2, ())]


def test_a_step_that_no_process_can_learn_from_stops_all_with_the_number_of_all_rows() -> None:
    rows = [[row(5, False, False)], [row(6, False)], []]
    found = ranks.run(3, one_step, rows)
    assert all("none of the 2 rows" in text and unchanged for text, unchanged in found)


def test_a_loss_that_is_not_finite_on_one_process_stops_all_in_the_same_words() -> None:
    rows = [[row(5, False, True)], [row(6, False, True)]]
    found = ranks.run(2, one_step, rows, True)
    assert len({text for text, _ in found}) == 1
    assert "loss nan" in found[0][0] and "gradient of embed.weight" in found[0][0]
    assert all(unchanged for _, unchanged in found)
