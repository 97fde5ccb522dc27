"""Training on a CUDA device is the training that the CPU shows, for every architecture at tiny size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from halo_core import registry as facts
from halo_core.models.tiny import write_tiny
from tests.gpu.tiny_runs import BF16_TOLERANCE, losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ARCHITECTURES = facts.load().architectures()
# fp32 sums in another order, through a few steps: far below a changed formula, which shows in the first digits.
LOSS_TOLERANCE = 2e-3
PLAIN = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "optim": "sgd"}


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_cuda_trains_as_the_cpu_does(architecture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(architecture, tmp_path / "model")
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cuda = losses(tmp_path / "model", tmp_path / "cuda", **PLAIN)
    in_bf16 = losses(tmp_path / "model", tmp_path / "bf16", **PLAIN, dtype="bfloat16", gradient_checkpointing=False)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        on_cpu = losses(tmp_path / "model", tmp_path / "cpu", **PLAIN)
    assert on_cuda == pytest.approx(on_cpu, abs=LOSS_TOLERANCE)
    assert in_bf16 == pytest.approx(on_cpu, abs=BF16_TOLERANCE)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_resume_on_cuda_repeats_the_uninterrupted_run(optim: str, tmp_path: Path) -> None:
    architecture = ARCHITECTURES[0]
    write_tiny(architecture, tmp_path / "model")
    settings = {**PLAIN, "optim": optim, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    whole = losses(tmp_path / "model", tmp_path / "whole", **settings, save_strategy="steps", save_steps=5)
    again = losses(
        tmp_path / "model", tmp_path / "again", **settings, resume_from_checkpoint=str(tmp_path / "whole/checkpoint-5")
    )
    assert again[5:] == pytest.approx(whole[5:], abs=1e-5)
