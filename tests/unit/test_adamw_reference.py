"""AdamW's specification: what rounding by chance does in the mean, and the step against fp64 and torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from halo_core.kernels.adamw.noise import words
from halo_core.kernels.adamw.rates import fp32, rates
from halo_core.kernels.adamw.reference import by_chance, exact, rounded, to_nearest, with_master

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
DRAWS = 1_000_000
SINGLE = 2.0**-24
"""Half a unit in the last place of fp32, relative."""


def spacing(value: float) -> float:
    """Return the distance between neighbouring bf16 numbers at a value."""
    return 2.0 ** (math.floor(math.log2(abs(value))) - 7)


@pytest.mark.parametrize("value", [1.001, -1.001, 0.3, 3e-20, -6.54e15])
def test_rounding_by_chance_is_right_in_the_mean_of_a_million_draws(value: float) -> None:
    value = fp32(value)
    own = words(11, 1, torch.tensor([0]), DRAWS)[0]
    for noise in (own & 0xFFFF, own >> 16):
        drawn = by_chance(torch.full((DRAWS,), value), noise).double()
        low, high = float(drawn.min()), float(drawn.max())
        assert high - low == pytest.approx(spacing(value)), "the two neighbours"
        share = (value - low) / (high - low)
        # A mean of Bernoulli draws: its standard deviation is the root of p (1 - p) / n. Five of them.
        deviation = (high - low) * math.sqrt(share * (1 - share) / DRAWS)
        assert float(drawn.mean()) == pytest.approx(value, abs=5 * deviation)
        nearest = float(torch.tensor(value).bfloat16())
        assert abs(nearest - value) > 5 * deviation, "the bound tells rounding by chance from rounding to the nearest"


def test_every_noise_counts_once() -> None:
    noise = torch.arange(65536)
    value = 1 + 12345 / 65536 / 128
    assert float((by_chance(torch.full((65536,), value), noise).double() - 1).sum() * 128) == 12345


def test_a_bf16_number_is_kept_under_any_noise() -> None:
    kept = torch.tensor([0.0, -0.0, 1.0, -1.0, 3.38e38, 1e-38, 9.2e-41, math.inf, -math.inf]).bfloat16()
    for noise in (0, 1, 32768, 65535):
        found = by_chance(kept.float(), torch.full((len(kept),), noise))
        assert torch.equal(found.view(torch.int16), kept.view(torch.int16))


@pytest.mark.parametrize("round_", [to_nearest, lambda values: by_chance(values, torch.full(values.shape, 65535))])
def test_no_number_stays_none(round_: object) -> None:
    assert callable(round_)
    assert round_(torch.tensor([math.nan, -math.nan])).isnan().all()


def test_nearest_is_what_torch_casts_to() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    ties = (torch.arange(2000, dtype=torch.int32) << 16) + 0x3F808000
    values = torch.cat([bits, ties]).view(torch.float32)
    values = values[~values.isnan()]
    assert torch.equal(to_nearest(values).view(torch.int16), values.bfloat16().view(torch.int16))


def made(number: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight, first, gradient = (torch.randn(number, generator=generator) for _ in range(3))
    return weight, first * 0.01, (first * 0.01).square() + 1e-6, gradient


def by_hand(
    tensors: tuple[Tensor, ...], step: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the step in fp64, as the paper writes it."""
    weight, first, second, gradient = (tensor.double() for tensor in tensors)
    gradient = gradient * scale
    beta1, beta2 = SETTINGS["betas"]  # type: ignore[misc]
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * gradient**2
    lr: float = SETTINGS["lr"]  # type: ignore[assignment]
    decayed = weight * (1 - lr * SETTINGS["weight_decay"])  # type: ignore[operator]
    corrected = (second / (1 - beta2**step)).sqrt() + SETTINGS["eps"]
    return decayed - lr * (first / (1 - beta1**step)) / corrected, first, second


@pytest.mark.parametrize("step", [1, 2, 1000])
def test_exact_step_is_the_papers_within_fp32(step: int) -> None:
    tensors = made(5000)
    expected = by_hand(tensors, step, 0.37)
    weight, first, second, gradient = (tensor.clone() for tensor in tensors)
    exact(weight, first, second, gradient, rates(step=step, **SETTINGS), torch.tensor(0.37))  # type: ignore[arg-type]
    for found, right, scale in zip((weight, first, second), expected, (weight, first, second), strict=True):
        # A handful of roundings, each at most half a unit of the largest number that occurs.
        assert float((found.double() - right).abs().max()) < 8 * SINGLE * float(scale.abs().max())


