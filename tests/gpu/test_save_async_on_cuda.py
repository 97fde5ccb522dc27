"""Saving beside training on GPUs: the copy in locked host memory, and the files of a run that saves at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from halo_core.checkpoint.host_memory import HostMemory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIG = """
model_name_or_path: tiny
family: lfm2
dataset_name: {folder}/rows.jsonl
max_length: 128
max_steps: 6
save_steps: 2
learning_rate: 0.001
per_device_train_batch_size: 4
"""


def test_a_copy_holds_what_was_there_and_its_pages_are_locked() -> None:
    memory = HostMemory()
    tensors = {
        "matrix": torch.randn(300, 200, device="cuda"),
        "narrow": torch.randn(7, device="cuda").bfloat16(),
        "transposed": torch.randn(50, 40, device="cuda").T,
        "none": torch.zeros(0, 3, device="cuda"),
    }
    for _ in range(2):  # the second time into the same memory
        expected = {name: tensor.cpu() for name, tensor in tensors.items()}
        copies = memory.copied(tensors)
        for tensor in tensors.values():
            tensor.add_(1.0)
        torch.cuda.synchronize()
        for name, copy in copies.items():
            assert copy.device.type == "cpu" and torch.equal(copy, expected[name]), name
    assert copies["matrix"].is_pinned() and len(memory._locked) == 3
    memory.close()
    assert not copies["matrix"].is_pinned()


def halo(*words: object) -> str:
    ran = subprocess.run([sys.executable, "-m", "halo_core.cli.main", *map(str, words)], capture_output=True,
                         text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_saves_beside_training_leaves_whole_checkpoints_and_goes_on(tmp_path: Path, processes: int) -> None:
    if torch.cuda.device_count() < processes:
        pytest.skip("needs two CUDA devices")
    rows = [{"prompt": f"count to {n}", "completion": " ".join(map(str, range(n)))} for n in range(1, 25)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(folder=tmp_path))
    several = ("--nproc", 2, "expert_parallel_size=2") if processes == 2 else ()
    said = halo("train", config, *several, f"output_dir={tmp_path / 'run'}", "save_async=true")
    assert "GiB in host memory" in said
    for step in (2, 4, 6):
        assert "every byte is the one that was written" in halo(
            "run", "inspect", tmp_path / "run" / f"checkpoint-{step}")
    halo("train", config, *several, f"output_dir={tmp_path / 'again'}", "save_async=true",
         f"resume_from_checkpoint={tmp_path / 'run' / 'checkpoint-6'}")  # fmt: skip
    # Resumed without a step, the export is what the last checkpoint holds.
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "run" / "model.safetensors").read_bytes()
