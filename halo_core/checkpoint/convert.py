"""Writes a Hugging Face folder again with its weights in bf16, file by file and a few megabytes at a time.

Not for training dtypes (`models/build.py`), nor for other number formats. What the model's code keeps in fp32 whatever
dtype it is loaded in, such as a selection bias, stays as it is; everything else is what a reader of the fp32 folder
gets that asks for bf16.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import build_glob_alternation

from halo_core.checkpoint import atomic, export_files, find
from halo_core.checkpoint.atomic import SaveFailed
from halo_core.checkpoint.export import PARTIAL_FOLDER
from halo_core.checkpoint.export_files import CONFIG_FILE, NewFile, bytes_in
from halo_core.checkpoint.tensors import TORCH_DTYPES
from halo_core.errors import Problem, Refused
from halo_core.model_config import parts_in, parts_problem, stored_as
from halo_core.models import source
from halo_core.models.build import build_meta
from halo_core.models.layout import read_layout
from halo_core.models.safetensors_files import (
    INDEX_FILE,
    StoredTensor,
    WeightFile,
    described,
    header_of,
    metadata_of,
    read_file,
)
from halo_core.registry import DTYPE_KEYS, Architecture, Registry

BF16 = "BF16"
CAST = ("F64", "F32", "F16")
"""Number formats that become bf16."""
README = "README.md"


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was written. num_cast: tensors that are bf16 now. kept: those of the source's wider formats that stay."""

    folder: Path
    num_cast: int
    kept: tuple[str, ...]
    bytes_before: int
    bytes_after: int

    @property
    def note(self) -> str:
        """Return one sentence for a person."""
        stay = f"; {len(self.kept)} tensors that the model computes with in fp32 stay as they are" if self.kept else ""
        return (f"{self.num_cast} tensors are bf16 now, {self.bytes_after:,} bytes instead of "
                f"{self.bytes_before:,}{stay}")


def convert_to_bf16(folder: Path, out: Path, registry: Registry) -> Converted:
    """Write the model of `folder` to `out`, a new or empty folder, and return what was written.

    `out` is a model only when it is whole: config.json is moved there last.

    Raises:
        Refused: `folder` is no exported model, its weights are packed or bf16 already, a tensor is missing or foreign,
            no installed plugin knows it, or `out` is in use.
        SaveFailed: too little space, or the file system refused; nothing is left behind.
    """
    found = [*_source_problems(folder), *_out_problems(folder, out)]
    if found:
        raise Refused(found)
    source.check_folder(folder)
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    architecture = registry.match(config)
    if architecture is None:
        raise Refused(_problem("SOURCE", folder, f"no installed plugin knows its model type {config.get('model_type')}",
                               "install the family's plugin, or name its file with --plugin"))
    files = [read_file(path) for path in source.weight_files(folder)]
    kept = kept_wide(files, architecture, config)
    planned = [_planned(file, kept) for file in files]
    cast = [tensor for file in files for tensor in file.tensors if _becomes(tensor, kept) != tensor.dtype]
    if not cast:
        raise Refused(_problem("SOURCE", folder, "its weights are bf16 already", "use it as it is"))
    _write(folder, out, planned, config, kept)
    return Converted(
        folder=out, num_cast=len(cast), kept=tuple(sorted(kept)),
        bytes_before=sum(file.num_bytes for file in files), bytes_after=_size(planned),
    )  # fmt: skip


def kept_wide(files: list[WeightFile], architecture: Architecture, config: Mapping[str, Any]) -> frozenset[str]:
    """Return the stored tensors of a wider format than bf16 that a bf16 model holds in fp32 all the same.

    Told by the model that transformers builds for bf16. A tensor that its class does not hold, such as an extra
    prediction head, is told by the names of the class's own plan alone.

    Raises:
        Refused: the stored tensors are not those of the model.
    """
    model = build_meta(architecture, config, dtype=torch.bfloat16)
    layout = read_layout(model, files, architecture)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    plan = model._get_dtype_plan(torch.bfloat16)
    pattern = build_glob_alternation(list(plan))[0] if plan else None
    kept = set()
    for tensor in (tensor for file in files for tensor in file.tensors if tensor.dtype in CAST):
        group = layout.group_of.get(tensor.key)
        if group is not None:
            is_kept = any(dtypes[target] == torch.float32 for target in group.targets)
        else:
            is_kept = pattern is not None and pattern.search(tensor.key) is not None
        if is_kept:
            kept.add(tensor.key)
    return frozenset(kept)


def _becomes(tensor: StoredTensor, kept: frozenset[str]) -> str:
    return BF16 if tensor.dtype in CAST and tensor.key not in kept else tensor.dtype


