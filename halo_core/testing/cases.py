"""The cases that proofs run on: a tiny model with every weight away from its neutral value, uneven rows, and what
transformers alone computes for them.

Not for what Halo computes: see `product.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from halo_core.data.rows import Row
from halo_core.models.tiny import write_tiny
from halo_core.registry import Architecture

STEPS = 4
DECREASE = 0.2
"""By how much, to first order, the first step of plain SGD lowers the loss. Plain SGD: an optimizer that divides by its
own statistics would hide a constant factor in a gradient."""

SHAKE = 0.05
"""Standard deviation of what is added to every weight. Freshly made biases are zero, norms one, sinks and router
biases neutral: a mechanism that forgot one of them would agree all the same."""

LENGTHS = (37, 12, 25)
"""Tokens of the three rows: unequal, so two are padded; longer than the tiny models' attention windows."""

REFERENCE = Path(__file__).with_name("hf_reference.py")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One architecture's model folder, rows of it, and what transformers alone computes for them.

    reference: the tensors that `hf_reference.reference` describes.
    """

    architecture: Architecture
    folder: Path
    rows: tuple[Row, ...]
    reference: Mapping[str, Tensor]


def make_cases(architectures: Iterable[Architecture], folder: Path) -> dict[str, Case]:
    """Return a case per architecture name, below `folder`; one reference process serves them all.

    A folder that already holds the cases is read and not made again.

    Raises:
        RuntimeError: with its output, when the reference process fails.
    """
    chosen = list(architectures)
    done = folder / "done"
    if not done.exists():
        _make(chosen, folder)
        done.touch()
    return {architecture.name: _read(architecture, folder / architecture.name) for architecture in chosen}


def shake(folder: Path, seed: int = 0) -> None:
    """Add seeded noise to every floating point tensor of a folder's one safetensors file, buffers included."""
    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(int.from_bytes(key, "little")))
            tensors[name] = tensor + (SHAKE * noise).to(tensor.dtype)
    save_file(tensors, file, metadata=metadata)


def uneven_rows(vocabulary: int, seed: int = 0, lengths: Sequence[int] = LENGTHS) -> tuple[Row, ...]:
    """Return rows of so many random tokens. Supervised: two spans with a gap, as of two answers in one dialogue."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row_id, length in enumerate(lengths):
        input_ids = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
        first, gap, second = length // 4, length // 2, 2 * length // 3
        supervised = [first <= position < gap or second <= position for position in range(length)]
        rows.append(Row(row_id=row_id, input_ids=input_ids, supervised=supervised))
    return tuple(rows)


def without_padding(tensors: Mapping[str, Tensor], rows: Sequence[Row]) -> dict[str, Tensor]:
    """Return the tensors with everything that belongs to padding set to zero: nobody may depend on it."""
    kept = dict(tensors)
    for name, tensor in tensors.items():
        if name == "logits" or name.startswith("experts."):
            kept[name] = tensor.clone()
            for index, row in enumerate(rows):
                kept[name][index, len(row.input_ids) :] = 0
    return kept


def _make(architectures: list[Architecture], folder: Path) -> None:
    jobs = []
    for architecture in architectures:
        place = folder / architecture.name
        shutil.rmtree(place, ignore_errors=True)  # of an attempt that was broken off
        write_tiny(architecture, place / "model")
        shake(place / "model")
        vocabulary = json.loads((place / "model" / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        rows = [
            {"input_ids": list(row.input_ids), "supervised": list(row.supervised)} for row in uneven_rows(vocabulary)
        ]
        (place / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        jobs.append(_job(architecture, place))
    jobs_file = folder / "jobs.json"
    jobs_file.write_text(json.dumps(jobs), encoding="utf-8")
    # -P keeps this script's own folder off the import path.
    outcome = subprocess.run(
        [sys.executable, "-P", str(REFERENCE), str(jobs_file)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if outcome.returncode:
        raise RuntimeError(f"the reference process failed:\n{outcome.stdout[-2000:]}\n{outcome.stderr[-8000:]}")


def _job(architecture: Architecture, place: Path) -> dict[str, Any]:
    block = architecture.moe_block
    return {
        "folder": str(place / "model"),
        "rows": str(place / "rows.json"),
        "out": str(place / "reference.safetensors"),
        "model_class": architecture.spec.model_class,
        "experts_class": block.experts_class if block else None,
        "has_experts_socket": block is not None and block.wrapper == "halo",
        "decrease": DECREASE,
        "steps": STEPS,
    }


def _read(architecture: Architecture, place: Path) -> Case:
    rows = [
        Row(row_id=row_id, input_ids=row["input_ids"], supervised=row["supervised"])
        for row_id, row in enumerate(json.loads((place / "rows.json").read_text(encoding="utf-8")))
    ]
    return Case(
        architecture=architecture,
        folder=place / "model",
        rows=tuple(rows),
        reference=without_padding(load_file(place / "reference.safetensors"), rows),
    )
