"""Reads tensors that several files hold in parts, each process only what overlaps its own part.

Not for deciding which parts there should be. A file without a note of parts holds whole tensors; the note is that of
torch.distributed.checkpoint's safetensors files, so what `HuggingFaceStorageWriter` wrote is read as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from halo_core.checkpoint import parts_note
from halo_core.checkpoint.pieces import Piece, local, overlap, piece_of, whole
from halo_core.checkpoint.tensors import TORCH_DTYPES
from halo_core.errors import Problem, Refused
from halo_core.models.safetensors_files import read_file


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
        self._read_headers(files)

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

    def _read_headers(self, files: Iterable[Path]) -> None:
        found: dict[str, list[tuple[Path, torch.dtype, Piece, tuple[int, ...] | None]]] = {}
        for path in files:
            file = read_file(path)
            parts = parts_note.read(file.head)
            for tensor in file.tensors:
                offset, shape = parts.get(tensor.key, ((0,) * len(tensor.shape), tensor.shape))
                entry = (path, TORCH_DTYPES[tensor.dtype], Piece(offset=offset, shape=tensor.shape), shape)
                found.setdefault(tensor.key, []).append(entry)
        problems = []
        for name, entries in found.items():
            wholes = {(dtype, shape or _reach(piece for _, _, piece, _ in entries))
                      for _, dtype, piece, shape in entries}
            if len(wholes) > 1:
                problems.append(_disagreement(name, entries))
                continue
            (dtype, shape), = wholes
            stored = self.tensors[name] = Stored(dtype=dtype, shape=shape)
            for path, _, piece, _ in entries:
                stored.pieces.setdefault(piece, path)
        if problems:
            raise Refused(problems)

    def _handle(self, path: Path) -> Any:
        if path not in self._handles:
            self._handles[path] = self._open.enter_context(safe_open(path, framework="pt"))
        return self._handles[path]


def _reach(pieces: Iterable[Piece]) -> tuple[int, ...]:
    """Return the smallest shape that holds every box: what files of torch's own checkpoints tell of the whole."""
    ends = [[start + size for start, size in zip(piece.offset, piece.shape, strict=True)] for piece in pieces]
    return tuple(max(sizes) for sizes in zip(*ends, strict=True))


def _disagreement(name: str, entries: list[tuple[Path, torch.dtype, Piece, tuple[int, ...] | None]]) -> Problem:
    said = "; ".join(f"{path.name}: {dtype} {list(shape or piece.shape)}" for path, dtype, piece, shape in entries[:4])
    return Problem(where=str(entries[0][0].parent), why=f"its files disagree about {name} ({said})",
                   remedy="give the files of one save")
