"""The files of an exported model folder: which there will be, and how each is written and checked.

Not for where the trained tensors come from (`full_tensors.py`), nor for the order of events (`export.py`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from halo_core.checkpoint.atomic import SaveFailed
from halo_core.checkpoint.full_tensors import FullTensors
from halo_core.checkpoint.tensors import TORCH_DTYPES
from halo_core.model_config import QUANTISATION
from halo_core.models.dequantise import DequantisedSlice
from halo_core.models.layout import Layout, to_source
from halo_core.models.packed import PackedTensor
from halo_core.models.safetensors_files import (
    INDEX_FILE,
    SINGLE_FILE,
    StoredTensor,
    WeightFile,
    header_of,
    metadata_of,
    read_file,
)
from halo_core.models.source import weight_files
from halo_core.registry import DTYPE_KEYS, Architecture, text_config

MARGIN = 1 << 20
"""Bytes of free space asked for beyond the files themselves, for headers, folders and journals."""

NOT_COPIED = ("README.md", "metrics.jsonl")
"""The source's model card speaks of another model; a source that is itself a run's folder has that run's metrics."""

WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".index.json",
)  # fmt: skip
COPIED_FOLDERS = ("additional_chat_templates",)
CONFIG_FILE = "config.json"

Piece = bytes | memoryview
Companion = Path | bytes
"""Where a file is copied from, or what stands in it."""
Source = tuple[WeightFile, StoredTensor]


@dataclass(frozen=True, kw_only=True)
class NewFile:
    """A weight file to be written: its whole head, and where each of its tensors comes from, in order."""

    name: str
    head: bytes
    tensors: tuple[Source, ...]

    @property
    def num_bytes(self) -> int:
        """Return the whole file's size in bytes."""
        return len(self.head) + sum(tensor.num_bytes for _, tensor in self.tensors)


def same_files(files: Iterable[WeightFile]) -> list[NewFile]:
    """Return the source's own files."""
    return [NewFile(name=f.path.name, head=f.head, tensors=tuple((f, t) for t in f.tensors)) for f in files]


def text_files(files: Iterable[WeightFile], layout: Layout) -> list[NewFile]:
    """Return the files of the text class: the source's, without the untrained tensors, under the class's own keys."""
    kept = {}
    for file in files:
        tensors = tuple((file, tensor) for tensor in file.tensors if tensor.key not in layout.untrained)
        if tensors:
            kept[file.path.name] = (file, tensors)
    new = []
    for name, (file, tensors) in kept.items():
        entries = [(layout.group_of[t.key].members[t.key], t.dtype, t.shape) for _, t in tensors]
        head = header_of(entries, metadata_of(file.head))
        new.append(NewFile(name=SINGLE_FILE if len(kept) == 1 else name, head=head, tensors=tensors))
    return new


class SourceTensors:
    """The model's tensors in the source's layout and dtype, converted group by group as the files ask for them.

    Where several processes run, each makes one and asks for the same tensors in the same order.
    """

    MOST_GROUPS = 4
    """Groups held at once; a file lists one group's tensors close together."""

    def __init__(self, model: PreTrainedModel, layout: Layout, full: FullTensors) -> None:
        self.model, self.layout, self.full = model, layout, full
        self.left = {group.targets: len(group.members) for group in layout.groups}
        self.held: dict[tuple[str, ...], dict[str, Tensor]] = {}
        self.converted: dict[tuple[str, ...], dict[str, Tensor]] = {}

    def bring(self, stored: StoredTensor) -> None:
        """Fetch the whole tensors of the group that makes `stored`, unless it is here; may be a collective."""
        group = self.layout.group_of.get(stored.key)
        if group is None or group.targets in self.held:
            return
        if len(self.held) >= self.MOST_GROUPS:
            self._let_go(next(iter(self.held)))
        found = {name: self.full.get(name) for name in group.targets}
        self.held[group.targets] = {name: tensor for name, tensor in found.items() if tensor is not None}

    def bytes_of(self, stored: StoredTensor) -> Piece | None:
        """Return the bytes that take the place of a source tensor just brought, or None when it was not trained."""
        group = self.layout.group_of.get(stored.key)
        if group is None:
            assert stored.key in self.layout.untrained
            return None
        if group.targets not in self.converted:
            self.converted[group.targets] = to_source(group, self.held[group.targets], self.model)
            self.held[group.targets] = {}
        tensor = self.converted[group.targets][stored.key]
        if tuple(tensor.shape) != stored.shape:
            raise RuntimeError(f"{stored.key} would be written as {list(tensor.shape)}, the source has {stored.shape}")
        data = tensor.to(TORCH_DTYPES[stored.dtype]).contiguous().reshape(-1).view(torch.uint8)
        return data.numpy().data if data.numel() else b""

    def done(self, stored: StoredTensor) -> None:
        """Let go of the group of a tensor that was the last of it to be written."""
        group = self.layout.group_of.get(stored.key)
        if group is None:
            return
        self.left[group.targets] -= 1
        if not self.left[group.targets]:
            self._let_go(group.targets)

    def _let_go(self, targets: tuple[str, ...]) -> None:
        self.held.pop(targets, None)
        self.converted.pop(targets, None)


