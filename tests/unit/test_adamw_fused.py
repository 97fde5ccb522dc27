"""The fused AdamW kernel under Triton's interpreter: the reference's bits. On a device: `tests/gpu`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from halo_core.kernels.adamw.boxes import Box
from halo_core.kernels.adamw.chunks import VECTOR, chunks
from halo_core.kernels.adamw.noise import WORDS

CASES = Path(__file__).resolve().parents[1] / "adamw_cases.py"


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """Return what the cases found, in a process of its own: the interpreter is chosen when Triton is imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: its interpreter runs the kernel here")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run([sys.executable, str(CASES)], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("how", ["together", "one by one"])
def test_kernel_gives_the_references_bits(interpreted: dict[str, Any], how: str) -> None:
    wrong = {name: counts for name, counts in interpreted[how].items() if any(counts.values())}
    assert wrong == {}
    assert interpreted[how]


def test_other_noise_would_be_seen(interpreted: dict[str, Any]) -> None:
    found = interpreted["other noise"]
    assert found["odd size"]["weight"] > 10
    assert found["odd size"]["second"] > 10
    assert not any(found["fp32"].values()), "no noise in the exact rule"


BOXES = (
    (Box(local=torch.tensor([0]), offset=torch.tensor([0]), length=1000),),
    (Box(local=torch.tensor([0]), offset=torch.tensor([2**33 + 3]), length=517),),
    (),
    (Box(local=torch.tensor([0, 37]), offset=torch.tensor([4, 104]), length=37),
     Box(local=torch.tensor([74]), offset=torch.tensor([1000]), length=64)),
    (Box(local=torch.tensor([0, 64, 128]), offset=torch.tensor([0, 640, 1282]), length=64),),
)  # fmt: skip


@pytest.mark.parametrize("block", [16, 64, 256])
@pytest.mark.parametrize("aligned", [True, False])
def test_every_element_is_in_one_chunk_at_its_place(block: int, aligned: bool) -> None:
    found = chunks(BOXES, [aligned] * len(BOXES), block)
    seen: dict[tuple[int, int], int] = {}
    for rows, is_whole in ((found.whole, True), (found.ragged, False)):
        for part, local, offset, length in rows.tolist():
            if is_whole:
                assert length == block and local % VECTOR == 0 and offset % WORDS == 0
            assert length > 0 and offset % WORDS * (not is_whole) + length <= block
            for element in range(length):
                assert seen.setdefault((part, local + element), offset + element) == offset + element
    expected = {
        (part, local + element): offset + element
        for part, boxes in enumerate(BOXES) for box in boxes
        for local, offset in zip(box.local.tolist(), box.offset.tolist(), strict=True) for element in range(box.length)
    }  # fmt: skip
    assert seen == expected
    assert found.whole[:, 3].sum() + found.ragged[:, 3].sum() == len(expected), "none twice"
    assert (len(found.whole) > 0) == (aligned and block <= 1000)
