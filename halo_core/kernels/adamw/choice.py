"""Which kernel steps AdamW on a device. Both give the same bits; not for choosing the optimizer."""

from __future__ import annotations

import importlib.util

import torch

from halo_core.kernels.adamw.one_by_one import one_by_one
from halo_core.kernels.adamw.parts import Kernel


def fused_obstacle(device: torch.device) -> str | None:
    """Return why the fused kernel cannot run there, or None when it can."""
    if device.type != "cuda":
        return f"Triton does not run on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def kernel(device: torch.device) -> Kernel:
    """Return the kernel for parameters on a device."""
    if fused_obstacle(device) is not None:
        return one_by_one
    from halo_core.kernels.adamw.fused import Fused

    return Fused()
