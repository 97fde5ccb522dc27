"""What a folder of a model's parts is called, what lies in it, and what is wrong with one. No torch here.

Not for writing (`ep_shards.py`) or putting together (`merge.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from halo_core.checkpoint import atomic
from halo_core.errors import Problem
from halo_core.model_config import PARTS_FOLDER, PARTS_MANIFEST

FOLDER, MANIFEST = PARTS_FOLDER, PARTS_MANIFEST
TENSORS = "tensors.safetensors"
UNTRAINED = "untrained.safetensors"
"""Tensors of the source that the run did not train, byte for byte."""
HEADS = "source-heads"
"""Sub-folder of the beginnings of the source's weight files: their keys, order, dtypes and shapes."""
COMPANIONS = "companions"
"""Sub-folder of config.json, tokenizer and chat template."""
FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What the parts are of. shapes: of every tensor, by its name in the model. degrees: sizes of the run's mesh.

    plan: the digest of the run's plan. step: the last one. text_only: whether the text class is to be written.
    """

    family: str
    architecture: str
    shapes: Mapping[str, tuple[int, ...]]
    text_only: bool
    world: int
    degrees: Mapping[str, int]
    plan: str
    step: int

    def text(self) -> bytes:
        """Return the manifest's file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode() + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder without faults."""
    entries = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    del entries["format"]
    entries["shapes"] = {name: tuple(shape) for name, shape in entries["shapes"].items()}
    return Manifest(**entries)


def problems(folder: Path) -> list[Problem]:
    """Return why `folder` cannot be merged: it is something else, or files are missing or damaged, each by name."""
    if not (folder / MANIFEST).is_file():
        return [_foreign(folder)]
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("format")
    except (OSError, ValueError, AttributeError):
        return [_problem(folder, f"its {MANIFEST} cannot be read", "copy the folder again")]
    if found != FORMAT:
        return [_problem(folder, f"it has format {found}, and this version reads format {FORMAT}",
                         "merge with the version that wrote it")]
    faults = atomic.faults(folder, contents=True)
    absent = [name for name in atomic.elsewhere(folder) if not (folder / name).is_file()]
    remedy = "copy the whole folder again, or resume the run from its last checkpoint"
    return [_problem(folder, fault, remedy) for fault in faults] + [
        _problem(folder, f"{name} is missing: another machine of the run wrote it",
                 f"copy what is in every machine's {FOLDER} into one folder")
        for name in absent
    ]


def _foreign(folder: Path) -> Problem:
    if not folder.is_dir():
        return _problem(folder, "it is not a folder" if folder.exists() else "it does not exist",
                        f"give the {FOLDER} folder of a run with save_sharded_ep: true")
    if (folder / "config.json").is_file():
        return _problem(folder, "it holds a model already", "use it as it is")
    return _problem(folder, f"it has no {MANIFEST}, so it holds no parts of a model",
                    f"give the {FOLDER} folder of a run with save_sharded_ep: true")


def _problem(folder: Path, why: str, remedy: str) -> Problem:
    return Problem(key="IN", value=folder, why=why, remedy=remedy)
