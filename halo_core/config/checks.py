"""What follows from several keys together: contradictions, and keys that have no effect beside others.

Not for the model, its family or the number of processes: `plan.py` knows those.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from halo_core.config import precision
from halo_core.config.keys import KEYS, RunConfig
from halo_core.errors import Problem, shown


def contradictions(config: RunConfig, given: frozenset[str]) -> Iterator[Problem]:
    """Yield what cannot hold at the same time. Only keys that were given contradict; defaults never do."""
    if "router_aux_loss_coef" in given and config.router_aux_loss_coef and config.moe_balancing != "aux_loss":
        yield Problem(
            key="router_aux_loss_coef",
            value=config.router_aux_loss_coef,
            why=f"it weighs an auxiliary loss, and moe_balancing is {config.moe_balancing}",
            remedy="set moe_balancing: aux_loss, or remove this line",
        )
    if config.load_in_4bit and config.load_in_8bit:
        yield Problem(key="load_in_8bit", value=True, why="load_in_4bit is set as well", remedy="keep one of the two")
    for key in ("load_in_4bit", "load_in_8bit"):
        if getattr(config, key) and not config.use_peft:
            yield Problem(
                key=key,
                value=True,
                why="quantised weights stay frozen, so nothing could be trained",
                remedy="set use_peft: true, or remove this line",
            )
    for key, wanted in (("fsdp_reshard_after_backward", True), ("fsdp_defer_grad_sync", False)):
        if config.fsdp_reshard_after_forward and getattr(config, key) is not wanted:
            yield Problem(
                key=key,
                value=not wanted,
                why="fsdp_reshard_after_forward: true lets go of weights in every forward pass, so nothing is kept "
                "over a step's micro-batches",
                remedy=f"set {key}: {shown(wanted)}, or fsdp_reshard_after_forward: false",
            )
    for key in ("assistant_only_loss", "completion_only_loss"):
        if config.train_on_last_assistant_only and not getattr(config, key):
            yield Problem(
                key=key,
                value=False,
                why="this learns every token, and train_on_last_assistant_only the assistant's last message alone",
                remedy="remove this line, or train_on_last_assistant_only",
            )
    yield from precision.conflicts(config, given)
    if (config.packing or config.eval_packing) and config.max_length is None:
        yield Problem(
            key="max_length",
            value=None,
            why="packing fills sequences of this length",
            remedy=f"set max_length, or {'packing' if config.packing else 'eval_packing'}: false",
        )


def remarks(config: RunConfig, given: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for keys that were given and do nothing, and for choices that Halo makes."""
    for name, facts in KEYS.items():
        if name not in given or facts.idle_while is None or getattr(config, name) == facts.default:
            continue
        other, values = facts.idle_while
        if getattr(config, other) in values:
            yield name, f"has no effect while {other} is {shown(getattr(config, other))}"
    if config.max_steps > 0 and "num_train_epochs" in given:
        yield "num_train_epochs", f"has no effect: max_steps: {config.max_steps} wins"
    if config.eval_strategy == "steps" and config.eval_steps is None:
        yield (
            "eval_strategy",
            f"eval_steps is not set, so rows are evaluated every logging_steps: {shown(config.logging_steps)}",
        )
    if config.model_revision and config.model_name_or_path and Path(config.model_name_or_path).expanduser().is_dir():
        yield "model_revision", "has no effect on a folder; it chooses a version of a hub id"
    if config.max_steps > 0 and config.warmup_steps >= config.max_steps:
        yield (
            "warmup_steps",
            f"the run ends at max_steps: {config.max_steps}, while the rate still rises, short of learning_rate",
        )
    yield from _remarks_on_packing(config, given)
    best = config.load_best_model_at_end or config.save_strategy == "best"
    if not best:
        for name in ("metric_for_best_model", "greater_is_better"):
            if name in given and getattr(config, name) is not None:
                yield name, "has no effect without load_best_model_at_end: true or save_strategy: best"


def _remarks_on_packing(config: RunConfig, given: frozenset[str]) -> Iterator[tuple[str, str]]:
    evaluates = config.eval_strategy != "no"
    packs_evaluation = config.packing if config.eval_packing is None else config.eval_packing
    if "eval_packing" in given and config.eval_packing is not None and not evaluates:
        yield "eval_packing", "has no effect while eval_strategy is no"
    if config.packing_strategy != "bfd":
        if not (config.packing or (packs_evaluation and evaluates)):
            yield "packing_strategy", "has no effect while packing is false"
            return
        if config.packing and (packs_evaluation or not evaluates) and "overlong" in given:
            why = f"packing_strategy: {config.packing_strategy} cuts rows longer than max_length"
            yield "overlong", f"has no effect: {why}"
        if config.packing_strategy == "wrapped":
            yield (
                "packing_strategy",
                "wrapped cuts rows wherever a pack is full, also within an answer; each piece is a document of its "
                "own, which sees nothing of the piece before it",
            )
    sizes = (config.per_device_train_batch_size, config.per_device_eval_batch_size if evaluates else 1)
    if config.padding_free and max(sizes) == 1:
        yield "padding_free", "has no effect: a batch of one row or pack has nothing to pad"
