"""A copy of tensors in host memory, made once and filled again at each save.

Not for writing. Pages are locked where tensors lie on a GPU, so that the device copies by itself; torch's own
allocator of such memory would round every tensor up to a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_REGISTERED = 0
"""What CUDA's runtime returns where it has locked the pages. Elsewhere the copy is the same."""


class HostMemory:
    """Buffers by name, one per tensor, for as long as this object lives."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._locked: list[Tensor] = []

    @torch.no_grad()
    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies, whole when this returns. They are overwritten when the same names are copied again."""
        copies = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        devices = set()
        for name, tensor in tensors.items():
            copies[name].copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                devices.add(tensor.device)
        for device in devices:
            torch.cuda.synchronize(device)
        return copies

    def close(self) -> None:
        """Unlock the pages; copies must not be used any more."""
        for buffer in self._locked:
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())  # type: ignore[no-untyped-call]
        self._locked.clear()
        self._buffers.clear()

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            if tensor.is_cuda and buffer.numel():
                size = buffer.numel() * buffer.itemsize
                answer = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size, 0)  # type: ignore[no-untyped-call]
                if int(answer) == _REGISTERED:
                    self._locked.append(buffer)
                else:
                    _forget_refusal(tensor.device)
        return buffer


def _forget_refusal(device: torch.device) -> None:
    """Launch a kernel that may fail: CUDA tells its last error to whoever launches next, and then forgets it."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        return
