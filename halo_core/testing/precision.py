"""Proofs about precision: AdamW in bf16 with stochastic rounding, and routers in fp32.

Not for the noise or the kernel of the optimizer, which have tests of their own: this is about whole training steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halo_core.data.collate import collate
from halo_core.kernels.experts.reference import reference
from halo_core.kernels.experts.weights import ExpertWeights
from halo_core.methods.sft import Sft
from halo_core.models.build import attribute
from halo_core.models.fp32_router import routers
from halo_core.models.hidden import Head, last_hidden
from halo_core.optim.build import build_optimizer
from halo_core.optim.groups import trained
from halo_core.plan import Checked
from halo_core.registry import Registry
from halo_core.testing.cases import Case
from halo_core.testing.product import CPU, PAD, build, checked, observe
from halo_core.trainer.step import run_step

EAGER: Mapping[str, Any] = {"attn_implementation": "eager"}
SMALL_RATE = 3e-5
"""A learning rate whose step is a fraction of most weights' bf16 step, so that rounding decides what moves."""
LEARNING_RATE, LEARNING_STEPS = 1e-3, 6
DECAY = 0.1
DEVIATIONS = 5.0
"""How many standard deviations a mean over rounded elements may lie off."""
FALL = 0.1
"""How far the loss may end from the fp32 run's, as a share of that run's fall. At most 0.03 was seen."""
ARITHMETIC = 1e-3
"""What fp32 arithmetic may add to a bf16 step's distance, as a share of that step."""
NOISE = 5e-2
"""How far apart the losses, below ten, of two bf16 models may be that sum in other orders. At most 0.022 was seen."""


def prove_bf16(registry: Registry, case: Case) -> None:
    """A step rounds what fp32 arithmetic gives, up or down by chance and right in the mean; a repeated run is the same.

    The loss then falls as under fp32.
    """
    keys = {**EAGER, "bf16": True, "dtype": "bfloat16", "optim": "adamw_torch", "weight_decay": DECAY}
    ready = checked(registry, case, {**keys, "learning_rate": SMALL_RATE})
    assert "bf16" in ready.plan.features, "the plan leaves out what was asked"
    assert_rounds_the_exact_step(ready, case)
    first, second = (_weights_after(ready, case, steps=2) for _ in range(2))
    unequal = [name for name in first if not torch.equal(first[name], second[name])]
    assert not unequal, f"another run gives other bits: {', '.join(unequal[:12])}"
    fast = {"learning_rate": LEARNING_RATE, "weight_decay": 0.0}
    fp32 = _losses(checked(registry, case, {**EAGER, "optim": "adamw_torch", **fast}), case)
    bf16 = _losses(checked(registry, case, {**keys, **fast}), case)
    fall = fp32[0] - fp32[-1]
    assert fall > 10 * NOISE, f"fp32 learns nothing: {fp32}"
    assert abs(bf16[-1] - fp32[-1]) <= FALL * fall, f"bf16 ends at {bf16[-1]}, fp32 at {fp32[-1]}, from {fp32[0]}"


def assert_rounds_the_exact_step(ready: Checked, case: Case) -> None:
    """Compare one step of two micro-batches with AdamW written out in fp64, from the gradients that reached it.

    Raises:
        AssertionError: a weight is not one of the two bf16 neighbours of the exact value; the mean error along the
            step is not zero; or an fp32 weight is not exact.
    """
    model = build(ready, case)
    before = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    decayed = {row.name for row in trained(model, ready.config) if row.is_decayed}
    optimizer = build_optimizer(model, ready.config)
    with _recorded(optimizer) as seen:
        _step(model, ready, case, optimizer)
    errors = []
    for name, parameter in model.named_parameters():
        gradient = seen.gradients[name]
        assert gradient.dtype == torch.float32, f"{name}: the sum over micro-batches arrives in {gradient.dtype}"
        exact = _adamw(before[name], gradient.double() * seen.scale, ready, decay=DECAY if name in decayed else 0.0)
        gap = parameter.detach().double() - exact
        if parameter.dtype == torch.float32:
            assert bool((gap.abs() <= 1e-6 * exact.abs().clamp(min=1.0)).all()), f"{name} is fp32 and not exact"
            continue
        step = bf16_step(exact)
        worst = (gap.abs() / step).max().item()
        assert worst < 1 + ARITHMETIC, f"{name} is {worst:.2f} bf16 steps from the exact value"
        moved = exact != before[name]
        errors.append((gap / step * torch.sign(exact - before[name]))[moved])
    error = torch.cat(errors)
    # An element is rounded up or down: its error has a deviation of half a step at most.
    allowed = DEVIATIONS * 0.5 / math.sqrt(len(error))
    mean = error.mean().item()
    assert abs(mean) <= allowed, f"along the step, weights are off by {mean:.4f} bf16 steps in the mean"


