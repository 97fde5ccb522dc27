"""Reads tensors that several files hold in parts, each process only what overlaps its own part.

Not for deciding which parts there should be. A file without a note of parts holds whole tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from halo_core.checkpoint.pieces import Piece, local, overlap, piece_of, whole
from halo_core.checkpoint.tensors import PIECES, TORCH_DTYPES
from halo_core.models.safetensors_files import metadata_of, read_file


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One tensor of several files: its whole shape and dtype, and which file holds which box of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: dict[Piece, Path] = field(default_factory=dict)

    def holds(self, wanted: Piece) -> bool:
        """Return whether every element of `wanted` is there."""
        found = (overlap(piece, wanted) for piece in self.pieces)
        return sum(piece.numel for piece in found if piece is not None) == wanted.numel


class StoredTensors:
    """The tensors of some safetensors files by name, open for reading inside a `with` block.

    Raises:
        Refused: a file is damaged, or two files disagree about a tensor.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.tensors: dict[str, Stored] = {}
        self._open = ExitStack()
        self._handles: dict[Path, Any] = {}
        for path in files:
            self._read_header(path)

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        self._handles.clear()

    def fill(self, name: str, target: Tensor) -> None:
        """Copy what is stored into this process's own part of `target`, which is of the stored shape."""
        self._fill(name, local(target), piece_of(target))

    def whole(self, name: str) -> Tensor:
        """Return the whole tensor on the host."""
        stored = self.tensors[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self._fill(name, tensor, whole(stored.shape))
        return tensor

    @torch.no_grad()
    def _fill(self, name: str, own: Tensor, wanted: Piece) -> None:
        stored = self.tensors[name]
        assert stored.holds(wanted), f"{name} is not there in full; callers look first"
        for piece, path in stored.pieces.items():
            common = overlap(piece, wanted)
            if common is None:
                continue
            handle = self._handle(path)
            if common == piece:
                found = handle.get_tensor(name)
            else:
                found = handle.get_slice(name)[common.within(piece)]
            own[common.within(wanted)].copy_(found)

    def _read_header(self, path: Path) -> None:
        file = read_file(path)
        places = json.loads(metadata_of(file.head).get(PIECES, "{}"))
        for tensor in file.tensors:
            place = places.get(tensor.key)
            piece = whole(tensor.shape) if place is None else Piece(offset=tuple(place["offset"]), shape=tensor.shape)
            shape = tensor.shape if place is None else tuple(place["shape"])
            stored = Stored(dtype=TORCH_DTYPES[tensor.dtype], shape=shape)
            known = self.tensors.setdefault(tensor.key, stored)
            if (known.dtype, known.shape) != (stored.dtype, stored.shape):
                raise RuntimeError(f"{path} holds {tensor.key} as {stored.dtype} {list(stored.shape)}, another file as "
                                   f"{known.dtype} {list(known.shape)}")
            known.pieces.setdefault(piece, path)

    def _handle(self, path: Path) -> Any:
        if path not in self._handles:
            self._handles[path] = self._open.enter_context(safe_open(path, framework="pt"))
        return self._handles[path]
