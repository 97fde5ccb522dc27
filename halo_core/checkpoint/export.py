"""Writes the trained model as its source folder with the trained tensors replaced.

Not for resuming a run (`save.py`): an export holds a model that any Hugging Face tool reads, and nothing of the run.
File names, keys, order, dtypes and config.json are the source's; what the model never held (a vision tower, an extra
prediction head) is copied from the source's files byte for byte.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from halo_core.checkpoint.atomic import SaveFailed
from halo_core.errors import Problem, Refused
from halo_core.models.layout import Group, Layout, read_layout, to_source
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
from halo_core.registry import Architecture, text_config

PARTIAL_FOLDER = ".export.partial"
"""Where an export is written before it is moved into place, inside the output folder so that moving is renaming."""

MARGIN = 1 << 20
"""Bytes of free space asked for beyond the files themselves, for headers, folders and journals."""

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip

NOT_COPIED = ("README.md", "metrics.jsonl")
"""The source's model card speaks of another model; a source that is itself a run's folder has that run's metrics."""

WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".index.json",
)  # fmt: skip
COPIED_FOLDERS = ("additional_chat_templates",)
CONFIG_FILE = "config.json"

Piece = bytes | memoryview
Source = tuple[WeightFile, StoredTensor]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written. num_bytes: of weights. note: one sentence for the log."""

    folder: Path
    weight_files: tuple[str, ...]
    num_bytes: int
    note: str


@dataclass(frozen=True, kw_only=True)
class _NewFile:
    """A weight file to be written: its whole head, and where each of its tensors comes from, in order."""

    name: str
    head: bytes
    tensors: tuple[Source, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.head) + sum(tensor.stop - tensor.start for _, tensor in self.tensors)


def export(
    model: PreTrainedModel,
    architecture: Architecture,
    source_folder: Path,
    output_dir: Path,
    *,
    tokenizer_folder: Path | None = None,
    text_only: bool = False,
) -> Exported:
    """Write `model` into `output_dir` and return what was written.

    source_folder: the folder the weights were loaded from. output_dir: may hold other files; they are left alone.
    tokenizer_folder: whose tokenizer files and chat template replace the source's.
    text_only: write the language model's own class in place of the multimodal one that wraps it in the source.

    One file after another is written, so that besides the model only a few tensors are in memory. The folder counts
    as a model only when config.json is in it, which is moved there last.

    Raises:
        Refused: when output_dir is the source folder.
        SaveFailed: when there is too little space, or the file system refuses; nothing is left behind.
    """
    if source_folder.resolve() == output_dir.resolve():
        raise Refused(
            Problem(
                key="output_dir", value=str(output_dir), why="it is the model's source folder, which an export reads",
                remedy="name another folder",
            )
        )
    files = [read_file(path) for path in weight_files(source_folder)]
    layout = read_layout(model, files, architecture)
    config = json.loads((source_folder / CONFIG_FILE).read_text(encoding="utf-8"))
    is_wrapped = text_config(architecture.spec, config) is not config
    if text_only and is_wrapped:
        planned = _text_files(files, layout)
        note = (
            f"exported {type(model).__name__} alone, as export_text_only asks: {len(layout.untrained)} tensors of the "
            "source and its multimodal configuration are left out"
        )
    else:
        planned = [_NewFile(name=f.path.name, head=f.head, tensors=tuple((f, t) for t in f.tensors)) for f in files]
        classes = ", ".join(config.get("architectures") or [type(model).__name__])
        note = f"exported as {classes}, in the source's own layout"
        if layout.untrained:
            note += f"; {len(layout.untrained)} tensors the run did not train are the source's, byte for byte"
    needed = sum(file.num_bytes for file in planned)
    staged = output_dir / PARTIAL_FOLDER
    try:
        _require_space(output_dir, needed)
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        trained = _Trained(model, layout)
        for file in planned:
            _write_weights(staged / file.name, file, trained)
        _write_companions(source_folder, staged, tokenizer_folder)
        if text_only and is_wrapped:
            _write_text_config(staged, model, architecture, config)
            _write_index(staged, planned)
        _compare(staged, planned)
        _publish(staged, output_dir)
    except OSError as fault:
        raise SaveFailed(
            what=f"the model could not be exported to {output_dir}: {fault}",
            remedy="check that the folder can be written to, then resume the run",
        ) from fault
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return Exported(folder=output_dir, weight_files=tuple(f.name for f in planned), num_bytes=needed, note=note)


class _Trained:
    """The model's tensors in the source's layout and dtype, converted group by group as they are asked for."""

    MOST_GROUPS = 4
    """Converted groups held at once; a file lists one group's tensors close together."""

    def __init__(self, model: PreTrainedModel, layout: Layout) -> None:
        self.model, self.layout = model, layout
        self.state = model.state_dict()
        self.held: dict[tuple[str, ...], dict[str, Tensor]] = {}

    def bytes_of(self, stored: StoredTensor) -> Piece | None:
        """Return the bytes that take the place of a source tensor, or None when it was not trained."""
        group = self.layout.group_of.get(stored.key)
        if group is None:
            assert stored.key in self.layout.untrained
            return None
        tensor = self._converted(group)[stored.key]
        if tuple(tensor.shape) != stored.shape:
            raise RuntimeError(f"{stored.key} would be written as {list(tensor.shape)}, the source has {stored.shape}")
        data = tensor.to(DTYPES[stored.dtype]).contiguous().reshape(-1).view(torch.uint8)
        return data.numpy().data if data.numel() else b""

    def _converted(self, group: Group) -> dict[str, Tensor]:
        if group.targets not in self.held:
            if len(self.held) >= self.MOST_GROUPS:
                del self.held[next(iter(self.held))]
            tensors = {name: self.state[name].detach().cpu() for name in group.targets}
            self.held[group.targets] = to_source(group, tensors, self.model)
        return self.held[group.targets]


