"""Writes the trained model as its source folder with the trained tensors replaced.

Not for resuming a run (`save.py`): an export holds a model that any Hugging Face tool reads, and nothing of the run.
File names, keys, order, dtypes and config.json are the source's; what the model never held (a vision tower, an extra
prediction head) is copied from the source's files byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from halo_core import process_group
from halo_core.checkpoint import agreement, export_files
from halo_core.checkpoint.atomic import SaveFailed
from halo_core.checkpoint.export_files import CONFIG_FILE, Companion, NewFile, SourceTensors
from halo_core.checkpoint.full_tensors import WRITER, FullTensors, Gathered
from halo_core.checkpoint.special_tokens import with_special_tokens
from halo_core.errors import Problem, Refused
from halo_core.model_config import stored_as
from halo_core.models.layout import Layout, read_layout
from halo_core.models.packed import source_files
from halo_core.models.safetensors_files import WeightFile
from halo_core.registry import Architecture, text_config

PARTIAL_FOLDER = ".export.partial"
"""Where an export is written before it is moved into place, inside the output folder so that moving is renaming."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written. num_bytes: of weights. note: one sentence for the log."""

    folder: Path
    weight_files: tuple[str, ...]
    num_bytes: int
    note: str


@dataclass(frozen=True, kw_only=True)
class Draft:
    """An export before anything is written. files: the weight files to be. text_only: the text class is written.

    companions: name -> origin of every other file, or its bytes. config: config.json, saying nothing of packed weights.
    """

    layout: Layout
    files: tuple[NewFile, ...]
    companions: Mapping[str, Companion]
    config: Mapping[str, Any]
    text_only: bool
    note: str

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the weight files."""
        return sum(file.num_bytes for file in self.files)


def export(
    model: PreTrainedModel,
    architecture: Architecture,
    source_folder: Path,
    output_dir: Path,
    *,
    tokenizer_folder: Path | None = None,
    special_ids: Mapping[str, int] | None = None,
    text_only: bool = False,
) -> Exported:
    """Write `model` into `output_dir` and return what was written. A collective: rank 0 writes, the others send.

    source_folder: the folder the weights were loaded from. output_dir: may hold other files; they are left alone.
    tokenizer_folder: whose tokenizer files and chat template replace the source's.
    special_ids: `eos_token_id` and `pad_token_id` that take the place of the source's in its configurations.
    text_only: write the language model's own class in place of the multimodal one that wraps it in the source.

    One file after another is written, so that besides the model only a few tensors are in memory. The folder counts
    as a model only when config.json is in it, which is moved there last.

    Raises:
        Refused: when output_dir is the source folder.
        SaveFailed: on every process, when rank 0 has too little space or its file system refuses; nothing is left
            behind.
    """
    with process_group.together():
        draft = read_draft(model, architecture, source_folder, output_dir, tokenizer_folder, special_ids, text_only)
    check_same_source(draft)
    return write_draft(draft, model, architecture, Gathered(sharded_state(model)), output_dir)


def read_draft(
    model: PreTrainedModel,
    architecture: Architecture,
    source_folder: Path,
    output_dir: Path,
    tokenizer_folder: Path | None,
    special_ids: Mapping[str, int] | None,
    text_only: bool,
) -> Draft:
    """Return what an export would write.

    Raises:
        Refused: output_dir is the source folder, or the source's tensors are not those of the model.
    """
    if source_folder.resolve() == output_dir.resolve():
        raise Refused(
            Problem(
                key="output_dir", value=str(output_dir), why="it is the model's source folder, which an export reads",
                remedy="name another folder",
            )
        )
    files = source_files(source_folder)
    config = json.loads((source_folder / CONFIG_FILE).read_text(encoding="utf-8"))
    found = export_files.companions(source_folder, tokenizer_folder)
    companions, config = with_special_tokens(found, config, architecture.spec, special_ids or {})
    method = stored_as(config)
    if method is None:
        return draft_of(model, architecture, files, config, companions, text_only)
    companions, config = export_files.plain_companions(companions, config, files)
    draft = draft_of(model, architecture, files, config, companions, text_only)
    return replace(draft, note=f"{draft.note}; what the source stores as {method} is written as bf16")


def draft_of(
    model: PreTrainedModel,
    architecture: Architecture,
    files: list[WeightFile],
    config: Mapping[str, Any],
    companions: Mapping[str, Companion],
    text_only: bool,
) -> Draft:
    """Return the draft for a source whose weight files and config.json are known. Arguments as in `Draft`."""
    layout = read_layout(model, files, architecture)
    text_only = text_only and text_config(architecture.spec, config) is not config
    if text_only:
        planned = export_files.text_files(files, layout)
        note = (
            f"exported {type(model).__name__} alone, as export_text_only asks: {len(layout.untrained)} tensors of the "
            "source and its multimodal configuration are left out"
        )
    else:
        planned = export_files.same_files(files)
        classes = ", ".join(config.get("architectures") or [type(model).__name__])
        note = f"exported as {classes}, in the source's own layout"
        if layout.untrained:
            note += f"; {len(layout.untrained)} tensors the run did not train are the source's, byte for byte"
    return Draft(layout=layout, files=tuple(planned), companions=companions, config=config, text_only=text_only,
                 note=note)


def check_same_source(draft: Draft) -> None:
    """Check that every process has the same source: each sends what it thinks the writer asks for. A collective.

    Raises:
        Refused: on every process, with the ranks that differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for file in draft.files:
        digest.update(file.name.encode() + file.head)
    process_group.agree("the source's tensors", digest.hexdigest(), remedy="give every machine the same model folder")