def bf16_step(values: Tensor) -> Tensor:
    """Return the distance between the two bf16 numbers around each value, fp64; of tiny ones, the smallest normal's."""
    exponent = torch.frexp(values.abs().clamp(min=2.0**-126)).exponent
    return torch.ldexp(torch.ones_like(values), exponent - 8)


def prove_fp32_router(registry: Registry, case: Case) -> None:
    """In a bf16 model each router's outputs are, bit for bit, those of transformers' router in fp32 on the same input.

    Its weights are fp32 masters of the source's, move exactly, and have their names; routing weights reach the experts
    in fp32. Under fp32 throughout, nothing changes.
    """
    plain = observe(checked(registry, case, EAGER), case)
    found = observe(checked(registry, case, {**EAGER, "fp32_router": True}), case)
    unequal = [name for name in plain if name not in found or not torch.equal(plain[name], found[name])]
    assert found.keys() == plain.keys(), "fp32_router changes names"
    assert not unequal, f"under fp32 throughout fp32_router changes {', '.join(unequal[:12])}"
    ready = checked(registry, case, {**EAGER, "dtype": "bfloat16", "optim": "sgd", "fp32_router": True})
    dtypes: list[torch.dtype] = []

    def experts(weights: ExpertWeights, hidden: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        dtypes.append(routing.dtype)
        return reference(weights, hidden, ids, routing)

    model = build(ready, case, experts)
    theirs = _transformers(case, torch.float32)
    calls = _watched(dict(routers(model, case.architecture)))
    loss = _loss(model, case)
    loss.backward()
    assert dtypes and set(dtypes) == {torch.float32}, f"routing weights reach the experts in {set(dtypes)}"
    assert len(calls) == len(dtypes), "not every layer with experts has a router that was called"
    for path, (arguments, output) in calls.items():
        router = theirs.get_submodule(path)
        with torch.no_grad():
            expected = router(*(_wide(argument) for argument in arguments))
        for number, (one, other) in enumerate(zip(output, expected, strict=True)):
            assert torch.equal(one, other), f"{path}: output {number} is not that of transformers' router in fp32"
    assert_masters_move_exactly(model, theirs, case, float(case.reference["learning_rate"]))
    by_hand = _with_wide_routers(_transformers(case, torch.bfloat16), theirs, case)
    gap = abs(loss.item() - _theirs_loss(by_hand, case))
    assert gap <= NOISE, f"the loss is {gap:.3f} from that of transformers with its routers in fp32"


def assert_masters_move_exactly(model: nn.Module, theirs: nn.Module, case: Case, rate: float) -> None:
    """Check fp32 router weights against the source's, and one plain step of them, after a backward pass.

    Raises:
        AssertionError: naming a weight that is not fp32, not the source's, or not stepped in fp32.
    """
    source = dict(theirs.named_parameters())
    held = [
        (f"{path}.{name}", parameter)
        for path, router in routers(model, case.architecture)
        for name, parameter in router.named_parameters()
    ]
    assert held, "no router has a weight"
    is_finer = False
    for name, parameter in held:
        assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}"
        assert torch.equal(parameter, source[name]), f"{name} is not the source's weight"
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, f"{name} has no fp32 gradient"
        is_finer |= not torch.equal(parameter, parameter.bfloat16().float())
    assert is_finer, "every router weight fits bf16, so that an fp32 master could not be told from a bf16 one"
    torch.optim.SGD([parameter for _, parameter in held], lr=rate).step()
    for name, parameter in held:
        exact = source[name].double() - rate * parameter.grad.double()
        assert bool(((parameter.double() - exact).abs() <= 1e-6 * exact.abs().clamp(min=1e-3)).all()), name


@dataclass(kw_only=True)
class _Seen:
    gradients: dict[str, Tensor]
    scale: float


