"""Parameters to step by the fused kernel and by the reference, and how far the results are apart.

Not a test: `tests/unit/test_adamw_fused.py` runs this file under Triton's interpreter, `tests/gpu` on a device. As a
script it prints one line of JSON, case -> tensor -> elements that differ.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from halo_core.kernels.adamw.boxes import Box, boxes_of
from halo_core.kernels.adamw.one_by_one import one_by_one
from halo_core.kernels.adamw.parts import Kernel, Part
from halo_core.kernels.adamw.rates import Rates, rates

BF16, FP32 = torch.bfloat16, torch.float32
TENSORS = ("weight", "first", "second", "master")
STEPS = 2
BLOCK = 128
"""Elements of a program under the interpreter: sizes below need several, and leave something over."""


def one_box(*rows: tuple[int, int], length: int) -> tuple[Box, ...]:
    """Return a box of rows that begin at (local, offset)."""
    local, offset = zip(*rows, strict=True)
    return (Box(local=torch.tensor(local), offset=torch.tensor(offset), length=length),)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One parameter. lead: elements in front of every tensor, so that it begins off any boundary."""

    number: int
    weight: torch.dtype = BF16
    gradient: torch.dtype = BF16
    master: bool = False
    boxes: tuple[Box, ...] | None = None
    step: int = 1
    decay: float = 0.1
    lead: int = 0
    extreme: bool = False


FAR = 2**31
CASES: dict[str, Case] = {
    "several blocks": Case(number=3 * BLOCK, step=7),
    "odd size": Case(number=5 * BLOCK + 77),
    "fp32 gradient": Case(number=2 * BLOCK + 3, gradient=FP32, step=3),
    "fp32": Case(number=2 * BLOCK + 5, weight=FP32, gradient=FP32, step=2),
    "fp32, bf16 gradient": Case(number=BLOCK, weight=FP32, step=2, decay=0.0),
    "master": Case(number=BLOCK + 1, master=True, step=4),
    "master, fp32 gradient": Case(number=2 * BLOCK, master=True, gradient=FP32),
    "one element": Case(number=1),
    "no element": Case(number=0),
    "a shard far into a tensor": Case(number=2 * BLOCK + 9, boxes=one_box((0, FAR * 5), length=2 * BLOCK + 9)),
    "begins between two calls": Case(number=300, boxes=one_box((0, FAR - 1), length=300), step=2**32 + 5),
    "rows": Case(number=3 * 37, boxes=one_box((0, 5), (37, FAR + 1005), (74, 2**40 + 2), length=37)),
    "aligned rows": Case(number=2 * 2 * BLOCK, boxes=one_box((0, 4096), (2 * BLOCK, 2**36), length=2 * BLOCK)),
    "two boxes": Case(number=96, boxes=(
        *one_box((0, 8), (48, 108), length=16), *one_box((16, 200), (64, 300), length=32))),
    "begins off a boundary": Case(number=2 * BLOCK + 6, lead=1),
    "extreme": Case(number=4 * BLOCK, extreme=True, step=1),
    "extreme, fp32": Case(number=4 * BLOCK, weight=FP32, gradient=FP32, extreme=True, step=1),
}  # fmt: skip


def numbers(case: Case, step: int) -> Rates:
    return rates(step=step, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=case.decay)


def made(case: Case, key: int) -> Part:
    """Return a parameter with moments as after some steps, on the host."""
    generator = torch.Generator().manual_seed(key)
    state = FP32 if case.master else case.weight

    def random(dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        values = torch.randn(case.lead + case.number, generator=generator) * scale
        if case.extreme:  # from far below the smallest normal fp32 number up, where a flush to zero would show
            values = values * 2.0 ** torch.randint(-148, 0, values.shape, generator=generator)
        return values.to(dtype)[case.lead :]

    weight = random(case.weight)
    master = weight.float() + random(FP32, 1e-4) if case.master else None
    return Part(
        weight=weight, first=random(state, 0.01), second=random(state, 0.01).abs(), master=master,
        gradient=random(case.gradient, 0.1), rates=numbers(case, case.step), key=key * 0x9E3779B97F4A7C15 % 2**64,
        step=case.step, boxes=boxes_of(weight) if case.boxes is None else case.boxes,
    )  # fmt: skip


def moved(part: Part, device: str, lead: int = 0) -> Part:
    """Return copies on a device, that begin as far off a boundary as before."""

    def copy(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        held = torch.empty(lead + tensor.numel(), dtype=tensor.dtype, device=device)
        held[lead:] = tensor.to(device)
        return held[lead:]

    return replace(part, **{name: copy(getattr(part, name)) for name in (*TENSORS, "gradient")})


def differences(kernel: Kernel, device: str, cases: dict[str, Case], together: bool = True) -> dict[str, Any]:
    """Return, of each case, how many elements of each tensor differ from the reference on the host after some steps."""
    parts = {name: made(case, number + 1) for number, (name, case) in enumerate(cases.items())}
    here = {name: moved(part, "cpu") for name, part in parts.items()}
    there = {name: moved(part, device, cases[name].lead) for name, part in parts.items()}
    for round_ in range(STEPS):
        scale = None if round_ == 0 else torch.tensor(0.37)
        for own in (here, there):
            for name, part in own.items():
                step = part.step + 1 if round_ else part.step
                own[name] = replace(part, step=step, rates=numbers(cases[name], step))
        one_by_one(list(here.values()), scale)
        batches: Iterable[list[Part]] = [list(there.values())] if together else [[part] for part in there.values()]
        for batch in batches:
            kernel([part for part in batch if part.weight.numel()], None if scale is None else scale.to(device))
    return {
        name: {tensor: differing(getattr(there[name], tensor), getattr(here[name], tensor)) for tensor in TENSORS
               if getattr(here[name], tensor) is not None}
        for name in cases
    }  # fmt: skip


def differing(found: Tensor, expected: Tensor) -> int:
    """Return how many elements differ in any bit."""
    whole = torch.int16 if expected.dtype == BF16 else torch.int32
    return int((found.cpu().contiguous().view(whole) != expected.contiguous().view(whole)).sum())


if __name__ == "__main__":
    from halo_core.kernels.adamw.fused import Fused

    own, few = Fused(block=BLOCK, warps=4), {name: CASES[name] for name in ("odd size", "rows", "fp32")}

    def other_noise(parts: Sequence[Part], scale: Tensor | None) -> None:
        own([replace(part, key=part.key + 1) for part in parts], scale)

    print(json.dumps({
        "together": differences(own, "cpu", CASES),
        "one by one": differences(own, "cpu", few, together=False),
        "other noise": differences(other_noise, "cpu", few),
    }))  # fmt: skip
