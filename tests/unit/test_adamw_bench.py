"""The measurement of an optimizer step: what it counts, and the receipt it leaves. Its times mean nothing here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from halo_core.bench import optimizer
from halo_core.kernels.adamw.one_by_one import one_by_one

NUMBER = 5000
ROUTER = 16
"""Elements that stay in fp32 in every row: read and written with two moments, the gradient read."""
BF16_BYTES, FP32_BYTES, MASTER_BYTES = 14, 28, 28


def test_bytes_that_a_step_must_touch_are_counted_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(optimizer, "PARITY", 1003)
    optimizer.main(["--parameters", str(NUMBER), "--steps", "1", "--out", str(tmp_path / "receipt.json")])
    made = json.loads((tmp_path / "receipt.json").read_text(encoding="utf-8"))
    assert made["fixture"] == {"parameters": NUMBER + ROUTER, "tensors": 2, "timed_steps": 1}
    rows = {row["name"]: row["least_bytes"] - ROUTER * FP32_BYTES for row in made["result"]["steps"]}
    assert rows == {
        "AdamWBF16": NUMBER * BF16_BYTES, "AdamWFP32": NUMBER * MASTER_BYTES,
        "torch AdamW(fused), bf16 state": NUMBER * BF16_BYTES, "torch AdamW(fused), fp32 state": NUMBER * FP32_BYTES,
    }  # fmt: skip
    assert made["result"]["parity"] == {"elements": 1003, "weight": 0, "first": 0, "second": 0}
    assert optimizer.text(made) in capsys.readouterr().out


def test_a_wrong_kernel_is_counted_in_the_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "PARITY", 1003)

    def wrong(parts: Any, scale: Any) -> None:
        one_by_one(parts, scale * 2)

    found = optimizer.parity(torch.device("cpu"), wrong)
    assert found["first"] > 900


def test_shapes_reach_what_is_asked_for_in_whole_layers() -> None:
    wanted = optimizer.shapes(4_000_000_000)
    elements = sum(torch.Size(shape).numel() for shape in wanted.values())
    layer = sum(torch.Size(shape).numel() for shape in optimizer.LAYER.values())
    assert 4_000_000_000 <= elements < 4_000_000_000 + layer
    assert any(name.endswith(optimizer.IN_FP32) for name in wanted)
