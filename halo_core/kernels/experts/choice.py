"""The rule that chooses between the grouped experts kernel and its reference, before a model exists.

Not for switching during a run: a kernel is chosen once, said once, and never changed by an exception.
"""

from __future__ import annotations

from functools import partial

import torch

from halo_core.kernels.experts.grouped import grouped
from halo_core.kernels.experts.reference import reference
from halo_core.kernels.experts.weights import ExpertsKernel

ROW_BYTES = 16
"""grouped_mm wants every row to start at a multiple of this many bytes. Source: torch's checks of its operands."""

MINIMUM_CAPABILITY = (8, 0)
"""The oldest CUDA compute capability that torch's grouped_mm supports."""


def grouped_obstacle(
    *, dtype: torch.dtype, device: torch.device, hidden_size: int, width: int
) -> str | None:
    """Return why the grouped kernel cannot run, or None when it can.

    hidden_size and width: H and M in elements; both are row lengths of an operand.
    """
    if not hasattr(torch.nn.functional, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"grouped_mm does not multiply {str(dtype).removeprefix('torch.')}"
    for name, size in (("hidden size", hidden_size), ("expert width", width)):
        if size * dtype.itemsize % ROW_BYTES:
            return f"grouped_mm wants rows of whole {ROW_BYTES} bytes, and {name} {size} times {dtype.itemsize} is not"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MINIMUM_CAPABILITY:
        return "grouped_mm wants compute capability 8.0 or newer"
    return None


def kernel(name: str, *, may_skip: bool) -> ExpertsKernel:
    """Return the kernel of that name. may_skip: whether ids can hold slots to skip (they cannot without dispatch)."""
    if name == "grouped":
        return partial(grouped, may_skip=may_skip)
    assert name == "reference", f"no experts kernel is called {name!r}"
    return reference
