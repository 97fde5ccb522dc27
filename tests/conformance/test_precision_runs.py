"""Whole runs in bf16: log, metrics, checkpoint, resume, balancing and export go on as they are in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import halo_core
from halo_core import registry
from halo_core.models.tiny import write_tiny

ROWS = [
    {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n} and {n + 1}"}]}
    for n in range(24)
]
KEYS = {
    "dataset_name": "rows given in Python", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    "max_steps": 6, "save_steps": 3, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "bf16": True,
    "logging_steps": 100, "weight_decay": 0.1,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_tiny(next(a for a in registry.load().architectures() if a.name == "lfm2_moe"), folder)
    return folder


def run(source: Path, out: Path, **keys: Any) -> Any:
    return halo_core.train({"model_name_or_path": str(source), "output_dir": str(out), **KEYS, **keys}, rows=ROWS)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_bf16_run_says_its_rules_and_resumes_bit_by_bit(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"fp32_router": True, "moe_balancing": "bias_update"}
    run(source, tmp_path / "whole", **keys)
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if line.startswith("optimizer: ")]
    assert len(lines) == 3 and len(set(lines)) == 3, said
    assert any("bf16 weights and moments with stochastic rounding" in line for line in lines)
    assert any("decayed, fp32 weights and moments, exact: 3 tensors" in line for line in lines)
    whole = losses(tmp_path / "whole")
    assert len(whole) == 6 and whole[-1] < whole[0] - 1
    run(source, tmp_path / "parts", max_steps=3, **keys)
    run(source, tmp_path / "parts2", resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"), **keys)
    assert losses(tmp_path / "parts2") == whole
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts2"))
    assert one.keys() == other.keys() == load_file(source / "model.safetensors").keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    before = load_file(source / "model.safetensors")
    assert {name: t.dtype for name, t in one.items()} == {name: t.dtype for name, t in before.items()}
    biases = [name for name in one if name.endswith("expert_bias")]
    assert biases and all(not torch.equal(one[name], before[name]) for name in biases)


def test_fp32_masters_learn_as_fp32_does(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "masters", optim="adamw_fp32")
    run(source, tmp_path / "fp32", bf16=False)
    one, other = losses(tmp_path / "masters"), losses(tmp_path / "fp32")
    assert other[0] - other[-1] > 1
    assert one == pytest.approx(other, abs=0.1 * (other[0] - other[-1]))