@contextmanager
def _recorded(optimizer: Any) -> Iterator[_Seen]:
    """Keep what reaches an optimizer's `update`."""
    seen, update = _Seen(gradients={}, scale=1.0), optimizer.update

    def recording(gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        seen.gradients = {name: gradient.detach().clone() for name, gradient in gradients.items()}
        seen.scale = 1.0 if scale is None else float(scale)
        update(gradients, scale)

    optimizer.update = recording
    try:
        yield seen
    finally:
        del optimizer.update


def _adamw(weight: Tensor, gradient: Tensor, ready: Checked, *, decay: float) -> Tensor:
    """Return a weight after the first step of AdamW, fp64."""
    config = ready.config
    first, second = (1 - config.adam_beta1) * gradient, (1 - config.adam_beta2) * gradient.square()
    root = (second / (1 - config.adam_beta2)).sqrt() + config.adam_epsilon
    rate = config.learning_rate
    return weight * (1 - rate * decay) - rate * first / (1 - config.adam_beta1) / root


def _step(model: Any, ready: Checked, case: Case, optimizer: torch.optim.Optimizer) -> float:
    method = Sft(collate_rows=collate)
    outcome = run_step(
        model=model, model_hidden=last_hidden, head=Head(model, case.architecture), method=method, optimizer=optimizer,
        batches=[method.collate(rows, PAD) for rows in (case.rows[:2], case.rows[2:])],
        max_grad_norm=ready.config.max_grad_norm, device=CPU,
    )  # fmt: skip
    return outcome.loss


def _weights_after(ready: Checked, case: Case, *, steps: int) -> dict[str, Tensor]:
    """Return weights and moments after some steps."""
    model = build(ready, case)
    optimizer = build_optimizer(model, ready.config)
    for _ in range(steps):
        _step(model, ready, case, optimizer)
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                found[f"{kind}/{name}"] = value.clone()
    return found


def _losses(ready: Checked, case: Case) -> list[float]:
    """Return the loss before each of `LEARNING_STEPS` steps."""
    model = build(ready, case)
    optimizer = build_optimizer(model, ready.config)
    return [_step(model, ready, case, optimizer) for _ in range(LEARNING_STEPS)]


def _loss(model: Any, case: Case) -> Tensor:
    method, head = Sft(collate_rows=collate), Head(model, case.architecture)
    batch = method.collate(case.rows, PAD)
    hidden = last_hidden(model, batch)
    (total,) = method.sums(
        batch, lambda targets: head(hidden.flatten(0, 1), targets.flatten()).view(targets.shape)
    ).values()
    (denominator,) = method.denominators(batch).values()
    return total / denominator


def _watched(found: Mapping[str, nn.Module]) -> dict[str, tuple[tuple[Any, ...], tuple[Tensor, ...]]]:
    """Return a dictionary that fills with what every router was called with, before any cast, and gave."""
    calls: dict[str, tuple[tuple[Any, ...], tuple[Tensor, ...]]] = {}
    given: dict[str, tuple[Any, ...]] = {}
    for path, router in found.items():
        router.register_forward_pre_hook(
            lambda module, arguments, path=path: given.update({path: arguments}), prepend=True
        )
        router.register_forward_hook(
            lambda module, arguments, output, path=path: calls.update({path: (given[path], _detached(output))})
        )
    return calls


def _detached(output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(part.detach().clone() for part in output)


def _wide(value: Any) -> Any:
    return value.detach().float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _narrow(value: Tensor) -> Tensor:
    return value.bfloat16() if value.is_floating_point() else value


def _transformers(case: Case, dtype: torch.dtype) -> Any:
    """Return the case's model as transformers reads it, with plain attention and experts."""
    plain = {"attn_implementation": "eager"}
    block = case.architecture.moe_block
    if block is not None and block.wrapper == "halo":
        plain["experts_implementation"] = "eager"
    model_class = attribute(case.architecture.spec.model_class)
    return model_class.from_pretrained(case.folder, dtype=dtype, **plain).train()


def _with_wide_routers(model: Any, source: nn.Module, case: Case) -> Any:
    """Give transformers' bf16 model the routers of its fp32 one, called on input cast to fp32.

    What they give is cast back, because not every model's own experts take fp32 routing weights; how those arrive in
    Halo's is compared bit for bit elsewhere.
    """
    for path, router in routers(source, case.architecture):
        own = model.get_submodule(path)
        own.float().load_state_dict(router.state_dict())
        own.register_forward_pre_hook(lambda module, given: tuple(_wide(argument) for argument in given))
        own.register_forward_hook(lambda module, given, output: tuple(_narrow(part) for part in output))
    return model


@torch.no_grad()
def _theirs_loss(model: Any, case: Case) -> float:
    """Return the token mean over the case's rows, each row by itself."""
    total, count = 0.0, 0
    for row in case.rows:
        logits = model(input_ids=torch.tensor([row.input_ids]), use_cache=False).logits[0, :-1].float()
        chosen = logits.log_softmax(-1).gather(-1, torch.tensor(row.input_ids[1:]).unsqueeze(-1)).squeeze(-1)
        wanted = torch.tensor(row.supervised[1:])
        total, count = total - chosen[wanted].sum().item(), count + int(wanted.sum())
    return total / count
