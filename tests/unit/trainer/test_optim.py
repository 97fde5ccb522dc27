"""Optimizer groups and schedules against transformers' own. Not for what an optimizer computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, get_scheduler
from transformers.trainer_utils import SchedulerType

from halo_core import registry
from halo_core.errors import Refused
from halo_core.optim.build import build_optimizer, parameter_groups
from halo_core.optim.roles import DECAYED, role_of, roles
from halo_core.optim.schedule import NAMES, REACTIVE, build_schedule, warmup_count

ARCHITECTURES = {architecture.name: architecture for architecture in registry.load().architectures()}
TOTAL = 20


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_decayed_parameters_are_those_of_transformers_trainer_without_scalars(name: str, text_class_model: Any) -> None:
    with torch.device("meta"):
        model = text_class_model(ARCHITECTURES[name])
    expected = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    named = dict(model.named_parameters())
    decayed = {name for name, role in roles(model).items() if role in DECAYED}
    scalars = {name for name, role in roles(model).items() if role == "scalar"}
    assert decayed == (expected & named.keys()) - scalars
    assert scalars <= expected, "transformers decays them, so the difference is theirs alone"
    assert decayed and decayed != named.keys()


def test_role_comes_from_class_and_name_not_from_shape() -> None:
    assert role_of(nn.Linear, "layers.0.q_proj.weight") == "matrix"
    assert role_of(nn.Module, "layers.0.experts.gate_up_proj") == "matrix"
    assert role_of(nn.Module, "layers.0.experts.gate_up_proj_bias") == "bias", "two-dimensional, still a bias"
    assert role_of(nn.Conv1d, "layers.0.conv.conv.weight") == "convolution"
    assert role_of(nn.Embedding, "embed_tokens.weight") == "embedding"
    assert role_of(nn.Module, "layers.0.q_norm.weight") == "norm"
    assert role_of(nn.LayerNorm, "layers.0.anything.weight") == "norm"
    assert role_of(nn.Module, "layers.0.router.per_expert_scale") == "scalar"
    assert role_of(nn.Module, "layers.0.self_attn.sinks") == "scalar"


def test_groups_keep_names_and_leave_frozen_parameters_out(small: Any) -> None:
    model = small.model()
    model.mix.weight.requires_grad_(False)
    optimizer = build_optimizer(model, small.settings(weight_decay=0.1))
    found = {tuple(group["param_names"]): group["weight_decay"] for group in optimizer.param_groups}
    assert found == {("embed.weight",): 0.1, ("scale", "mix.bias", "norm.weight", "norm.bias"): 0.0}
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1


@pytest.mark.parametrize(("optim", "kind"), [("sgd", torch.optim.SGD), ("adamw_torch", torch.optim.AdamW),
                                             ("adamw_torch_fused", torch.optim.AdamW)])
def test_optimizers_carry_the_configured_numbers(small: Any, optim: str, kind: type) -> None:
    config = small.settings(optim=optim, learning_rate=0.3, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6)
    optimizer = build_optimizer(small.model(), config)
    assert type(optimizer) is kind and optimizer.defaults["lr"] == 0.3
    if kind is torch.optim.AdamW:
        assert optimizer.defaults["betas"] == (0.8, 0.95) and optimizer.defaults["eps"] == 1e-6
        assert bool(optimizer.defaults["fused"]) == (optim == "adamw_torch_fused")


def test_unknown_optimizer_and_nothing_trainable_are_refused(small: Any) -> None:
    with pytest.raises(Refused, match="use one of sgd, adamw_torch, adamw_torch_fused, adamw_fp32"):
        build_optimizer(small.model(), SimpleNamespace(optim="adafactor"))  # type: ignore[arg-type]
    with pytest.raises(Refused, match="no parameter of the model requires a gradient"):
        build_optimizer(small.model().requires_grad_(False), small.settings())


def settings(name: str, **changes: Any) -> Any:
    return SimpleNamespace(**{"lr_scheduler_type": name, "lr_scheduler_kwargs": None, "warmup_steps": 0,
                              "learning_rate": 0.3, **changes})


ARGUMENTS: dict[str, dict[str, Any]] = {
    "cosine_with_restarts": {"num_cycles": 2}, "polynomial": {"power": 2.0}, "cosine_with_min_lr": {"min_lr": 0.03},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1}, "warmup_stable_decay": {"num_decay_steps": 5},
}


@pytest.mark.parametrize("name", NAMES)
def test_rate_of_every_step_is_transformers_own_to_the_last_bit(name: str) -> None:
    warmup = 0 if name == "constant" else 3
    weight = nn.Parameter(torch.zeros(1))
    reference = torch.optim.SGD([weight], lr=0.3)
    shape = get_scheduler(name, reference, num_warmup_steps=warmup, num_training_steps=TOTAL,
                          scheduler_specific_kwargs=ARGUMENTS.get(name))
    ours = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    schedule = build_schedule(settings(name, warmup_steps=warmup, lr_scheduler_kwargs=ARGUMENTS.get(name)), TOTAL)
    for step in range(1, TOTAL + 1):
        assert schedule.apply(ours, step) == reference.param_groups[0]["lr"]
        reference.step()
        shape.step()


def test_every_schedule_of_transformers_is_offered_or_refused_with_a_reason() -> None:
    assert set(NAMES) | set(REACTIVE) == {kind.value for kind in SchedulerType}
    for name in REACTIVE:
        with pytest.raises(Refused, match="follows evaluation results"):
            build_schedule(settings(name), TOTAL)
    with pytest.raises(Refused, match="transformers has no such schedule"):
        build_schedule(settings("cosin"), TOTAL)


def test_arguments_that_a_schedule_would_ignore_or_not_know_are_refused() -> None:
    with pytest.raises(Refused, match="constant has no warm-up"):
        build_schedule(settings("constant", warmup_steps=3), TOTAL)
    with pytest.raises(Refused, match="takes no arguments"):
        build_schedule(settings("constant_with_warmup", lr_scheduler_kwargs={"power": 1}), TOTAL)
    with pytest.raises(Refused, match="the schedule linear does not take this"):
        build_schedule(settings("linear", lr_scheduler_kwargs={"power": 1}), TOTAL)


@pytest.mark.parametrize(("given", "total", "count"), [(0, 10, 0), (3, 10, 3), (0.1, 10, 1), (0.25, 10, 3), (1, 9, 1)])
def test_warmup_below_one_is_a_share_rounded_up(given: float, total: int, count: int) -> None:
    assert warmup_count(given, total) == count


def test_rate_zero_is_legal_for_every_schedule() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    for name in NAMES:
        config = settings(name, learning_rate=0.0, lr_scheduler_kwargs=ARGUMENTS.get(name))
        assert build_schedule(config, TOTAL).apply(optimizer, 2) == 0.0
