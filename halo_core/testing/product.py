"""What Halo computes for a case, through the parts a run uses: plan, build, sockets, load, head, method, step.

Not for what it should be: see `cases.py`. Shapes: B rows, S tokens of the longest row, H hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from halo_core import config as configuration
from halo_core import plan, runtime
from halo_core.data.collate import collate
from halo_core.data.rows import Row
from halo_core.kernels.experts.weights import ExpertsKernel
from halo_core.methods.sft import Sft
from halo_core.models import sockets
from halo_core.models.build import build_meta
from halo_core.models.hidden import Head, last_hidden
from halo_core.models.load import load_weights
from halo_core.plan import Checked
from halo_core.registry import Registry
from halo_core.testing.cases import STEPS, Case, without_padding
from halo_core.trainer.recompute import enable_recompute
from halo_core.trainer.step import run_step

CPU = torch.device("cpu")
PAD = 1
"""Fills rows. The reference fills with another token: what stands there must not matter."""


def checked(registry: Registry, case: Case, keys: Mapping[str, Any] | None = None) -> Checked:
    """Return the plan of a run on the case's model in fp32, with these configuration keys beside the defaults.

    Raises:
        Refused: when the plan says that such a run cannot be.
    """
    given = {
        "model_name_or_path": str(case.folder), "dataset_name": "rows.jsonl", "output_dir": str(case.folder / "run"),
        "dtype": "float32", "gradient_checkpointing": False, **(keys or {}),
    }
    return plan.build(configuration.read(None, given=given, more_words=registry.words()), registry)


def build(ready: Checked, case: Case, experts: ExpertsKernel | None = None) -> PreTrainedModel:
    """Return the case's model as a run of this plan has it, on the CPU. experts: replaces the resolved kernel."""
    resolved = runtime.resolve(ready)
    model = build_meta(
        case.architecture, ready.model_config, dtype=resolved.dtype, attention=resolved.attention,
        attention_kernel=resolved.attention_kernel, mixer_kernels=resolved.mixer_kernels,
        experts=experts or resolved.experts_kernel, fp32_router=ready.config.fp32_router,
    )
    load_weights(model, case.folder, case.architecture)
    if "gradient_checkpointing" in ready.plan.features:
        enable_recompute(model, routes=case.architecture.spec.is_moe)
    return model


def observe(ready: Checked, case: Case, experts: ExpertsKernel | None = None) -> dict[str, Tensor]:
    """Return what `hf_reference.reference` returns for the same case, but for the logits, which Halo never makes.

    The first step takes all rows as one batch, later ones in two micro-batches with different counts of targets: the
    global denominator makes both the same step. experts: replaces the resolved kernel, to see that a wrong one is
    noticed.
    """
    model = build(ready, case, experts)
    head, method = Head(model, case.architecture), Sft(collate_rows=collate)
    optimizer = RecordingSgd(model, float(case.reference["learning_rate"]))
    whole, parted = [case.rows], [case.rows[:2], case.rows[2:]]
    found: dict[str, Tensor] = {}
    handles = _record_experts(model, case, found)
    for step in range(STEPS):
        batches = [method.collate(rows, PAD) for rows in (whole if step == 0 else parted)]
        outcome = run_step(
            model=model, model_hidden=last_hidden, head=head, method=method, batches=batches, optimizer=optimizer,
            max_grad_norm=None, device=CPU,
        )
        found[f"loss.{step}"] = torch.tensor(outcome.loss)
        if step == 0:
            for handle in handles:
                handle.remove()
            if case.architecture.spec.is_moe and experts is None:
                sockets.check_called(model, recomputed="gradient_checkpointing" in ready.plan.features)
    found.update({f"gradient.{name}": gradient for name, gradient in optimizer.first.items()})
    with torch.no_grad():
        found[f"loss.{STEPS}"] = _loss(model, head, method, case.rows)
    found.update({f"weight.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items()})
    return without_padding(found, case.rows)


def layer_passes(ready: Checked, case: Case) -> int:
    """Return how often one decoder layer is computed in one training step of one batch: twice when recomputed."""
    model = build(ready, case)
    head, method = Head(model, case.architecture), Sft(collate_rows=collate)
    calls: Counter[str] = Counter()
    layer = next(m for m in model.modules() if type(m).__name__ == case.architecture.spec.decoder_layer)
    for name, child in layer.named_children():
        # On children, because transformers recomputes inside the layer's own call; before and not after theirs,
        # because a recomputation ends as soon as everything that backward needs is there.
        child.register_forward_pre_hook(lambda *_, name=name: calls.update((name,)))
    _loss(model, head, method, case.rows).backward()
    return max(calls.values())


class RecordingSgd(torch.optim.SGD):
    """Plain SGD over a model's parameters that keeps a copy of the gradients of its first step, by name."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        super().__init__(model.parameters(), lr=learning_rate)
        self.named = dict(model.named_parameters())
        self.first: dict[str, Tensor] = {}

    def step(self, closure: Any = None) -> None:
        """Keep the gradients the first time, then step."""
        if not self.first:
            self.first = {name: p.grad.detach().clone() for name, p in self.named.items() if p.grad is not None}
        super().step(closure)


def _record_experts(model: nn.Module, case: Case, found: dict[str, Tensor]) -> list[Any]:
    """Keep each experts module's first output as `experts.*` [B, S, H]; recomputation must not overwrite it."""
    shape = (len(case.rows), max(len(row.input_ids) for row in case.rows), -1)

    def recorder(key: str) -> Any:
        def record(module: nn.Module, arguments: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            found.setdefault(key, hidden.detach().reshape(shape).clone())

        return record

    return [
        module.register_forward_hook(recorder(f"experts.{path}"))
        for path, module in sockets.experts_modules(model, case.architecture)
    ]


def _loss(model: PreTrainedModel, head: Head, method: Sft, rows: Sequence[Row]) -> Tensor:
    batch = method.collate(rows, PAD)
    hidden = last_hidden(model, batch)
    (total,) = method.sums(batch, lambda targets: head(hidden, targets)).values()
    (denominator,) = method.denominators(batch).values()
    return total / denominator
