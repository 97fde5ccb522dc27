"""bf16 state goes on bit for bit, rounding by chance included, in its layout and in others given equal gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from halo_core import process_group
from halo_core.checkpoint import resume
from halo_core.checkpoint.find_together import find_together
from halo_core.checkpoint.identity import Identity
from halo_core.checkpoint.save import save, stored_weights
from halo_core.optim.adamw_bf16 import AdamWBF16, AdamWFP32
from tests.distributed import ranks

SHAPES = {"matrix": (6, 5), "uneven": (5, 3), "whole": (7,), "exact": (4, 2)}
LAST, STOP = 6, 3


def weight(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(len(name))
    dtype = torch.float32 if name == "exact" else torch.bfloat16
    return torch.randn(SHAPES[name], generator=generator).to(dtype)


def gradient(name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + len(name))
    return torch.randn(SHAPES[name], generator=generator)


def cut(name: str, tensor: Tensor) -> Tensor:
    """Return this process's part: cut along the first dim where several processes run, but for one that all hold."""
    if process_group.world() == 1:
        return tensor
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(tensor, mesh, [Replicate() if name == "whole" else Shard(0)])


def train(kind: type, folder: Path, *, save_at: int | None = None, resume_at: bool = False) -> dict[str, Tensor]:
    """Step to the end, or to `save_at` and save; return every weight and state, whole."""
    model = nn.Module()
    for name in SHAPES:
        model.register_parameter(name, nn.Parameter(cut(name, weight(name))))
    groups = [{"params": list(model.named_parameters()), "weight_decay": 0.1}]
    optimizer = kind(groups, lr=0.01, betas=(0.9, 0.99), eps=1e-8, seed=3)
    first = 1
    if resume_at:
        checkpoint = find_together(True, folder)
        assert checkpoint is not None
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        resume.load_weights(checkpoint, model)
        assert resume.load_optimizer(checkpoint, model, optimizer) == ()
        first = checkpoint.step + 1
    for step in range(first, (save_at or LAST) + 1):
        optimizer.update({name: cut(name, gradient(name, step)) for name in SHAPES})
    if save_at is not None:
        identity = Identity(config={}, plan={}, data={}, environment={})
        save(folder, step=save_at, model=model, optimizer=optimizer, progress={}, identity=identity)
    state = {f"{what}/{name}": value for name, parameter in model.named_parameters()
             for what, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
    assert {optimizer.state[parameter]["step"] for parameter in model.parameters()} == {save_at or LAST}
    return {name: whole(tensor) for name, tensor in {**stored_weights(model), **state}.items()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys() and len(one) >= 12
    return [name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("kind", [AdamWBF16, AdamWFP32])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (4, 2), (2, 1)])
def test_weights_moments_and_masters_go_on_bit_for_bit_in_every_layout(
    tmp_path: Path, kind: type, before: int, after: int
) -> None:
    straight = train(kind, tmp_path)
    ranks.run(before, lambda: train(kind, tmp_path, save_at=STOP))
    for resumed in ranks.run(after, lambda: train(kind, tmp_path, resume_at=True)):
        assert differing(straight, resumed) == []
    assert ("master/matrix" in straight) == (kind is AdamWFP32) and "master/exact" not in straight


def test_other_noise_after_a_resume_is_seen_so_the_comparison_can_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = train(AdamWBF16, tmp_path)
    train(AdamWBF16, tmp_path, save_at=STOP)
    give = resume._give

    def with_other_noise(optimizer: Any, order: Any, state: Any) -> None:
        give(optimizer, order, state)
        optimizer.seed += 1

    monkeypatch.setattr(resume, "_give", with_other_noise)
    found = differing(straight, train(AdamWBF16, tmp_path, resume_at=True))
    assert "matrix" in found and "exact" not in found
