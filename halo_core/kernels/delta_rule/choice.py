"""The rule that chooses between flash-linear-attention's delta rule and the core's own, before a model exists.

Not for switching during a run: a kernel is chosen once, said once, and never changed by an exception.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from halo_core.kernels.delta_rule import DeltaRuleKernel, chunked, reference

HOPPER = 9
"""The major compute capability of a GPU on which some releases of triton miscompile the gradient of gated rules."""
WRONG_ON_HOPPER = SpecifierSet(">=3.4,<3.7.1")
"""Those releases; the package itself refuses to run them. Source: fla-org/flash-linear-attention#640."""


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
    triton = importlib.metadata.version("triton")
    wrong = Version(triton) in WRONG_ON_HOPPER and torch.cuda.get_device_capability(device)[0] == HOPPER
    if wrong and importlib.util.find_spec("tilelang") is None:
        return (
            f"flash-linear-attention's gradients are wrong on this GPU with triton {triton}: triton 3.7.1, or the "
            "tilelang package, makes them right"
        )
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
