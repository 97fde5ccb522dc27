"""Writes a trained model as parts, each by the process that holds it, for `merge.py` to put together later.

Not a model folder, and no reader takes it for one. It holds all that merging needs, so that neither the model's source
nor the machines of the run have to be there: the parts, the heads of the source's files, what was not trained, and the
tokenizer and the like.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from transformers import PreTrainedModel

from halo_core import process_group
from halo_core.checkpoint import agreement, atomic, export_files, tensors
from halo_core.checkpoint.export import Draft, Exported, check_same_source, read_draft
from halo_core.checkpoint.full_tensors import WRITER
from halo_core.checkpoint.save import own_file, own_part, stored_weights
from halo_core.checkpoint.shards_folder import COMPANIONS, FOLDER, HEADS, MANIFEST, TENSORS, UNTRAINED, Manifest
from halo_core.model_config import MERGE
from halo_core.models.packed import source_files
from halo_core.models.safetensors_files import StoredTensor, WeightFile, header_of
from halo_core.registry import Architecture


def export_parts(
    model: PreTrainedModel,
    architecture: Architecture,
    source_folder: Path,
    output_dir: Path,
    *,
    plan: str,
    degrees: Mapping[str, int],
    step: int,
    tokenizer_folder: Path | None = None,
    special_ids: Mapping[str, int] | None = None,
    text_only: bool = False,
) -> Exported:
    """Write `model` into `output_dir/ep-shards`, every element once, and return what was written. A collective.

    plan, degrees, step: kept for whoever merges: the plan's digest, the sizes of the mesh, the last step. Other
    arguments as for `export.export`. A model that an earlier export left in output_dir is removed: it is older.

    Where machines do not share output_dir, each has a folder of its own processes' parts.

    Raises:
        Refused: when output_dir is the source folder.
        SaveFailed: on every process, when one has too little space or its file system refuses; nothing is left behind.
    """
    with process_group.together():
        draft = read_draft(model, architecture, source_folder, output_dir, tokenizer_folder, special_ids, text_only)
        files = source_files(source_folder)
    check_same_source(draft)
    sharing = agreement.sharing(output_dir)
    every = stored_weights(model)
    # Of all processes, not of those that share the folder: merging brings all parts together.
    part = own_part(every, tuple(range(process_group.world())))
    manifest = Manifest(
        family=architecture.family, architecture=architecture.name, text_only=draft.text_only,
        shapes={name: tuple(tensor.shape) for name, tensor in every.items()},
        world=process_group.world(), degrees=dict(degrees), plan=plan, step=step,
    )  # fmt: skip
    writes = process_group.rank() == WRITER
    kept = _untrained(files, draft) if writes else []
    needed = part.num_bytes + sum(tensor.num_bytes for _, tensor in kept)
    with atomic.publishing(output_dir / FOLDER, needed=needed, writers=sharing) as writer:
        writer.file(own_file(TENSORS), tensors.chunks(part.tensors, part.places))
        if writes:
            for file in files:
                writer.file(f"{HEADS}/{file.path.name}", [file.head])
            for name, origin in draft.companions.items():
                writer.file(f"{COMPANIONS}/{name}", [export_files.content(origin)])
            writer.file(UNTRAINED, _copied(kept))
        if sharing.leads:
            writer.file(MANIFEST, [manifest.text()])
    agreement.once_per_folder(output_dir, lambda: export_files.remove_earlier_export(output_dir))
    note = (f"wrote the parts of {process_group.world()} processes, which are no model yet; "
            f"`{MERGE} {output_dir / FOLDER} OUT` puts them together")
    return Exported(folder=output_dir / FOLDER, weight_files=tuple(sorted(writer.written)), num_bytes=part.num_bytes,
                    note=note)


def _untrained(files: list[WeightFile], draft: Draft) -> list[tuple[WeightFile, StoredTensor]]:
    if draft.text_only:
        return []
    return [(file, tensor) for file in files for tensor in file.tensors if tensor.key in draft.layout.untrained]


def _copied(kept: list[tuple[WeightFile, StoredTensor]]) -> Iterator[export_files.Piece]:
    yield header_of([(tensor.key, tensor.dtype, tensor.shape) for _, tensor in kept], {})
    for file, tensor in kept:
        yield from export_files.source_bytes(file, tensor)