def test_exact_steps_are_torchs() -> None:
    weight, _, _, _ = made(3000)
    theirs = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([theirs], **SETTINGS)  # type: ignore[arg-type]
    first, second = torch.zeros(3000), torch.zeros(3000)
    for step in range(1, 6):
        gradient = made(3000, seed=step)[3]
        theirs.grad = gradient.clone()
        optimizer.step()
        exact(weight, first, second, gradient, rates(step=step, **SETTINGS))  # type: ignore[arg-type]
    # torch interpolates the first moment in another order; gradients near 1 cancel in it, weights near 1 move by 1e-3.
    torch.testing.assert_close(weight, theirs.detach(), rtol=1e-6, atol=4 * SINGLE)
    state = optimizer.state[theirs]
    torch.testing.assert_close(first, state["exp_avg"], rtol=1e-6, atol=4 * SINGLE)
    torch.testing.assert_close(second, state["exp_avg_sq"], rtol=1e-6, atol=1e-12)


def test_rounded_step_moves_by_moments_before_they_are_rounded() -> None:
    weight, first, second, gradient = (tensor.bfloat16() for tensor in made(4000))
    in_full = [tensor.float() for tensor in (weight, first, second)]
    numbers = rates(step=3, **SETTINGS)  # type: ignore[arg-type]
    own = words(1, 3, torch.tensor([0]), 4000)[0]
    rounded(weight, first, second, gradient, numbers, own)
    exact(*in_full, gradient.float(), numbers)
    assert torch.equal(weight, by_chance(in_full[0], own & 0xFFFF)), "low half: the weight"
    assert torch.equal(first, in_full[1].bfloat16()), "to the nearest: the first moment"
    assert torch.equal(second, by_chance(in_full[2], own >> 16)), "high half: the second moment"


def test_folded_scale_is_the_fp32_gradient_multiplied_before() -> None:
    tensors = [tensor.bfloat16() for tensor in made(2000)]
    numbers, own = rates(step=2, **SETTINGS), words(1, 2, torch.tensor([0]), 2000)[0]  # type: ignore[arg-type]
    scale = torch.tensor(0.1234567, dtype=torch.float64)
    folded, before, rounded_first = ([tensor.clone() for tensor in tensors] for _ in range(3))
    rounded(*folded, numbers, own, scale)
    rounded(*before[:3], before[3].float() * scale.float(), numbers, own)
    assert all(torch.equal(one, other) for one, other in zip(folded[:3], before[:3], strict=True))
    rounded(*rounded_first[:3], (rounded_first[3] * scale).bfloat16(), numbers, own)
    assert not torch.equal(folded[1], rounded_first[1]), "a product rounded to bf16 is another"


def test_root_is_the_nearest_fp32() -> None:
    # torch's own fp32 root on a CPU is one bit off for many of these; with eps that small it is the denominator.
    second = torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    first, weight = torch.ones(10_000), torch.zeros(10_000)
    held = second.clone()
    exact(weight, first, held, torch.zeros(10_000), rates(
        step=10**6, lr=1.0, betas=(1.0 - 2**-20, 1.0 - 2**-20), eps=0.0, weight_decay=0.0))  # fmt: skip
    numbers = rates(step=10**6, lr=1.0, betas=(1.0 - 2**-20, 1.0 - 2**-20), eps=0.0, weight_decay=0.0)
    roots = torch.tensor([math.sqrt(value) for value in held.tolist()], dtype=torch.float64).float()
    expected = -(first / (roots * numbers.second_root + 0.0)) * numbers.step_size
    assert torch.equal(weight, expected)


def test_weight_beside_a_master_is_its_nearest() -> None:
    weight, first, second, gradient = made(1000)
    short, master = weight.bfloat16(), weight.clone()
    numbers = rates(step=1, **SETTINGS)  # type: ignore[arg-type]
    held = [first.clone(), second.clone()]
    with_master(short, master, first, second, gradient, numbers)
    exact(weight, *held, gradient, numbers)
    assert torch.equal(master, weight)
    assert torch.equal(short, weight.bfloat16())
