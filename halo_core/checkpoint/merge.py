"""Puts the parts of a model together into a Hugging Face folder, in one process and without a device.

Not for writing parts (`ep_shards.py`). Tensors are read and written group by group, so that a model larger than the
memory can be merged; the folder is the one that an export of the same run would have written.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from halo_core.checkpoint.export import Draft, Exported, draft_of, write_draft
from halo_core.checkpoint.find import parts_of
from halo_core.checkpoint.full_tensors import FromFiles
from halo_core.checkpoint.pieces import whole
from halo_core.checkpoint.save import stored_weights
from halo_core.checkpoint.shards_folder import (
    COMPANIONS,
    FOLDER,
    HEADS,
    MANIFEST,
    TENSORS,
    UNTRAINED,
    Manifest,
    problems,
    read_manifest,
)
from halo_core.checkpoint.stored import StoredTensors
from halo_core.errors import Problem, Refused
from halo_core.models.build import build_meta
from halo_core.models.safetensors_files import described, read_file
from halo_core.registry import Architecture, Registry


def merge(folder: Path, out: Path, registry: Registry) -> Exported:
    """Write the model whose parts lie in `folder` to `out`, a new or empty folder, and return what was written.

    folder: a run's `ep-shards`, or its output_dir. With machines that share no folder: all of theirs, copied together.

    Raises:
        Refused: files are missing or damaged, a tensor is not there in full, the folder is something else, its family
            is not installed, or `out` is in use.
        SaveFailed: too little space, or the file system refused.
    """
    inner = folder / FOLDER
    folder = inner if not (folder / MANIFEST).is_file() and inner.is_dir() else folder
    found = problems(folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        found.append(Problem(key="OUT", value=out, why="it exists and is not an empty folder",
                             remedy="give a new folder"))
    if found:
        raise Refused(found)
    manifest = read_manifest(folder)
    architecture = _architecture(manifest, folder, registry)
    companions = {str(path.relative_to(folder / COMPANIONS)): path
                  for path in sorted((folder / COMPANIONS).rglob("*")) if path.is_file()}
    config = json.loads(companions["config.json"].read_text(encoding="utf-8"))
    model = build_meta(architecture, config, dtype=torch.float32)
    files = [described(path, path.read_bytes()) for path in sorted((folder / HEADS).iterdir())]
    draft = draft_of(model, architecture, files, config, companions, manifest.text_only)
    with StoredTensors(parts_of(TENSORS, folder, [path.name for path in folder.iterdir()])) as stored:
        names = _names(model)
        _check(folder, manifest, stored, set(names.values()))
        full = FromFiles(stored, names)
        return write_draft(_with_untrained(draft, folder / UNTRAINED), model, architecture, full, out)


def _architecture(manifest: Manifest, folder: Path, registry: Registry) -> Architecture:
    for architecture in registry.architectures():
        if architecture.name == manifest.architecture:
            return architecture
    raise Refused(Problem(key="IN", value=folder, why=f"it holds a {manifest.architecture} of family "
                          f"{manifest.family}, which no installed plugin has",
                          remedy="install the plugin that the run used, or name its file with --plugin"))


def _names(model: PreTrainedModel) -> dict[str, str]:
    """Return every name of the state dict -> the one name under which a tied tensor is stored."""
    canonical = {id(tensor): name for name, tensor in stored_weights(model).items()}
    return {name: canonical[id(tensor)] for name, tensor in model.state_dict(keep_vars=True).items()}


def _check(folder: Path, manifest: Manifest, stored: StoredTensors, wanted: set[str]) -> None:
    """Check that the parts are those of the manifest and of the model, and make up every tensor.

    Raises:
        Refused: naming every tensor that is missing, not there in full, or foreign.
    """
    lacking = sorted(
        name for name in wanted | manifest.shapes.keys()
        if name not in stored.tensors or not stored.tensors[name].holds(whole(stored.tensors[name].shape))
    )
    foreign = sorted(
        name for name, tensor in stored.tensors.items()
        if name not in wanted or tensor.shape != manifest.shapes.get(name)
    )
    found = [Problem(key="IN", value=folder, why=f"{name} is not there in full",
                     remedy="copy the whole folder again, or resume the run from its last checkpoint")
             for name in lacking]
    of = manifest.architecture
    found += [Problem(key="IN", value=folder, why=f"{name} is of another shape, or no tensor of {of}",
                      remedy="give the parts of one run, and the plugin version that wrote them") for name in foreign]
    if found:
        raise Refused(found)


def _with_untrained(draft: Draft, path: Path) -> Draft:
    """Return the draft with what was not trained taken from its copy: the source's files are not here."""
    file = read_file(path)
    copies = {tensor.key: (file, tensor) for tensor in file.tensors}
    return replace(draft, files=tuple(
        replace(planned, tensors=tuple(copies.get(tensor.key, (origin, tensor)) for origin, tensor in planned.tensors))
        for planned in draft.files
    ))
