"""The rule that chooses between flash-linear-attention's delta rule and the core's own, before a model exists.

Not for switching during a run: a kernel is chosen once, said once, and never changed by an exception.
"""

from __future__ import annotations

import importlib.util

import torch

from halo_core.kernels.delta_rule import DeltaRuleKernel, chunked, reference


def fused_obstacle(*, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why flash-linear-attention cannot run, or None when it can. The package is looked for, not imported."""
    if device.type != "cuda":
        return "flash-linear-attention's kernels run on GPUs"
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return f"flash-linear-attention's kernels multiply {name} with fewer bits than it has"
    return None


def kernel(name: str) -> DeltaRuleKernel:
    """Return the kernel of that name: `fused`, `chunked` or `reference`."""
    if name == "fused":
        from halo_core.kernels.delta_rule import fused  # wants a GPU as it is imported

        return fused.delta_rule
    if name == "chunked":
        return chunked.delta_rule
    assert name == "reference", f"no delta rule is called {name!r}"
    return reference.delta_rule
