"""Experts on two CUDA devices, tokens by NCCL: the results of one device, and one wait per layer. Not for models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest difference as a share of the largest value. In bf16 what two processes send is rounded before it is added."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of two processes found out."""
    script = Path(__file__).with_name("exchange_on_two_gpus.py")
    store = tmp_path_factory.mktemp("exchange") / "store"
    children = [
        subprocess.Popen(
            [sys.executable, script, str(rank), store], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [child.communicate(timeout=300) for child in children]
    for child, (_, errors) in zip(children, outputs, strict=True):
        assert child.returncode == 0, errors[-4000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.mark.parametrize("case", ["even", "forced", "empty"])
@pytest.mark.parametrize("dtype", sorted(TOLERANCES))
def test_outputs_and_every_gradient_equal_one_device(dtype: str, case: str, found: list[dict[str, Any]]) -> None:
    for one in found:
        gaps = one[f"{dtype}-{case}"]
        assert all(gap <= TOLERANCES[dtype] for gap in gaps.values()), gaps


def test_one_layer_waits_for_the_device_once(found: list[dict[str, Any]]) -> None:
    assert [one["waits"] for one in found] == [1, 1]
