"""A source's weight files as they are read: two tensors that store one in fewer bits stand there as that one, in bf16.

Not for values (`dequantise.py`). What loads and what exports sees plain bf16 tensors under their own keys. No torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from halo_core.errors import Problem, Refused
from halo_core.model_config import stored_as
from halo_core.models.safetensors_files import StoredTensor, WeightFile, header_of, metadata_of, read_file
from halo_core.models.source import KEY, weight_files
from halo_core.support import PACKED_FORMATS, PackedFormat

READ_AS = "BF16"


@dataclass(frozen=True, kw_only=True)
class PackedTensor(StoredTensor):
    """A tensor [E, C, R] bf16 that lies in the files as two others, perhaps of two files.

    blocks: [E, R, G, 16] uint8, each byte two of the C = 32 G values, the first in its lower half; scales: [E, R, G]
    uint8, the power of two of 32 values; both with the path of their file. start, stop: of the blocks.
    """

    blocks: tuple[Path, StoredTensor]
    scales: tuple[Path, StoredTensor]

    @property
    def packed_bytes(self) -> int:
        """Return the bytes that the two tensors take in the files."""
        return self.blocks[1].num_bytes + self.scales[1].num_bytes


def source_files(folder: Path) -> list[WeightFile]:
    """Return the folder's weight files with packed tensors in place of the pairs that store them.

    A pair stands where its blocks are; a file that held nothing but scales is left out.

    Raises:
        Refused: a file is damaged, or blocks and scales do not fit together, each by its name.
    """
    files = [read_file(path) for path in weight_files(folder)]
    known = PACKED_FORMATS.get(_method(folder) or "")
    return files if known is None else _as_read(folder, files, known)


def growth_of(folder: Path, files: list[WeightFile]) -> str | None:
    """Return one sentence about the bytes that reading packed tensors takes, or None without any."""
    packed = [tensor for file in files for tensor in file.tensors if isinstance(tensor, PackedTensor)]
    if not packed:
        return None
    before, after = sum(tensor.packed_bytes for tensor in packed), sum(tensor.num_bytes for tensor in packed)
    return f"{len(packed)} tensors stored as {_method(folder)} are read as bf16: {before:,} bytes become {after:,}"


def _method(folder: Path) -> str | None:
    return stored_as(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def _as_read(folder: Path, files: list[WeightFile], known: PackedFormat) -> list[WeightFile]:
    stored = {tensor.key: (file.path, tensor) for file in files for tensor in file.tensors}
    blocks = {key.removesuffix(known.blocks): place for key, place in stored.items() if key.endswith(known.blocks)}
    scales = {key.removesuffix(known.scales): place for key, place in stored.items() if key.endswith(known.scales)}
    _check_pairs(folder, blocks, scales, known)
    read = []
    for file in files:
        tensors: list[StoredTensor] = []
        for tensor in file.tensors:
            if tensor.key.endswith(known.blocks):
                name = tensor.key.removesuffix(known.blocks)
                tensors.append(_packed(name, blocks[name], scales[name]))
            elif not tensor.key.endswith(known.scales):
                tensors.append(tensor)
        if tensors:
            head = header_of([(t.key, t.dtype, t.shape) for t in tensors], metadata_of(file.head))
            read.append(WeightFile(path=file.path, head=head, tensors=tuple(tensors)))
    return read


def _packed(name: str, blocks: tuple[Path, StoredTensor], scales: tuple[Path, StoredTensor]) -> PackedTensor:
    experts, rows, groups, width = blocks[1].shape
    return PackedTensor(
        key=name, dtype=READ_AS, shape=(experts, groups * 2 * width, rows), start=blocks[1].start, stop=blocks[1].stop,
        blocks=blocks, scales=scales,
    )  # fmt: skip


def _check_pairs(
    folder: Path,
    blocks: dict[str, tuple[Path, StoredTensor]],
    scales: dict[str, tuple[Path, StoredTensor]],
    known: PackedFormat,
) -> None:
    lacking = [name + known.scales for name in blocks if name not in scales]
    lacking += [name + known.blocks for name in scales if name not in blocks]
    unfit = []
    for name in blocks.keys() & scales.keys():
        first, second = blocks[name][1], scales[name][1]
        sound = len(first.shape) == 4 and first.shape[3] == 16 and second.shape == first.shape[:3]
        if not sound or first.dtype != "U8" or second.dtype != "U8":
            unfit.append(f"{first.key} {list(first.shape)} {first.dtype}, {second.key} {list(second.shape)} "
                         f"{second.dtype}")
    problems = [
        Problem(key=KEY, value=str(folder), why=f"{why}: {', '.join(sorted(names))}",
                remedy="copy or download the model again; a file may be missing or belong to another model")
        for why, names in (("the source lacks tensors that belong to stored ones", lacking),
                           ("packed values and their scales do not fit together", unfit))
        if names
    ]  # fmt: skip
    if problems:
        raise Refused(problems)