def write_weights(path: Path | None, file: NewFile, tensors: SourceTensors) -> Exception | None:
    """Write one weight file and return what went wrong; without a path, only take part in fetching its tensors.

    A fault is not raised: every tensor is fetched to the end, because other processes are sending them.
    """
    fault: Exception | None = None
    writing = None if path is None else _Writing(path)
    if writing is not None:
        fault = writing.attempt([file.head])
    for origin, tensor in file.tensors:
        tensors.bring(tensor)
        if writing is not None and fault is None:
            fault = writing.attempt(_bytes_of(origin, tensor, tensors))
        tensors.done(tensor)
    closing = None if writing is None else writing.close()
    return fault or closing


class _Writing:
    """An open file whose faults are handed back, so that its writer can go on with what others wait for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stream: IO[bytes] | None = None

    def attempt(self, pieces: Iterable[Piece]) -> Exception | None:
        """Write pieces, and return what went wrong."""
        try:
            if self.stream is None:
                self.stream = self.path.open("wb")
            self.stream.writelines(pieces)
        except Exception as fault:
            return fault
        return None

    def close(self) -> Exception | None:
        """Make the file durable, and return what went wrong."""
        if self.stream is None:
            return None
        try:
            with self.stream:
                self.stream.flush()
                os.fsync(self.stream.fileno())
        except OSError as fault:
            return fault
        return None


def _bytes_of(origin: WeightFile, tensor: StoredTensor, tensors: SourceTensors) -> Iterator[Piece]:
    replaced = tensors.bytes_of(tensor)
    if replaced is not None:
        yield replaced
    else:
        yield from source_bytes(origin, tensor)


def source_bytes(origin: WeightFile, tensor: StoredTensor) -> Iterator[Piece]:
    """Yield the bytes of a tensor of the source that was not trained; a packed one becomes bf16."""
    if not isinstance(tensor, PackedTensor):
        yield from bytes_in(origin.path, tensor.start, tensor.stop)
        return
    with ExitStack() as stack:
        slices = [stack.enter_context(safe_open(path, framework="pt")).get_slice(stored.key)
                  for path, stored in (tensor.blocks, tensor.scales)]
        whole = DequantisedSlice(*slices)
        for expert in range(tensor.shape[0]):
            yield whole[expert : expert + 1].view(-1).view(torch.uint8).numpy().data


def bytes_in(path: Path, start: int, stop: int, chunk: int = 1 << 24) -> Iterator[bytes]:
    """Yield a file's bytes from `start` to `stop`, at most `chunk` at a time."""
    with path.open("rb") as stream:
        stream.seek(start)
        while start < stop:
            piece = stream.read(min(chunk, stop - start))
            if not piece:
                raise OSError(f"{path} ended early")
            start += len(piece)
            yield piece


def write_text_config(
    staged: Path, model: PreTrainedModel, architecture: Architecture, config: Mapping[str, Any]
) -> None:
    """Write the text part of the source's config.json as a configuration of its own."""
    inner = dict(text_config(architecture.spec, config))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "transformers_version"):
        if name in config:
            inner.setdefault(name, config[name])
    inner["architectures"] = [type(model).__name__]
    inner["model_type"] = model.config.model_type
    inner["tie_word_embeddings"] = bool(model.all_tied_weights_keys)
    write(staged / CONFIG_FILE, [json.dumps(inner, indent=2).encode() + b"\n"])


def write_index(staged: Path, planned: list[NewFile]) -> None:
    """Write the index of several weight files; one file has none."""
    (staged / INDEX_FILE).unlink(missing_ok=True)
    if len(planned) == 1:
        return
    write(staged / INDEX_FILE, [_index(read_file(staged / file.name) for file in planned)])


def _index(files: Iterable[WeightFile]) -> bytes:
    """Return the text of an index of these files."""
    written = list(files)
    index = {
        "metadata": {"total_size": sum(tensor.num_bytes for file in written for tensor in file.tensors)},
        "weight_map": {tensor.key: file.path.name for file in written for tensor in file.tensors},
    }
    return json.dumps(index, indent=2).encode() + b"\n"