def _planned(file: WeightFile, kept: frozenset[str]) -> NewFile:
    """Return the file with its keys and metadata, in the order of the source."""
    entries = [(tensor.key, _becomes(tensor, kept), tensor.shape) for tensor in file.tensors]
    return NewFile(name=file.path.name, head=header_of(entries, metadata_of(file.head)),
                   tensors=tuple((file, tensor) for tensor in file.tensors))


def _size(planned: list[NewFile]) -> int:
    """Return the bytes of the new files, as their heads describe them."""
    return sum(described(Path(file.name), file.head).num_bytes for file in planned)


def _write(folder: Path, out: Path, planned: list[NewFile], config: Mapping[str, Any], kept: frozenset[str]) -> None:
    staged = out / PARTIAL_FOLDER
    is_new = not out.exists()
    try:
        export_files.require_space(out, _size(planned))
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        for file in planned:
            export_files.write(staged / file.name, _bytes(file, kept))
        for name, origin in _companions(folder, config).items():
            export_files.write(staged / name, [export_files.content(origin)])
        export_files.write_index(staged, planned)
        export_files.compare(staged, planned)
        export_files.publish(staged, out)
    except OSError as fault:
        raise SaveFailed(what=f"{out} could not be written: {fault}",
                         remedy="free some space or name another OUT, then repeat the command") from fault
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        if is_new and out.is_dir() and not any(out.iterdir()):
            out.rmdir()


def _bytes(file: NewFile, kept: frozenset[str]) -> Iterator[export_files.Piece]:
    yield file.head
    for origin, tensor in file.tensors:
        for piece in bytes_in(origin.path, tensor.start, tensor.stop):
            if _becomes(tensor, kept) == tensor.dtype:
                yield piece
            else:
                wide = torch.frombuffer(bytearray(piece), dtype=TORCH_DTYPES[tensor.dtype])
                yield wide.to(torch.bfloat16).view(torch.uint8).numpy().data


def _companions(folder: Path, config: Mapping[str, Any]) -> dict[str, export_files.Companion]:
    found = export_files.companions(folder, None)
    found.pop(INDEX_FILE, None)
    if (folder / README).is_file():
        found[README] = folder / README  # the same model, so its card still speaks of it
    named = _with_dtype(config)
    if not any(named.get(key) for key in DTYPE_KEYS):
        named["dtype"] = "bfloat16"
    found[CONFIG_FILE] = json.dumps(named, indent=2).encode() + b"\n"
    return found


def _with_dtype(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with bfloat16 wherever it or one of its parts names the dtype of weights."""
    return {
        key: "bfloat16" if key in DTYPE_KEYS and value is not None
        else _with_dtype(value) if isinstance(value, Mapping) and key.endswith("_config") else value
        for key, value in config.items()
    }  # fmt: skip


def _source_problems(folder: Path) -> list[Problem]:
    if not folder.is_dir():
        return [_problem("SOURCE", folder, "it is not a folder" if folder.exists() else "there is no such folder",
                         "give the folder of an exported model")]
    parts = parts_in(folder)
    if parts is not None:
        return [parts_problem("SOURCE", folder, parts)]
    if (folder / atomic.MARKER).is_file() or (folder / find.STATE).is_file():
        return [_problem("SOURCE", folder, "it is a point to resume from, with the optimizer's state, and no model",
                         "let the run end, which exports the model to output_dir, and give that folder")]
    if not (folder / CONFIG_FILE).is_file() and atomic.named(folder):
        return [_problem("SOURCE", folder, "it holds checkpoints of a run that has not exported its model yet",
                         "go on with resume_from_checkpoint: true; at its end the model is here")]
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []  # told by who reads the folder next
    if not isinstance(config, dict):
        return [_problem("SOURCE", folder, f"its {CONFIG_FILE} is not a JSON object",
                         "repair the file or copy the model again")]
    method = stored_as(config)
    if method is not None:
        return [_problem("SOURCE", folder, f"its weights are stored as {method}, which is narrower than bf16",
                         "use it as it is; a run from it exports bf16")]
    return []


def _out_problems(folder: Path, out: Path) -> list[Problem]:
    if out.resolve() == folder.resolve():
        return [_problem("OUT", out, "it is SOURCE, which stays as it is", "give a new folder")]
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        return [_problem("OUT", out, "it exists and is not an empty folder", "give a new folder")]
    return []


def _problem(key: str, value: Path, why: str, remedy: str) -> Problem:
    return Problem(key=key, value=value, why=why, remedy=remedy)
