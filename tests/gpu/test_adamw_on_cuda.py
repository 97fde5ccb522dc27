"""The fused AdamW kernel on a CUDA device gives the bits that the reference gives on the host."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from halo_core.kernels.adamw import choice
from halo_core.kernels.adamw.one_by_one import one_by_one
from halo_core.kernels.adamw.parts import Part
from halo_core.optim.adamw_bf16 import AdamWBF16, AdamWFP32
from tests.adamw_cases import CASES, TENSORS, Case, differences, differing, made, moved, numbers, one_box

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = "cuda"
LARGE = {
    "a million": Case(number=1_000_000, step=9),
    "a million, odd, fp32 gradient": Case(number=1_000_003, gradient=torch.float32, step=2),
    "a million in fp32": Case(number=1_000_001, weight=torch.float32, gradient=torch.float32),
    "a million by masters": Case(number=1_000_001, master=True, step=3),
    "a million off a boundary": Case(number=1_000_001, lead=3),
    "a million far away": Case(number=1_000_000, boxes=one_box((0, 2**31 * 7 + 1), length=1_000_000)),
    "rows of experts": Case(number=64 * 4320, boxes=one_box(
        *((row * 4320, row * 8640 + 4320) for row in range(64)), length=4320)),
    "extreme": Case(number=1_000_000, extreme=True),
    "extreme in fp32": Case(number=1_000_000, weight=torch.float32, gradient=torch.float32, extreme=True),
}  # fmt: skip


def fused(**settings: int) -> Any:
    from halo_core.kernels.adamw.fused import Fused

    return Fused(**settings)


def test_the_fused_kernel_is_chosen() -> None:
    assert choice.fused_obstacle(torch.device(CUDA)) is None
    assert type(choice.kernel(torch.device(CUDA))) is type(fused())


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("block", "warps"), [(128, 4), (1024, 4), (2048, 8), (4096, 8)])
def test_kernel_gives_the_references_bits(block: int, warps: int, together: bool) -> None:
    found = differences(fused(block=block, warps=warps), CUDA, {**CASES, **LARGE}, together)
    assert {name: counts for name, counts in found.items() if any(counts.values())} == {}


def test_other_noise_would_be_seen() -> None:
    kernel = fused()

    def other(parts: list[Part], scale: torch.Tensor | None) -> None:
        kernel([replace(part, key=part.key + 1) for part in parts], scale)

    found = differences(other, CUDA, {"a million": LARGE["a million"]})["a million"]
    assert found["weight"] > 10_000
    assert found["second"] > 10_000


def test_a_tensor_of_more_than_two_to_the_31_elements_is_stepped_to_its_end() -> None:
    number, shown = 2**31 + 4099, 100_000
    whole = torch.zeros(number, dtype=torch.bfloat16, device=CUDA)
    pieces = {name: whole if name == "weight" else whole.clone() for name in ("weight", "first", "second", "gradient")}
    case = Case(number=shown, boxes=one_box((0, number - shown), length=shown))
    part = made(case, 1)
    for name, tensor in pieces.items():
        tensor[-shown:] = getattr(part, name).to(CUDA)
    large = replace(part, **pieces, boxes=one_box((0, 0), length=number))
    fused()([large], None)
    one_by_one([part], None)
    for name in ("weight", "first", "second"):
        assert differing(pieces[name][-shown:], getattr(part, name)) == 0, name
    assert not pieces["weight"][:-shown].any(), "zeros stay zeros"


@pytest.mark.parametrize("kind", [AdamWBF16, AdamWFP32])
def test_optimizer_on_cuda_is_the_one_on_the_host(kind: type[Any]) -> None:
    """Many parameters of both dtypes, some without gradient in some steps, with and without a scale."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 33, 7), (4096,), (1000, 17), (3,), (2048, 512), (1, 1)] * 8
    start = [torch.randn(shape, generator=generator).to(torch.float32 if number % 5 == 0 else torch.bfloat16)
             for number, shape in enumerate(shapes)]  # fmt: skip
    results = []
    for device in ("cpu", CUDA):
        named = [(f"layer.{number}", Parameter(value.clone().to(device))) for number, value in enumerate(start)]
        groups = [{"params": named[::2], "weight_decay": 0.1}, {"params": named[1::2], "weight_decay": 0.0}]
        optimizer = kind(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, seed=3)
        for step in range(4):
            draw = torch.Generator().manual_seed(step)
            gradients = {
                name: torch.randn(value.shape, generator=draw).to(value.dtype if number % 3 else torch.float32)
                for number, (name, value) in enumerate(named) if (number + step) % 7
            }  # fmt: skip
            scale = torch.tensor(0.25 * step, dtype=torch.float64, device=device) if step % 2 else None
            optimizer.update({name: value.to(device) for name, value in gradients.items()}, scale)
        state = copy.deepcopy(optimizer.state_dict()["state"])
        results.append([[value.detach().cpu() for _, value in named], state])
    (weights, state), (found, found_state) = results
    assert [number for number, pair in enumerate(zip(weights, found, strict=True)) if differing(*pair)] == []
    for number, values in state.items():
        for key, value in values.items():
            other = found_state[number][key]
            assert value == other if key == "step" else differing(other, value) == 0, (number, key)


def test_nothing_waits_for_the_device() -> None:
    case = LARGE["a million"]
    part, kernel = moved(made(case, 1), CUDA), fused()
    scale = torch.tensor(0.5, device=CUDA)
    kernel([part], scale)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel([replace(part, step=10, rates=numbers(case, 10))], scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert TENSORS[0] == "weight"
