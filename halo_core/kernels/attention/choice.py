"""The rule that says where flash attention runs, before a model exists, and for which of its layers.

Not for switching during a run: a kernel is chosen once, said once, and never changed by an exception.
"""

from __future__ import annotations

import torch

from halo_core.kernels.attention import AttentionKernel, flash, reference, wide

WIDEST = 256
"""The widest head that flash kernels take, in elements."""

ROW_ELEMENTS = 8
"""Heads are whole multiples of this many elements. Source: torch's checks of the operands."""

MINIMUM_CAPABILITY = (8, 0)
"""The oldest CUDA compute capability with these kernels."""


ELSEWHERE = "leave attn_implementation out; kernels: {attention: reference} computes the same, slowly, for a trial"


def flash_obstacle(*, dtype: torch.dtype, device: torch.device) -> tuple[str, str] | None:
    """Return (why flash attention cannot run, what to set instead), or None when it can."""
    if device.type != "cuda":
        return "flash attention kernels run on CUDA devices, and there is none here", ELSEWHERE
    if torch.cuda.get_device_capability(device) < MINIMUM_CAPABILITY:
        return "flash attention kernels want compute capability 8.0 or newer", ELSEWHERE
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention kernels do not compute in {str(dtype).removeprefix('torch.')}", "dtype: bfloat16"
    return None


def head_obstacle(size: int) -> str | None:
    """Return why flash kernels do not take heads of `size` elements, or None when they do."""
    if size > WIDEST:
        return f"heads of {size} are wider than the {WIDEST} that flash kernels take"
    if size % ROW_ELEMENTS:
        return f"heads of {size} are no whole multiple of {ROW_ELEMENTS}"
    return None


def kernel(name: str, head_size: int) -> AttentionKernel:
    """Return the kernel of that name for heads of that size: `flash`, or `reference`."""
    if name == "reference":
        return reference.attend
    assert name == "flash", f"no attention kernel is called {name!r}"
    return flash.attend if head_obstacle(head_size) is None else wide.attend
