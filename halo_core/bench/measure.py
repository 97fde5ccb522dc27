"""Takes the times, memory, bytes and losses of a checked plan's training step on a fixture.

Not for deciding what runs: the plan is made, and what is built here is what a run builds, but for the weights (random,
made in memory) and the rows (random tokens). Every process of a run calls `measure`.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from halo_core import process_group
from halo_core.bench import buffer_count, random_weights, receipt, work
from halo_core.bench.wire import Traffic, WireCount
from halo_core.data.collate import collate
from halo_core.methods.sft import Sft
from halo_core.model_config import TINY
from halo_core.models.build import build_meta, text_model_config
from halo_core.models.hidden import Head, last_hidden
from halo_core.models.sizes import sizes_of
from halo_core.models.tiny import tiny_config
from halo_core.optim.build import build_optimizer
from halo_core.optim.schedule import build_schedule
from halo_core.plan import Checked
from halo_core.runtime import ResolvedPlan
from halo_core.sharding.sharded import Sharded
from halo_core.trainer import balance
from halo_core.trainer.parallel import Parallel, build_parallel
from halo_core.trainer.recompute import enable_recompute
from halo_core.trainer.step import StepOutcome, run_step


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What `measure` found, of all processes together.

    parameters: of the whole model, tied ones once. step_tokens: real tokens of each timed step, of all processes.
    positions: of all timed steps and processes, padding counted. rows: of all timed steps. step_seconds: of each timed
    step, the slowest process's. peak_bytes: the most that any process held, of GPU memory since the weights were made,
    or of host memory since the process began. dispatcher: what tokens travel by, None where they do not. wire: kind of
    collective -> calls and bytes of one more step, which is not timed, mean over processes. losses, grad_norms: of
    warm-up and timed steps.
    """

    parameters: int
    step_tokens: tuple[int, ...]
    positions: int
    rows: int
    step_seconds: tuple[float, ...]
    peak_bytes: int
    dispatcher: str | None
    wire: dict[str, Traffic]
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Return the median of the timed steps."""
        return statistics.median(self.step_seconds)

    @property
    def tokens_per_step(self) -> int:
        """Return the real tokens of a timed step, the mean of them all."""
        return sum(self.step_tokens) // len(self.step_tokens)

    @property
    def tokens_per_second(self) -> float:
        """Return real tokens of all processes in a second: by the median of steps that are alike, else by all steps."""
        if len(set(self.step_tokens)) == 1:
            return self.step_tokens[0] / self.seconds
        return sum(self.step_tokens) / sum(self.step_seconds)


def complete(checked: Checked) -> Checked:
    """Return the plan with the whole config.json of a tiny model, which has none of its own before it is written."""
    if checked.config.model_name_or_path not in TINY:
        return checked
    spec = replace(checked.architecture.spec, tiny={k: v for k, v in checked.model_config.items() if k != "model_type"})
    whole = tiny_config(replace(checked.architecture, spec=spec)).to_dict()
    return replace(checked, model_config=whole)


def measure(
    checked: Checked,
    resolved: ResolvedPlan,
    *,
    steps: int,
    warmup: int,
    mean_length: int | None = None,
    rows: int = 0,
    say: Callable[[str], None] = print,
) -> Measured:
    """Run `warmup` steps, `steps` timed ones and one whose bytes are counted.

    mean_length: of rows of many lengths; then the timed steps are those that train `rows` of them, each once.

    Raises:
        TrainingStopped, StepFault: as a run would.
    """
    config, architecture, device = checked.config, checked.architecture, resolved.device
    parallel = build_parallel(
        checked.plan.degrees, architecture, checked.model_config, device,
        dtype=resolved.dtype, ep_dispatcher=config.ep_dispatcher,
    )  # fmt: skip
    topology = parallel.topology
    model, parameters, sharded = _model(checked, resolved, parallel)
    vocab_size = text_model_config(architecture, checked.model_config).vocab_size
    if mean_length is None:
        todo = work.of_one_length(config, topology, vocab_size=vocab_size, warmup=warmup, steps=steps)
    else:
        todo = work.of_many_lengths(
            config, topology, vocab_size=vocab_size, warmup=warmup, rows=rows, mean_length=mean_length
        )
    steps = todo.timed
    say(
        f"{receipt.parameters(parameters)} are made{parallel.words}; {warmup} steps to warm up, {steps} timed, "
        "one counted"
    )
    step = _stepper(checked, resolved, parallel, model, sharded, total=warmup + steps, parts=todo.parts)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    outcomes, seconds = [], []
    for number in range(1, warmup + steps + 1):
        began = _now(device)
        outcomes.append(step(number))
        seconds.append(_now(device) - began)
    peak = _peak(device)
    with WireCount() as wire, buffer_count.counted(parallel.dispatcher) as by_buffer:
        step(warmup + steps + 1)
    parallel.close()
    return Measured(
        parameters=parameters,
        step_tokens=tuple(outcome.tokens for outcome in outcomes[warmup:]),
        positions=sum(outcome.tokens + outcome.padding_tokens for outcome in outcomes[warmup:]),
        rows=todo.rows,
        step_seconds=tuple(max(of_ranks) for of_ranks in zip(*_of_all(seconds[warmup:]), strict=True)),
        peak_bytes=max(_of_all(peak)),
        dispatcher=parallel.dispatcher.name if parallel.dispatcher is not None else None,
        wire=_mean(_of_all({**wire.by_kind, **by_buffer})),
        losses=tuple(outcome.loss for outcome in outcomes),
        grad_norms=tuple(outcome.grad_norm for outcome in outcomes),
    )


def _model(checked: Checked, resolved: ResolvedPlan, parallel: Parallel) -> tuple[Any, int, Sharded | None]:
    """Return the model as a run has it, its number of parameters, and what a step asks of it where it is cut."""
    config, architecture = checked.config, checked.architecture
    model = build_meta(
        architecture, checked.model_config, dtype=resolved.dtype, attention=resolved.attention,
        attention_kernel=resolved.attention_kernel, mixer_kernels=resolved.mixer_kernels,
        experts=parallel.experts(resolved), fp32_router=config.fp32_router,
    )  # fmt: skip
    parameters = sizes_of(model, optim=config.optim).parameters
    checked.registry.plugins.call("halo_model_ready", family=architecture.family, plan=checked.plan, model=model)
    sharded = parallel.cut(model, architecture, config)
    random_weights.fill(model, resolved.device, seed=config.seed)
    if config.gradient_checkpointing:
        enable_recompute(model, routes=architecture.spec.is_moe)
    return model, parameters, sharded


def _stepper(
    checked: Checked, resolved: ResolvedPlan, parallel: Parallel, model: Any, sharded: Sharded | None, *, total: int,
    parts: Callable[[int], Sequence[Any]],
) -> Callable[[int], StepOutcome]:  # fmt: skip
    """Return what does one whole optimizer step, counted from 1, as the training loop does it."""
    config, architecture = checked.config, checked.architecture
    optimizer, schedule = build_optimizer(model, config), build_schedule(config, total)
    method = Sft(collate_rows=partial(collate, flatten=config.padding_free))
    head = Head(model, architecture, resolved.head_kernel)
    balancing = balance.bias_update(model, architecture, checked.plan, config.router_balancing_rate, parallel.total)
    forward = balance.counted(last_hidden, balancing)

    def step(number: int) -> StepOutcome:
        schedule.apply(optimizer, min(number, total))
        batches = [method.collate(part, 0) for part in parts(number)]
        outcome = run_step(
            model=model, model_hidden=forward, head=head, method=method, optimizer=optimizer,
            batches=batches, max_grad_norm=config.max_grad_norm,
            device=resolved.device, sharded=sharded, sums_in_fp32=config.grad_accumulation_dtype == "float32",
        )  # fmt: skip
        if balancing is not None:
            balancing.step()
        return outcome

    return step


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _of_all(value: Any) -> list[Any]:
    """Return every process's value; a collective."""
    if process_group.world() == 1:
        return [value]
    values: list[Any] = [None] * process_group.world()
    dist.all_gather_object(values, value)
    return values


def _mean(of_ranks: Sequence[dict[str, Traffic]]) -> dict[str, Traffic]:
    total: dict[str, Traffic] = {}
    for one in of_ranks:
        for kind, traffic in one.items():
            total[kind] = total.get(kind, Traffic()) + traffic
    count = len(of_ranks)
    return {
        kind: Traffic(calls=t.calls // count, handed=t.handed // count, sent=t.sent // count)
        for kind, t in sorted(total.items())
    }
