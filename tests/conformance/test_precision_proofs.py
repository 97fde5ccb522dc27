"""The proofs about precision hold on every architecture, and each planted fault turns the one red that is for it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_core import registry
from halo_core.models import build, fp32_router, sockets
from halo_core.optim.adamw_bf16 import AdamWBF16
from halo_core.testing import precision
from halo_core.testing.conformance import Suite
from halo_core.testing.precision import bf16_step, prove_bf16, prove_fp32_router
from halo_core.testing.product import observe
from halo_core.trainer import step

ALL = sorted(architecture.name for architecture in registry.load().architectures())
MOE = sorted(architecture.name for architecture in registry.load().architectures() if architecture.spec.is_moe)


def test_the_step_of_bf16_numbers_is_the_distance_to_their_neighbour() -> None:
    values = torch.tensor([1.0, 1.5, 0.75, 300.0, -1e-3], dtype=torch.bfloat16)
    after = (values.view(torch.int16) + 1).view(torch.bfloat16)
    assert torch.equal(bf16_step(values.double()), (after.double() - values.double()).abs())


def exact_step(
    optimizer: AdamWBF16, gradients: Mapping[str, Tensor], scale: Tensor | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (parameter, exact value, fp64) after a first step of AdamW at its rates."""
    found = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            gradient = gradients[name].double() * (1.0 if scale is None else scale)
            kept = 1 - group["lr"] * group["weight_decay"]
            change = group["lr"] * gradient / (gradient.abs() + group["eps"])
            found[name] = (parameter, parameter.detach().double() * kept - change)
    return found


class Nearest(AdamWBF16):
    """Rounds the exact step to the nearest bf16 value."""

    def update(self, gradients: Mapping[str, Tensor], scale: Tensor | None = None) -> None:
        with torch.no_grad():
            for parameter, exact in exact_step(self, gradients, scale).values():
                parameter.copy_(exact)


class Upwards(AdamWBF16):
    """Rounds every step to the bf16 value that is farther along."""

    def update(self, gradients: Mapping[str, Tensor], scale: Tensor | None = None) -> None:
        with torch.no_grad():
            for parameter, exact in exact_step(self, gradients, scale).values():
                farther = torch.sign(exact - parameter.double()) * bf16_step(exact) * 0.499
                parameter.copy_(exact + farther)


class Stuck(AdamWBF16):
    """Steps nothing."""

    def update(self, gradients: Mapping[str, Tensor], scale: Tensor | None = None) -> None:
        pass


class TwoSteps(AdamWBF16):
    """Goes twice as far, at a rate where that is many bf16 steps for some weights."""

    def update(self, gradients: Mapping[str, Tensor], scale: Tensor | None = None) -> None:
        for group in self.param_groups:
            group["lr"] *= 300
        super().update(gradients, scale)
        for group in self.param_groups:
            group["lr"] /= 300


def with_optimizer(monkeypatch: pytest.MonkeyPatch, kind: type[AdamWBF16], seeds: Any = None) -> None:
    from halo_core.optim.build import build_optimizer, parameter_groups

    def built_so(model: Any, config: Any) -> Any:
        if not config.bf16:
            return build_optimizer(model, config)
        return kind(
            parameter_groups(model, config.weight_decay), lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_epsilon,
            seed=config.seed if seeds is None else next(seeds),
        )

    monkeypatch.setattr(precision, "build_optimizer", built_so)


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Nearest, "in the mean"), (Upwards, "in the mean"), (Stuck, "bf16 steps from"), (TwoSteps, "bf16 steps from")],
)
def test_wrong_rounding_is_seen(kind: type[AdamWBF16], said: str, suite: Suite, monkeypatch: Any) -> None:
    with_optimizer(monkeypatch, kind)
    with pytest.raises(AssertionError, match=said):
        prove_bf16(suite.registry, suite.cases["lfm2"])


def test_noise_that_is_another_in_every_run_is_seen(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    with_optimizer(monkeypatch, AdamWBF16, count())
    with pytest.raises(AssertionError, match="another run gives other bits"):
        prove_bf16(suite.registry, suite.cases["lfm2"])


def test_loss_that_does_not_fall_is_seen(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    with_optimizer(monkeypatch, Stuck)
    monkeypatch.setattr(precision, "assert_rounds_the_exact_step", lambda ready, case: None)
    with pytest.raises(AssertionError, match="bf16 ends at"):
        prove_bf16(suite.registry, suite.cases["lfm2"])


def test_sum_that_is_rounded_before_the_optimizer_is_seen(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    right = step.update

    def rounded(optimizer: Any, parameters: Any, gradients: Any, scale: Any) -> None:
        right(optimizer, parameters, {name: g.to(parameters[name].dtype) for name, g in gradients.items()}, scale)

    monkeypatch.setattr(step, "update", rounded)
    with pytest.raises(AssertionError, match=r"arrives in torch\.bfloat16"):
        prove_bf16(suite.registry, suite.cases["lfm2"])


def bf16_within(model: Any, architecture: Any) -> None:
    """Widen routers as `widen_routers` does, and let them compute in bf16 all the same."""
    fp32_router.widen_routers(model, architecture)
    for _, router in fp32_router.routers(model, architecture):
        right = router.forward

        def forward(hidden: Tensor, *others: Any, right: Any = right) -> Any:
            return tuple(
                part.bfloat16().float() if part.is_floating_point() else part for part in right(hidden, *others)
            )

        router.forward = forward


def test_router_that_rounds_is_seen(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "widen_routers", bf16_within)
    monkeypatch.setattr(precision, "observe", lambda ready, case: {})
    with pytest.raises(AssertionError, match="output 0 is not that of transformers' router"):
        prove_fp32_router(suite.registry, suite.cases["qwen3_moe"])


def test_router_without_a_master_is_seen(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    right = precision.build

    def rounded(ready: Any, case: Any, experts: Any) -> Any:
        model = right(ready, case, experts)
        for _, router in fp32_router.routers(model, case.architecture):
            for parameter in router.parameters():
                parameter.data = parameter.data.bfloat16().float()
        return model

    monkeypatch.setattr(precision, "build", rounded)
    with pytest.raises(AssertionError, match="is not that of transformers' router in fp32"):
        prove_fp32_router(suite.registry, suite.cases["gpt_oss"])
    case = suite.cases["gpt_oss"]
    ready = precision.checked(suite.registry, case, {"dtype": "bfloat16", "fp32_router": True})
    with pytest.raises(AssertionError, match="is not the source's weight"):
        precision.assert_masters_move_exactly(
            rounded(ready, case, None), precision._transformers(case, torch.float32), case, 0.1
        )


def test_routing_weights_that_are_narrowed_on_the_way_are_seen(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    right = sockets.Socket.__call__

    def narrowed(self: Any, weights: Any, hidden: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        return right(self, weights, hidden, ids, routing.to(hidden.dtype))

    monkeypatch.setattr(sockets.Socket, "__call__", narrowed)
    with pytest.raises(AssertionError, match="reach the experts in"):
        prove_fp32_router(suite.registry, suite.cases["lfm2_moe"])


def test_fp32_router_that_changes_an_fp32_run_is_seen(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(ready: Any, case: Any) -> dict[str, Tensor]:
        found = observe(ready, case)
        if ready.config.fp32_router:
            found["loss.1"] = torch.nextafter(found["loss.1"], torch.tensor(torch.inf, dtype=found["loss.1"].dtype))
        return found

    monkeypatch.setattr(precision, "observe", shifted)
    with pytest.raises(AssertionError, match=r"changes loss\.1"):
        prove_fp32_router(suite.registry, suite.cases["qwen3_moe"])
