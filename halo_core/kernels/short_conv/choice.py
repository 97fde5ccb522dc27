"""The rule that chooses between the fused short convolution and its reference, before a model exists.

Not for switching during a run: a kernel is chosen once, said once, and never changed by an exception.
"""

from __future__ import annotations

import importlib.util

import torch

from halo_core.kernels.short_conv import ShortConvKernel, reference


def fused_obstacle(*, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the fused kernel cannot run, or None when it can."""
    if device.type != "cuda":
        return "its kernels are compiled for CUDA devices"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it does not compute in {str(dtype).removeprefix('torch.')}"
    return None


def kernel(name: str) -> ShortConvKernel:
    """Return the kernel of that name: `fused`, or `reference`."""
    if name == "reference":
        return reference.short_conv
    assert name == "fused", f"no short convolution is called {name!r}"
    from halo_core.kernels.short_conv import fused  # Triton is there only where it can run

    return fused.short_conv
