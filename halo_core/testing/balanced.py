"""Selection biases after a few balanced steps: as Halo moves them, and as written out by hand around transformers.

Not for the loss of a mode that has one. Both sides train by the same plain SGD.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from halo_core.data.collate import collate
from halo_core.methods.sft import Sft
from halo_core.models.hidden import Head, last_hidden
from halo_core.plan import Checked
from halo_core.testing.cases import Case
from halo_core.testing.product import CPU, PAD, build
from halo_core.trainer import balance
from halo_core.trainer.step import run_step


def observe_balanced(ready: Checked, case: Case, *, steps: int) -> dict[str, Tensor]:
    """Return every selection bias [E] by its name in the model after `steps` steps of a run under this plan.

    The first step takes all rows as one padded batch, later ones in two micro-batches; after each step rows are
    evaluated, which must not count.
    """
    model = build(ready, case)
    balancing = balance.bias_update(model, case.architecture, ready.plan, ready.config.router_balancing_rate)
    assert balancing is not None, "the plan asks for a bias update"
    forward = balance.counted(last_hidden, balancing)
    head, method = Head(model, case.architecture), Sft(collate_rows=collate)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(case.reference["learning_rate"]))
    for step in range(steps):
        parts = [case.rows] if step == 0 else [case.rows[:2], case.rows[2:]]
        run_step(
            model=model, model_hidden=forward, head=head, method=method, optimizer=optimizer, device=CPU,
            batches=[method.collate(rows, PAD) for rows in parts], max_grad_norm=None,
        )
        balancing.step()
        with torch.no_grad():
            forward(model, method.collate(case.rows[:1] * 5, PAD))  # one row so often that counting it would show
    return {name: buffer.clone() for name, buffer in model.named_buffers() if _is_bias(name, case)}


def balanced_by_hand(case: Case, *, rate: float, steps: int) -> dict[str, Tensor]:
    """Return the same from transformers' model alone: each row by itself, counts by a hook on every router."""
    model = AutoModelForCausalLM.from_pretrained(
        case.folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    model.set_experts_implementation("eager")
    biases = {name: buffer for name, buffer in model.named_buffers() if _is_bias(name, case)}
    spec = case.architecture.moe_block
    assert spec is not None
    counts = {name: torch.zeros(len(bias), dtype=torch.int64) for name, bias in biases.items()}
    for name in biases:
        router = model.get_submodule(f"{_layer(name, case)}{spec.router}")
        router.register_forward_hook(_adding(counts[name]))
    optimizer = torch.optim.SGD(model.parameters(), lr=float(case.reference["learning_rate"]))
    total = sum(sum(row.supervised[1:]) for row in case.rows)
    for _ in range(steps):
        for row in case.rows:
            logits = model(input_ids=torch.tensor([row.input_ids]), use_cache=False).logits[0, :-1]
            chosen = logits.log_softmax(-1).gather(-1, torch.tensor(row.input_ids[1:]).unsqueeze(-1)).squeeze(-1)
            (-(chosen * torch.tensor(row.supervised[1:])).sum() / total).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, bias in biases.items():
            mean = counts[name].double().mean()
            bias += rate * torch.sign(mean - counts[name].double()).float()
            counts[name].zero_()
    return {name: bias.clone() for name, bias in biases.items()}


def _adding(counts: Tensor) -> Callable[..., None]:
    """Return a hook that adds a router's choices to `counts` [E]; the ids are the router's one integer output."""

    def hook(module: Any, arguments: Any, output: tuple[Tensor, ...]) -> None:
        ids = next(part for part in output if not part.is_floating_point())
        counts.add_(torch.bincount(ids.reshape(-1), minlength=len(counts)))

    return hook


def _bias_fact(case: Case) -> str:
    return str(case.architecture.answers[balance.BIAS_UPDATE][0].facts["bias"])


def _is_bias(name: str, case: Case) -> bool:
    return name.endswith(f".{_bias_fact(case)}")


def _layer(name: str, case: Case) -> str:
    return name.removesuffix(_bias_fact(case))
