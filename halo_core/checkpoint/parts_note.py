"""The note in a safetensors file's head that says which parts of larger tensors the file holds. No torch here.

Not for the tensors: see `tensors.py` and `stored.py`. The form is that of torch.distributed.checkpoint's own files
(`_hf_utils.py`, alike in torch 2.11 and 2.13), so that its `HuggingFaceStorageReader` reads these files; such a file
names every tensor that it holds, also those that are whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from halo_core.models.safetensors_files import metadata_of

PARTS = "DCP_SHARDING_INFO"
"""The metadata key: tensor's name -> where the part begins in the whole tensor (`OFFSETS`)."""
OFFSETS = "saved_offsets"
SHAPE = "shape"
"""Beside `OFFSETS`, of ours: the whole's shape. Without it a missing last part would look like a smaller whole."""
_VERSION = {"DCP_VERSION": "1.0"}


def note(parts: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> dict[str, str]:
    """Return the metadata for these parts: name -> (offset, the whole's shape)."""
    texts = {name: {OFFSETS: list(offset), SHAPE: list(shape)} for name, (offset, shape) in parts.items()}
    return {PARTS: json.dumps(texts), **_VERSION}


def read(head: bytes) -> dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]]:
    """Return name -> (offset, the whole's shape where it is told) of a file's head; empty where all are whole."""
    found: dict[str, Any] = json.loads(metadata_of(head).get(PARTS, "{}"))
    return {name: (tuple(entry[OFFSETS]), tuple(entry[SHAPE]) if SHAPE in entry else None)
            for name, entry in found.items()}
