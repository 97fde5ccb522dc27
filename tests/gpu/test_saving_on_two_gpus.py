"""What two GPUs save is what they hold: resumed without a step at other layouts, it is exported byte for byte again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

CONFIG = """
model_name_or_path: tiny
family: lfm2
dataset_name: {folder}/rows.jsonl
max_length: 128
max_steps: 3
save_steps: 3
learning_rate: 0.001
dtype: {dtype}
per_device_train_batch_size: 4
"""


def halo(*words: object) -> None:
    ran = subprocess.run([sys.executable, "-m", "halo_core.cli.main", *map(str, words)], capture_output=True,
                         text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_of_ep_2_is_exported_alike_by_one_gpu_by_two_and_from_parts(tmp_path: Path, dtype: str) -> None:
    rows = [{"prompt": f"count to {n}", "completion": " ".join(map(str, range(n)))} for n in range(1, 25)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(folder=tmp_path, dtype=dtype))
    resumed = f"resume_from_checkpoint={tmp_path / 'ep' / 'checkpoint-3'}"
    two = ("--nproc", 2)
    halo("train", config, *two, f"output_dir={tmp_path / 'ep'}", "expert_parallel_size=2")
    halo("train", config, *two, f"output_dir={tmp_path / 'shard'}", resumed)
    halo("train", config, f"output_dir={tmp_path / 'one'}", resumed, "per_device_train_batch_size=8")
    halo("train", config, *two, f"output_dir={tmp_path / 'parts'}", resumed, "expert_parallel_size=2",
         "save_sharded_ep=true")  # fmt: skip
    halo("run", "merge-ep-shards", tmp_path / "parts", tmp_path / "merged")
    expected = (tmp_path / "ep" / "model.safetensors").read_bytes()
    for name in ("shard", "one", "merged"):
        assert (tmp_path / name / "model.safetensors").read_bytes() == expected, name