def write_draft(
    draft: Draft, model: PreTrainedModel, architecture: Architecture, full: FullTensors, output_dir: Path
) -> Exported:
    """Write an export into `output_dir`; a collective, in which rank 0 alone writes.

    full: gives the model's whole tensors.

    Raises:
        SaveFailed: on every process, as `export`.
    """
    writes = process_group.rank() == WRITER
    staged = output_dir / PARTIAL_FOLDER

    def on_writer(act: Callable[[], None]) -> None:
        agreed(act if writes else lambda: None, output_dir)

    def begin() -> None:
        export_files.require_space(output_dir, draft.num_bytes)
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)

    def finish() -> None:
        for name, origin in draft.companions.items():
            export_files.write(staged / name, [export_files.content(origin)])
        if draft.text_only:
            export_files.write_text_config(staged, model, architecture, draft.config)
            export_files.write_index(staged, list(draft.files))
        export_files.compare(staged, list(draft.files))
        export_files.publish(staged, output_dir)

    tensors = SourceTensors(model, draft.layout, full)
    try:
        on_writer(begin)
        for file in draft.files:
            # Not inside `agreed`, because fetching communicates.
            fault = export_files.write_weights(staged / file.name if writes else None, file, tensors)
            agreed(lambda fault=fault: _raise(fault), output_dir)  # type: ignore[misc]
        on_writer(finish)
    finally:
        if writes:
            shutil.rmtree(staged, ignore_errors=True)
    return Exported(folder=output_dir, weight_files=tuple(f.name for f in draft.files), num_bytes=draft.num_bytes,
                    note=draft.note)


def sharded_state(model: PreTrainedModel) -> dict[str, Any]:
    """Return the model's state dict, every tensor as this process keeps it between steps."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return dict(model.state_dict())


def agreed(act: Callable[[], T], output_dir: Path) -> list[T]:
    """Run `act` on every process as `agreement.agreed`; what the file system refuses is a failed export.

    Raises:
        SaveFailed: on every process.
    """

    def told() -> T:
        try:
            return act()
        except OSError as fault:
            raise SaveFailed(
                what=f"the model could not be exported to {output_dir}: {fault}",
                remedy="check that the folder can be written to, then resume the run",
            ) from fault

    return agreement.agreed(told)


def _raise(fault: Exception | None) -> None:
    if fault is not None:
        raise fault
