"""Named tensors as the bytes of one safetensors file, produced piece by piece.

Not for reading: see `stored.py`. The format's own writer copies every tensor before it writes; this one holds one
tensor at a time in host memory, which for a large model is the difference between saving and running out.
Source: the format at https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from halo_core.checkpoint import parts_note
from halo_core.checkpoint.pieces import Piece, whole

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES: Mapping[str, torch.dtype] = {word: dtype for dtype, word in _DTYPES.items()}
"""The format's word for a dtype -> the dtype."""
_ALIGNMENT = 8


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of all tensors together, without the file's header."""
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())


def chunks(
    tensors: Mapping[str, Tensor],
    places: Mapping[str, tuple[tuple[int, ...], Piece]] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Iterator[bytes | memoryview]:
    """Yield the file's bytes: the header, then each tensor in the order of the mapping.

    places: of tensors that are parts: the whole's shape, and which part of it. metadata: further text for the header.
    """
    described = {"format": "pt", **(metadata or {})}
    if places:
        described |= parts_note.note({name: _part(tensor, places.get(name)) for name, tensor in tensors.items()})
    header: dict[str, object] = {"__metadata__": described}
    position = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        if tensor.numel():
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _part(tensor: Tensor, place: tuple[tuple[int, ...], Piece] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape, piece = place or (tuple(tensor.shape), whole(tensor.shape))
    return piece.offset, shape