def plain_companions(
    found: Mapping[str, Companion], config: Mapping[str, Any], files: Iterable[WeightFile]
) -> tuple[dict[str, Companion], dict[str, Any]]:
    """Return the companions and config.json of a packed source when its weights are plain numbers.

    found: as the source has them. config: its config.json. files: its files as they are read. The index, where there
    is one, is that of the new keys.
    """
    plain = {name: value for name, value in config.items() if name != QUANTISATION}
    if not any(plain.get(name) for name in DTYPE_KEYS):
        plain["dtype"] = "bfloat16"  # the stored form said in what numbers the model computes; now nothing else does
    changed: dict[str, Companion] = {CONFIG_FILE: json.dumps(plain, indent=2).encode() + b"\n"}
    if INDEX_FILE in found:
        changed[INDEX_FILE] = _index(files)
    return {**found, **changed}, plain


def content(origin: Companion) -> bytes:
    """Return the bytes of a companion."""
    return origin if isinstance(origin, bytes) else origin.read_bytes()


def companions(source: Path, tokenizer_folder: Path | None) -> dict[str, Companion]:
    """Return name -> origin of config.json, tokenizer, chat template and the like.

    tokenizer_folder: whose files take the place of the source's, its configuration apart.
    """
    found: dict[str, Companion] = {**_companions(source)}
    if tokenizer_folder is not None:
        kept = (CONFIG_FILE, "generation_config.json", INDEX_FILE)
        found |= {name: path for name, path in _companions(tokenizer_folder).items() if name not in kept}
    return found


def _companions(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name in COPIED_FOLDERS:
            found |= {str(inner.relative_to(folder)): inner for inner in sorted(path.rglob("*")) if inner.is_file()}
        elif path.is_file() and _is_companion(path.name):
            found[path.name] = path
    return found


def _is_companion(name: str) -> bool:
    if name == INDEX_FILE:
        return True
    return not (name.startswith(".") or name in NOT_COPIED or name.endswith(WEIGHT_SUFFIXES))


def compare(staged: Path, planned: list[NewFile]) -> None:
    """Check that every file on disk has the keys, order, dtypes and shapes it was meant to have."""
    for file in planned:
        meant = [(t.key, t.dtype, t.shape) for t in read_file(staged / file.name).tensors]
        head = json.loads(file.head[8:])
        head.pop("__metadata__", None)
        order = sorted(head, key=lambda key: tuple(head[key]["data_offsets"]))
        wanted = [(key, head[key]["dtype"], tuple(head[key]["shape"])) for key in order]
        if meant != wanted or [t.shape for _, t in file.tensors] != [shape for *_, shape in wanted]:
            raise RuntimeError(f"{file.name} was written with other tensors than planned")


def publish(staged: Path, output_dir: Path) -> None:
    """Move everything into place, config.json last: without it no reader takes the folder for a model."""
    (output_dir / CONFIG_FILE).unlink(missing_ok=True)
    for name in weights_of_an_earlier_export(output_dir) - {path.name for path in staged.iterdir()}:
        (output_dir / name).unlink(missing_ok=True)
    for path in sorted(staged.iterdir(), key=lambda path: path.name == CONFIG_FILE):
        if path.is_dir():
            shutil.rmtree(output_dir / path.name, ignore_errors=True)
        path.replace(output_dir / path.name)
    folder = os.open(output_dir, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_earlier_export(output_dir: Path) -> None:
    """Remove the model that an earlier export left in `output_dir`; config.json first, without which it is none."""
    if (output_dir / CONFIG_FILE).is_file():
        names = weights_of_an_earlier_export(output_dir)
        (output_dir / CONFIG_FILE).unlink()
        for name in names:
            (output_dir / name).unlink(missing_ok=True)


def weights_of_an_earlier_export(output_dir: Path) -> set[str]:
    """Return the names of the weight files, and of their index, that an export to this folder may have left."""
    if (output_dir / INDEX_FILE).is_file():
        return {path.name for path in weight_files(output_dir)} | {INDEX_FILE}
    return {SINGLE_FILE}


def require_space(output_dir: Path, needed: int) -> None:
    """Make the folder and check its free space for `needed` bytes.

    Raises:
        SaveFailed: there is less.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(output_dir).free
    if free < needed + MARGIN:
        raise SaveFailed(
            what=f"the exported model needs {needed + MARGIN} bytes and {output_dir} has {free} bytes free",
            remedy="free some space, then resume the run from its last checkpoint",
        )


def write(path: Path, pieces: Iterable[Piece]) -> None:
    """Write a file and make it durable."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())