def _write_weights(path: Path, file: _NewFile, trained: _Trained) -> None:
    _write(path, _pieces(file, trained))


def _pieces(file: _NewFile, trained: _Trained) -> Iterator[Piece]:
    yield file.head
    for origin, tensor in file.tensors:
        replaced = trained.bytes_of(tensor)
        if replaced is not None:
            yield replaced
        else:
            yield from _bytes_in(origin.path, tensor.start, tensor.stop)


def _bytes_in(path: Path, start: int, stop: int, chunk: int = 1 << 24) -> Iterator[bytes]:
    with path.open("rb") as stream:
        stream.seek(start)
        while start < stop:
            piece = stream.read(min(chunk, stop - start))
            if not piece:
                raise OSError(f"{path} ended early")
            start += len(piece)
            yield piece


def _text_files(files: list[WeightFile], layout: Layout) -> list[_NewFile]:
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
        new.append(_NewFile(name=SINGLE_FILE if len(kept) == 1 else name, head=head, tensors=tensors))
    return new


def _write_text_config(
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
    _write(staged / CONFIG_FILE, [json.dumps(inner, indent=2).encode() + b"\n"])


def _write_index(staged: Path, planned: list[_NewFile]) -> None:
    (staged / INDEX_FILE).unlink(missing_ok=True)
    if len(planned) == 1:
        return
    written = {file.name: read_file(staged / file.name) for file in planned}
    index = {
        "metadata": {"total_size": sum(t.stop - t.start for file in written.values() for t in file.tensors)},
        "weight_map": {t.key: name for name, file in written.items() for t in file.tensors},
    }
    _write(staged / INDEX_FILE, [json.dumps(index, indent=2).encode() + b"\n"])


def _write_companions(source: Path, staged: Path, tokenizer_folder: Path | None) -> None:
    """Copy config.json, tokenizer, chat template and the like; the tokenizer folder's take the source's place."""
    _copy(source, staged, lambda name: True)
    if tokenizer_folder is not None:
        _copy(tokenizer_folder, staged, lambda name: name not in (CONFIG_FILE, "generation_config.json", INDEX_FILE))


def _copy(folder: Path, target: Path, wanted: Callable[[str], bool]) -> None:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name in COPIED_FOLDERS:
            shutil.copytree(path, target / path.name, dirs_exist_ok=True)
        elif path.is_file() and _is_companion(path.name) and wanted(path.name):
            _write(target / path.name, [path.read_bytes()])


def _is_companion(name: str) -> bool:
    if name == INDEX_FILE:
        return True
    return not (name.startswith(".") or name in NOT_COPIED or name.endswith(WEIGHT_SUFFIXES))


def _compare(staged: Path, planned: list[_NewFile]) -> None:
    """Check that every file on disk has the keys, order, dtypes and shapes it was meant to have."""
    for file in planned:
        meant = [(t.key, t.dtype, t.shape) for t in read_file(staged / file.name).tensors]
        head = json.loads(file.head[8:])
        head.pop("__metadata__", None)
        order = sorted(head, key=lambda key: tuple(head[key]["data_offsets"]))
        wanted = [(key, head[key]["dtype"], tuple(head[key]["shape"])) for key in order]
        if meant != wanted or [t.shape for _, t in file.tensors] != [shape for *_, shape in wanted]:
            raise RuntimeError(f"{file.name} was written with other tensors than planned")


def _publish(staged: Path, output_dir: Path) -> None:
    """Move everything into place, config.json last: without it no reader takes the folder for a model."""
    (output_dir / CONFIG_FILE).unlink(missing_ok=True)
    for name in _weights_of_an_earlier_export(output_dir) - {path.name for path in staged.iterdir()}:
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


def _weights_of_an_earlier_export(output_dir: Path) -> set[str]:
    if (output_dir / INDEX_FILE).is_file():
        return {path.name for path in weight_files(output_dir)} | {INDEX_FILE}
    return {SINGLE_FILE}


def _require_space(output_dir: Path, needed: int) -> None:
    output_dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(output_dir).free
    if free < needed + MARGIN:
        raise SaveFailed(
            what=f"the exported model needs {needed + MARGIN} bytes and {output_dir} has {free} bytes free",
            remedy="free some space, then resume the run from its last checkpoint",
        )


def _write(path: Path, pieces: Any) -> None:
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
