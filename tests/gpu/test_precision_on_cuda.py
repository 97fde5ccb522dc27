"""bf16 training and fp32 routers on a CUDA device: the same bits again, the losses of the CPU, routers in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from halo_core import registry as facts
from halo_core.models.fp32_router import routers
from halo_core.models.tiny import write_tiny
from tests.gpu.tiny_runs import BF16_TOLERANCE, losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ARCHITECTURES = facts.load().architectures()
SETTINGS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 3e-4, "bf16": True}


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_bf16_on_cuda_repeats_itself_and_is_the_cpus(
    architecture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(architecture, tmp_path / "model")
    keys = {"fp32_router": True} if architecture.spec.is_moe else {}
    one = losses(tmp_path / "model", tmp_path / "one", **SETTINGS, **keys)
    again = losses(tmp_path / "model", tmp_path / "again", **SETTINGS, **keys)
    assert one == again
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        on_cpu = losses(tmp_path / "model", tmp_path / "cpu", **SETTINGS, **keys)
    assert one == pytest.approx(on_cpu, abs=BF16_TOLERANCE)


@pytest.mark.parametrize(
    "architecture", [a for a in ARCHITECTURES if a.spec.is_moe], ids=lambda architecture: architecture.name
)
def test_routers_in_fp32_are_called_in_fp32_on_cuda(
    architecture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(architecture, tmp_path / "model")
    seen: set[torch.dtype] = set()

    def watch(router: torch.nn.Module) -> None:
        router.register_forward_hook(
            lambda module, given, output: seen.update(p.dtype for p in output if p.is_floating_point())
        )

    monkeypatch.setattr(
        "halo_core.trainer.run.enable_recompute",
        lambda model, **_: [watch(router) for _, router in routers(model, architecture)],
    )
    losses(tmp_path / "model", tmp_path / "out", **SETTINGS, fp32_router=True, max_steps=2, optim="adamw_fp32")
    assert seen == {torch.float32}
