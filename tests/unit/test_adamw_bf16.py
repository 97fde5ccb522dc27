"""The optimizers over named parameters: what bf16 learns by chance alone, what is touched, what is kept."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from halo_core.kernels.adamw.parts import Part
from halo_core.optim.adamw_bf16 import AdamWBF16, AdamWFP32

BF16 = torch.bfloat16


def optimizer_of(
    parameters: dict[str, Parameter], kind: type[Any] = AdamWBF16, decay: float = 0.0, **settings: Any
) -> Any:
    given = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "seed": 0, **settings}
    return kind([{"params": list(parameters.items()), "weight_decay": decay}], **given)


def random(number: int | tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    shape = (number,) if isinstance(number, int) else number
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def four(seed: int = 0) -> dict[str, Parameter]:
    """Return parameters of both dtypes, of sizes that no block divides; one does not lie in row-major order."""
    return {
        "matrix": Parameter(random((37, 13), seed, BF16)), "turned": Parameter(random((6, 10), seed + 1, BF16).t()),
        "router": Parameter(random((5, 3), seed + 2)), "scalar": Parameter(random((), seed + 3, BF16)),
    }  # fmt: skip


def gradients_of(parameters: dict[str, Parameter], step: int, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return {
        name: random(tuple(parameter.shape), 100 * step + number).to(dtype or parameter.dtype)
        for number, (name, parameter) in enumerate(parameters.items())
    }


def everything(parameters: dict[str, Parameter], optimizer: Any) -> dict[str, Any]:
    """Return copies of all weights and all state."""
    found = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        found |= {f"{name}/{key}": copy.deepcopy(value) for key, value in optimizer.state.get(parameter, {}).items()}
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, Tensor):
            assert value.dtype == other[key].dtype and torch.equal(value, other[key]), key
        else:
            assert type(value) is type(other[key]) and value == other[key], key


def test_weights_follow_updates_far_below_their_spacing_where_nearest_stands_still() -> None:
    steps, lr, number = 1000, 1e-4, 2048
    weight = Parameter(torch.ones(number, dtype=BF16))
    nearest = torch.ones(number, dtype=BF16)
    optimizer = optimizer_of({"weight": weight}, lr=lr)
    gradient = torch.ones(number, dtype=BF16)  # constant, so every update is lr times one
    for _ in range(steps):
        optimizer.update({"weight": gradient}, None)
        nearest -= lr
    # A step's rounding has a variance of p (1 - p) spacing**2, at most lr times spacing (2**-8 below 1, 2**-7 above).
    deviation = math.sqrt(steps * lr * 2**-7)
    # The first moment, rounded to the nearest, stops where a tenth of what it lacks to 1 is half a spacing: 2% below.
    short = 0.02 * steps * lr
    found = weight.detach().double()
    assert float(found.mean()) == pytest.approx(1 - steps * lr, abs=5 * deviation / math.sqrt(number) + short)
    assert (nearest == 1).all()
    assert 0.5 * deviation < float(found.std()) < 2 * deviation, "weights spread as the bound says"


def test_decay_alone_shrinks_weights_in_the_mean_as_its_power() -> None:
    steps, lr, decay, number = 100, 1e-3, 0.1, 100_000
    weight = Parameter(torch.full((number,), 0.75, dtype=BF16))
    optimizer = optimizer_of({"weight": weight}, lr=lr, decay=decay)
    for _ in range(steps):
        optimizer.update({"weight": torch.zeros(number, dtype=BF16)}, None)
    expected = 0.75 * (1 - lr * decay) ** steps
    deviation = math.sqrt(steps * 0.75 * lr * decay * 2**-8)
    assert float(weight.detach().double().mean()) == pytest.approx(expected, abs=5 * deviation / math.sqrt(number))
    assert abs(0.75 - expected) > 50 * deviation / math.sqrt(number), "the bound tells it from no decay"


def test_second_moment_stays_near_fp32_where_nearest_drifts() -> None:
    """Gradients fall, as they do in training; each step then takes a thousandth off, which is below half a spacing."""
    number, beta2 = 4096, 0.999
    weight = Parameter(torch.zeros(number, dtype=BF16))
    optimizer = optimizer_of({"weight": weight}, lr=0.0, betas=(0.9, beta2))
    right, nearest = torch.zeros(number, dtype=torch.float64), torch.zeros(number, dtype=BF16)
    for step in range(600):
        gradient = random(number, step, BF16) * (1.0 if step < 100 else 0.1)
        optimizer.update({"weight": gradient}, None)
        right = beta2 * right + (1 - beta2) * gradient.double().square()
        nearest = (beta2 * nearest.float() + (1 - beta2) * gradient.float().square()).to(BF16)
    found = optimizer.state[weight]["exp_avg_sq"].double()
    assert float((found.mean() / right.mean() - 1).abs()) < 0.01
    assert float((found / right - 1).abs().mean()) < 0.1, "single elements spread, and stay near"
    assert float(nearest.double().mean() / right.mean()) > 1.3


def test_parameter_without_gradient_is_not_touched_and_its_step_not_counted() -> None:
    parameters = four()
    optimizer = optimizer_of(parameters, decay=0.1)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    gradients = gradients_of(parameters, 1)
    del gradients["matrix"]
    optimizer.update(gradients, None)
    assert torch.equal(parameters["matrix"], before["matrix"])
    assert parameters["matrix"] not in optimizer.state
    optimizer.update(gradients_of(parameters, 2), None)
    steps = {name: optimizer.state[parameter]["step"] for name, parameter in parameters.items()}
    assert steps == {"matrix": 1, "turned": 2, "router": 2, "scalar": 2}
    assert all(type(step) is int for step in steps.values())


@pytest.mark.parametrize("kind", [AdamWBF16, AdamWFP32])
def test_one_parameter_at_a_time_gives_the_same_bits(kind: type[Any]) -> None:
    results = []
    for orders in (None, ("scalar", "router", "turned", "matrix")):
        parameters = four()
        optimizer = optimizer_of(parameters, kind, decay=0.1)
        for step in (1, 2, 3):
            gradients = gradients_of(parameters, step)
            scale = torch.tensor(0.3)
            if orders is None:
                optimizer.update(gradients, scale)
            else:
                for name in orders:
                    optimizer.update({name: gradients[name]}, scale)
        results.append(everything(parameters, optimizer))
    assert_same(*results)


def test_another_seed_or_name_rounds_otherwise() -> None:
    def stepped(seed: int = 0, name: str = "a") -> Tensor:
        weight = Parameter(torch.ones(1000, dtype=BF16))
        optimizer_of({name: weight}, seed=seed).update({name: random(1000, 1, BF16)}, None)
        return weight.detach()

    assert torch.equal(stepped(), stepped())
    assert not torch.equal(stepped(), stepped(seed=1))
    assert not torch.equal(stepped(), stepped(name="b"))


def test_fp32_sums_beside_bf16_weights_are_not_rounded_first() -> None:
    results = []
    for dtype in (torch.float32, BF16):
        parameters = {"weight": Parameter(random(3000, 0, BF16))}
        optimizer = optimizer_of(parameters)
        optimizer.update(gradients_of(parameters, 1, torch.float32 if dtype == torch.float32 else BF16), None)
        results.append(optimizer.state[parameters["weight"]]["exp_avg"])
    exactly = (random(3000, 100) * torch.tensor(0.1, dtype=torch.float64).float()).bfloat16()
    assert torch.equal(results[0], exactly)
    assert not torch.equal(results[1], exactly)


def test_fp32_parameters_take_the_exact_rule() -> None:
    parameters = {"router": Parameter(random(500, 0))}
    optimizer = optimizer_of(parameters, decay=0.1, seed=1)
    theirs = Parameter(parameters["router"].detach().clone())
    torchs = torch.optim.AdamW([theirs], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for step in (1, 2, 3):
        gradients = gradients_of(parameters, step)
        optimizer.update(gradients, None)
        theirs.grad = gradients["router"].clone()
        torchs.step()
    torch.testing.assert_close(parameters["router"], theirs, rtol=1e-6, atol=2.0**-22)
    assert optimizer.state[parameters["router"]]["exp_avg"].dtype == torch.float32


def test_masters_keep_what_bf16_weights_cannot() -> None:
    weight = Parameter(torch.ones(64, dtype=BF16))
    optimizer = optimizer_of({"weight": weight}, AdamWFP32, lr=1e-4)
    for _ in range(1000):
        optimizer.update({"weight": torch.ones(64, dtype=BF16)}, None)
    state = optimizer.state[weight]
    assert {key: value.dtype for key, value in state.items() if key != "step"} == dict.fromkeys(
        ("exp_avg", "exp_avg_sq", "master"), torch.float32)  # fmt: skip
    assert float(state["master"].mean()) == pytest.approx(0.9, abs=1e-4)
    assert torch.equal(weight, state["master"].bfloat16())


@pytest.mark.parametrize("kind", [AdamWBF16, AdamWFP32])
def test_loaded_state_goes_on_with_the_same_bits(kind: type[Any]) -> None:
    parameters = four()
    optimizer = optimizer_of(parameters, kind, decay=0.1)
    for step in (1, 2):
        optimizer.update(gradients_of(parameters, step), None)
    saved = copy.deepcopy(optimizer.state_dict())
    again = {name: Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    other = optimizer_of(again, kind, decay=0.1)
    other.load_state_dict(saved)
    assert_same(everything(parameters, optimizer), everything(again, other))
    for own, of in ((parameters, optimizer), (again, other)):
        of.update(gradients_of(own, 3), torch.tensor(0.5))
    assert_same(everything(parameters, optimizer), everything(again, other))
    assert optimizer.state_dict()["param_groups"] == other.state_dict()["param_groups"]


def test_autograd_sees_that_weights_changed() -> None:
    parameters = four()
    optimizer = optimizer_of(parameters)
    kept = parameters["matrix"] * parameters["matrix"]
    versions = {name: parameter._version for name, parameter in parameters.items()}
    optimizer.update({name: g for name, g in gradients_of(parameters, 1).items() if name != "router"}, None)
    advanced = {name for name, parameter in parameters.items() if parameter._version > versions[name]}
    assert advanced == {"matrix", "turned", "scalar"}
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_step_takes_the_gradients_that_parameters_carry() -> None:
    results = []
    for by_step in (True, False):
        parameters = four()
        optimizer = optimizer_of(parameters)
        gradients = gradients_of(parameters, 1)
        del gradients["router"]
        if by_step:
            for name, gradient in gradients.items():
                parameters[name].grad = gradient
            assert optimizer.step(lambda: 2.5) == 2.5
        else:
            optimizer.update(gradients, None)
        results.append(everything(parameters, optimizer))
    assert_same(*results)


def test_no_elements_here_is_no_work_and_a_counted_step() -> None:
    weight = Parameter(torch.empty(0, 7, dtype=BF16))
    called: list[list[Part]] = []
    optimizer = optimizer_of({"weight": weight}, kernel=lambda parts, scale: called.append(parts))
    optimizer.update({"weight": torch.empty(0, 7, dtype=BF16)}, None)
    assert called == []
    assert optimizer.state[weight]["step"] == 1


def test_rates_of_a_group_are_those_of_its_next_step() -> None:
    weight = Parameter(random(100, 0))
    optimizer = optimizer_of({"weight": weight}, lr=1.0)
    before = weight.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.update({"weight": random(100, 1)}, None)
    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: optimizer_of({"a": Parameter(torch.zeros(2, dtype=torch.float16))}), "a is torch.float16"),
        (lambda: AdamWBF16([{"params": [Parameter(torch.zeros(2))]}], lr=1.0, betas=(0.9, 0.9), eps=0.0, seed=0),
         "needs a name"),
        (lambda: optimizer_of({"a": Parameter(torch.zeros(2))}).update({"b": torch.zeros(2)}, None), "called b"),
        (lambda: optimizer_of({"a": Parameter(torch.zeros(2))}).update({"a": torch.zeros(2, 1)}, None),
         "the gradient of a"),
    ],
)  # fmt: skip
def test_wrong_parameters_and_gradients_are_named(wrong: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wrong()


def test_loaded_moments_that_lie_otherwise_move_all_the_same() -> None:
    parameters = four()
    optimizer = optimizer_of(parameters)
    optimizer.update(gradients_of(parameters, 1), None)
    saved = copy.deepcopy(optimizer.state_dict())
    for values in saved["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            if values[key].dim() == 2:
                values[key] = values[key].t().contiguous().t()
    again = copy.deepcopy(parameters)
    other = optimizer_of(again)
    other.load_state_dict(saved)
    optimizer.update(gradients_of(parameters, 2), None)
    other.update(gradients_of(parameters, 2), None)
    assert_same(everything(parameters, optimizer), everything(again, other))


def test_state_of_other_parameters_is_refused_by_name() -> None:
    one, other = optimizer_of(four()), optimizer_of({f"{name}s": value for name, value in four().items()})
    with pytest.raises(ValueError, match="the state is of matrix where this optimizer has matrixs"):
        other.load_state_dict(one.state_dict())
