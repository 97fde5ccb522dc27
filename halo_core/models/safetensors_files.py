"""The headers of safetensors files, read and written byte for byte; a file is checked to be whole.

Not for tensors: `safetensors` reads those. A header is kept as it was found, because an export must have the same
order, dtypes and metadata as its source.

Source: https://github.com/huggingface/safetensors, "Format": 8 bytes of little-endian length N, N bytes of JSON,
then the tensors' bytes at the offsets that the JSON names.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halo_core.errors import Problem, Refused

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
LONGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
TRAINABLE_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a file: its key, the format's word for its dtype, its shape, and where its bytes lie.

    start and stop: byte offsets from the beginning of the file.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the tensor's values take."""
        return num_bytes(self.dtype, self.shape)


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """One safetensors file. head: everything before the first tensor's bytes. tensors: in the order of their bytes."""

    path: Path
    head: bytes
    tensors: tuple[StoredTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Return the whole file's size in bytes."""
        return self.tensors[-1].stop if self.tensors else len(self.head)


def read_file(path: Path) -> WeightFile:
    """Return the header of one file.

    Raises:
        Refused: when the file is not safetensors, or shorter or longer than its header says.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as stream:
            length_bytes = stream.read(8)
            (length,) = struct.unpack("<Q", length_bytes)
            if length > min(LONGEST_HEADER, size):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            text = stream.read(length)
        tensors = _tensors(json.loads(text), data_start=8 + length)
    except (ValueError, KeyError, TypeError, struct.error) as fault:
        raise Refused(_damaged(path, f"its safetensors header cannot be read ({fault})")) from None
    file = WeightFile(path=path, head=length_bytes + text, tensors=tensors)
    if file.num_bytes != size:
        raise Refused(_damaged(path, f"its header describes {file.num_bytes} bytes, the file has {size}"))
    return file


def described(path: Path, head: bytes) -> WeightFile:
    """Return the file that would have this head, whether or not one lies at `path`."""
    return WeightFile(path=path, head=head, tensors=_tensors(json.loads(head[8:]), data_start=len(head)))


def header_of(tensors: list[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Return the head of a new file that holds these (key, dtype, shape), in this order."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for key, dtype, shape in tensors:
        stop = start + num_bytes(dtype, shape)
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes, as the format's own writer has it
    return struct.pack("<Q", len(text)) + text


def metadata_of(head: bytes) -> dict[str, str]:
    """Return the free-form metadata of a file's head."""
    found: dict[str, str] = json.loads(head[8:]).get("__metadata__", {})
    return found


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor."""
    count = DTYPE_BYTES[dtype]
    for size in shape:
        count *= size
    return count


def _tensors(header: Mapping[str, Any], *, data_start: int) -> tuple[StoredTensor, ...]:
    found = [
        StoredTensor(
            key=key,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            start=data_start + entry["data_offsets"][0],
            stop=data_start + entry["data_offsets"][1],
        )
        for key, entry in header.items()
        if key != "__metadata__"
    ]
    return tuple(sorted(found, key=lambda tensor: (tensor.start, tensor.stop)))


def _damaged(path: Path, why: str) -> Problem:
    return Problem(
        key="model_name_or_path", value=str(path.parent), where=path.name, why=why, remedy="copy or download it again"
    )
