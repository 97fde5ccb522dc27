"""The fused short convolution under Triton's interpreter, in a process of its own, against the reference; its rule."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from halo_core.kernels.delta_rule import choice as delta_rule_choice
from halo_core.kernels.short_conv import choice
from halo_core.kernels.short_conv.reference import short_conv

CPU = torch.device("cpu")
SCRIPT = """
import torch
from halo_core.kernels import documents as borders
from halo_core.kernels.short_conv import fused, reference

# The interpreter cuts fp32 to bf16 where a GPU rounds: one bit more.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
# rows, channels, positions, taps, bias, activation: more than one tile of each, fewer positions than taps, one, none
CASES = ((2, 130, 37, 3, True, None), (1, 5, 70, 4, False, "silu"), (3, 7, 1, 3, False, None),
         (2, 4, 33, 4, True, "silu"), (1, 3, 2, 4, True, None), (0, 3, 4, 3, True, "silu"))
torch.manual_seed(0)
for dtype, tolerance in TOLERANCE.items():
    for rows, channels, width, taps, has_bias, activation in CASES:
        found = borders.find(torch.randint(0, 4, (rows, width)).sort(1).values)
        inputs = torch.randn(rows, width, channels, dtype=dtype).transpose(1, 2).requires_grad_()
        weight = torch.randn(channels, taps, dtype=dtype, requires_grad=True)
        bias = torch.randn(channels, dtype=dtype, requires_grad=True) if has_bias else None
        upstream = torch.randn(rows, channels, width, dtype=dtype)
        given = [tensor for tensor in (inputs, weight, bias) if tensor is not None]
        results = []
        for kernel in (reference.short_conv, fused.short_conv, fused.short_conv):
            out = kernel(inputs, weight, bias, activation, found)
            results.append([out, *torch.autograd.grad(out, given, upstream)])
        for right, one, again in zip(*results, strict=True):
            assert one.shape == right.shape and one.dtype == right.dtype
            assert torch.equal(one, again)
            assert (one - right).float().norm() <= tolerance * right.float().norm().clamp_min(1e-6)
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_fused_is_the_reference_in_value_and_gradient() -> None:
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert ran.stdout == "equal\n", ran.stderr[-2000:]


def test_the_rule_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    for rule in (choice, delta_rule_choice):
        assert rule.fused_obstacle(dtype=torch.bfloat16, device=CPU) is not None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert choice.fused_obstacle(dtype=torch.float32, device=cuda) is None
    assert choice.fused_obstacle(dtype=torch.float64, device=cuda) == "it does not compute in float64"
    cases = (("3.7.1", 9, True), ("3.6.0", 9, False), ("3.6.0", 8, True), ("3.3.0", 9, True))
    for triton, capability, is_fine in cases:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, major=capability: (major, 0))
        monkeypatch.setattr(importlib.metadata, "version", lambda name, found=triton: found)
        why = delta_rule_choice.fused_obstacle(dtype=torch.bfloat16, device=cuda)
        assert why is None, "tilelang is there"
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tilelang" else object())
        why = delta_rule_choice.fused_obstacle(dtype=torch.bfloat16, device=cuda)
        assert (why is None) == is_fine and (is_fine or "with triton 3.6.0" in str(why))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert "float32 with fewer bits" in str(delta_rule_choice.fused_obstacle(dtype=torch.float32, device=cuda))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fla" else object())
    why = delta_rule_choice.fused_obstacle(dtype=torch.bfloat16, device=cuda)
    assert why == "flash-linear-attention is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choice.fused_obstacle(dtype=torch.float32, device=cuda) == "triton is not installed"


def test_kernels_by_name() -> None:
    assert choice.kernel("reference") is short_conv
    assert delta_rule_choice.kernel("chunked").__module__.endswith("chunked")
    assert delta_rule_choice.kernel("reference").__module__.endswith("reference")
