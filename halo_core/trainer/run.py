"""One run from its checked plan to the exported folder: data, model, loop, export, in that order.

Not for deciding anything: the plan is made (`halo_core.plan`), each room is its own module. Refusals about data come
before weights are read.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from halo_core import process_group, runtime
from halo_core.attention import socket
from halo_core.balancing.bias_update import BiasUpdate
from halo_core.checkpoint import agreement, find
from halo_core.checkpoint.atomic import SaveFailed
from halo_core.checkpoint.ep_shards import export_parts
from halo_core.checkpoint.export import Exported, export
from halo_core.checkpoint.identity import identity_of
from halo_core.data.account import Account
from halo_core.data.collate import collate
from halo_core.data.order import StepOrder, total_steps
from halo_core.data.prepare import prepare
from halo_core.data.tokenizer_setup import special_ids_of
from halo_core.data.units import units_of
from halo_core.data.waiting import bar, silent
from halo_core.methods.sft import Sft
from halo_core.models import packed, sockets, source
from halo_core.models.build import build_meta, text_model_config
from halo_core.models.hidden import Head, last_hidden
from halo_core.models.load import load_weights
from halo_core.models.tiny import folder_or_id
from halo_core.models.tokenizer import check_vocabulary, load_tokenizer, padding_id
from halo_core.optim.build import build_optimizer
from halo_core.optim.groups import log_lines, trained
from halo_core.optim.schedule import build_schedule
from halo_core.plan import Checked
from halo_core.sharding.sharded import Sharded
from halo_core.trainer import balance, preflight, probe, progress, run_folder, trackers
from halo_core.trainer.interrupts import Interrupts
from halo_core.trainer.loop import FitResult, fit
from halo_core.trainer.parallel import Parallel, build_parallel
from halo_core.trainer.policy import build_policy
from halo_core.trainer.recompute import enable_recompute
from halo_core.trainer.report import Reporter, StepReport
from halo_core.trainer.run_folder import RunFolder
from halo_core.trainer.stopped import TrainingStopped

LONGEST_PREPARATION = 24 * 3600.0
"""Seconds that ranks whose rows are ready wait for those that still prepare theirs."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A finished run: the exported folder, what the data held, and how the loop ended. `seconds` is wall time."""

    output_dir: Path
    account: Account
    fit: FitResult
    seconds: float


def train(
    checked: Checked,
    rows: Iterable[Mapping[str, Any]] | None = None,
    on_step: Callable[[StepReport], None] | None = None,
    say: Callable[[str], None] = print,
) -> RunResult:
    """Train what the plan says and export the result; a collective of the processes that have joined.

    rows: training rows in place of `dataset_name`. on_step: called after each optimizer step. say: prints one line.

    Raises:
        Refused: about data, checkpoint or weights, before any training.
        TrainingStopped, Interrupted: see `loop.fit`.
    """
    began = time.perf_counter()
    config, plan, architecture = checked.config, checked.plan, checked.architecture
    say = say if process_group.rank() == 0 else _quiet
    start = preflight.start(config)
    for note in plan.notes:
        say(f"note: {note}")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="halo-") as scratch, ExitStack() as held:
        # One rank may find its rows in the cache of its machine while another prepares them for hours.
        with process_group.together(process_group.side_group(LONGEST_PREPARATION)):
            name = folder_or_id(str(config.model_name_or_path), architecture, Path(scratch))
            tokenizer = load_tokenizer(name, revision=config.model_revision, trust_remote_code=config.trust_remote_code)
            prepared = prepare(
                config, tokenizer, rows, waiting=bar if process_group.rank() == 0 else silent, may_cache=True
            )
            units = units_of(config, prepared)
        for line in units.account.text().splitlines():
            say(line)
        order = StepOrder(
            num_rows=len(units.train),
            per_device=config.per_device_train_batch_size,
            data_ranks=plan.degrees.data_ranks,
            accumulation=config.gradient_accumulation_steps,
            seed=config.seed if config.data_seed is None else config.data_seed,
        )
        steps = total_steps(order, max_steps=config.max_steps, num_train_epochs=config.num_train_epochs)
        with process_group.together():
            schedule = build_schedule(config, steps)
            folder_of_model = source.resolve(name, config.model_revision, dequantise=config.dequantize_source)
            growth = packed.growth_of(folder_of_model, packed.source_files(folder_of_model))
            model_config = json.loads((folder_of_model / "config.json").read_text(encoding="utf-8"))
            vocab_size = text_model_config(architecture, model_config).vocab_size
            check_vocabulary(prepared, tokenizer, vocab_size=vocab_size, name=str(config.model_name_or_path))
            resolved = runtime.resolve(checked, model_config)
        process_group.agree("this machine", {"resolved": resolved.digest(), **resolved.as_dict(), "device": ""})
        plugins = dict(plan.plugins)
        environment = run_folder.environment(device=resolved.device_name, plugins=plugins)
        identity = identity_of(config=config, plan=plan, rows=units.train, environment=environment)
        process_group.agree("the rows", identity.data, remedy="give every process the same data")
        with process_group.together():
            notes = find.check(start.checkpoint, identity) if start.checkpoint else ()
        for note in (*resolved.notes, *notes, *([growth] if growth else [])):
            say(f"note: {note}")
        parallel = build_parallel(
            plan.degrees,
            architecture,
            model_config,
            resolved.device,
            dtype=resolved.dtype,
            ep_dispatcher=config.ep_dispatcher,
            timeout=config.save_timeout,
        )
        model, sharded = _model(checked, resolved, parallel, model_config, folder_of_model)
        probe.check(
            model,
            architecture,
            last_hidden,
            config,
            attention_name=resolved.attention,
            device=resolved.device,
            sharded=sharded,
        )
        optimizer = build_optimizer(model, config)
        for line in log_lines(trained(model, config)):
            say(line)
        resumed_from = start.checkpoint.path if start.checkpoint else None
        held.enter_context(run_folder.occupied(start.folder, resumed_from=resumed_from, say=say))
        agreement.once_per_folder(
            start.folder,
            lambda: run_folder.open_folder(
                start.folder,
                config=vars(config),
                plan={**asdict(plan), "digest": plan.digest(), "resolved": resolved.as_dict()},
                environment=environment,
                account=units.account.as_dict(),
            ),
        )
        folder = RunFolder(path=start.folder)
        say(
            f"training {plan.architecture} on {resolved.device_name}: {steps} steps of at most {plan.rows_per_step} "
            f"{'packs' if config.packing else 'rows'}, {runtime.dtype_name(resolved.dtype)}, "
            f"attention {resolved.attention}, experts {resolved.experts}"
            f"{parallel.words}"
        )
        logging_steps = build_policy(config, total=steps, steps_per_epoch=order.steps_per_epoch).logging_steps
        reporters: list[Reporter] = [progress.choose(Console(), logging_steps)] if parallel.topology.is_first else []
        reporters += (
            []
            if not parallel.topology.is_first
            else trackers.open_trackers(
                config.report_to,
                preflight.tracker_targets(checked.registry),
                run_name=config.run_name or folder.path.name,
                config=vars(config),
                folder=folder.path,
                logging_steps=logging_steps,
                say=say,
                step=start.checkpoint.step if start.checkpoint else 0,
            )
        )
        balancing = balance.bias_update(model, architecture, plan, config.router_balancing_rate, parallel.total)
        forward = _checked_once(model)
        result = fit(
            model=model,
            model_hidden=balance.counted(forward, balancing),
            head=Head(model, architecture, resolved.head_kernel),
            method=Sft(collate_rows=partial(collate, flatten=config.padding_free)),
            rows=units.train,
            evaluation=units.evaluation,
            order=order,
            pad_id=padding_id(tokenizer, vocab_size=vocab_size),
            optimizer=optimizer,
            schedule=schedule,
            total_steps=steps,
            config=config,
            folder=folder,
            identity=identity,
            device=resolved.device,
            interrupts=Interrupts(say),
            reporters=reporters,
            on_step=_after_step(checked, balancing, on_step),
            checkpoint=start.checkpoint,
            sharded=sharded,
            data_rank=parallel.topology.data_rank,
        )
        parallel.close()
        special_ids = special_ids_of(config, tokenizer)
        is_changed = bool(config.chat_template_path or special_ids)
        tokenizer_folder = Path(scratch) / "tokenizer" if is_changed else None
        if tokenizer_folder is not None:
            tokenizer.save_pretrained(tokenizer_folder)
        try:
            write: Callable[..., Exported] = export
            if config.save_sharded_ep:
                write = partial(export_parts, plan=plan.digest(), degrees=asdict(plan.degrees), step=result.step)
            written = write(
                model,
                architecture,
                folder_of_model,
                folder.path,
                tokenizer_folder=tokenizer_folder,
                special_ids=special_ids,
                text_only=config.export_text_only,
            )
        except SaveFailed as fault:
            raise TrainingStopped(
                step=result.step, what=fault.what, remedy=fault.remedy, checkpoint=result.checkpoint
            ) from fault
    say(f"{written.note}: {written.folder}")
    return RunResult(output_dir=folder.path, account=units.account, fit=result, seconds=time.perf_counter() - began)


def _quiet(text: str) -> None:
    """Say nothing: one process speaks for all."""


def _model(
    checked: Checked,
    resolved: runtime.ResolvedPlan,
    parallel: Parallel,
    model_config: Mapping[str, Any],
    folder: Path,
) -> tuple[PreTrainedModel, Sharded | None]:
    """Return the model with its weights, and what a step asks of it where it is cut over processes."""
    architecture = checked.architecture
    model = build_meta(
        architecture,
        model_config,
        dtype=resolved.dtype,
        attention=resolved.attention,
        attention_kernel=resolved.attention_kernel,
        mixer_kernels=resolved.mixer_kernels,
        experts=parallel.experts(resolved),
        fp32_router=checked.config.fp32_router,
    )
    checked.registry.plugins.call("halo_model_ready", family=architecture.family, plan=checked.plan, model=model)
    sharded = parallel.cut(model, architecture, checked.config)
    with process_group.together():
        load_weights(model, folder, architecture, device=resolved.device)
    if checked.config.gradient_checkpointing:
        enable_recompute(model, routes=architecture.spec.is_moe)
    return model, sharded


def _checked_once(model: PreTrainedModel) -> Callable[[Any, Any], Any]:
    """Return the forward to the last hidden states; its first call checks that every attached socket was used."""
    unchecked: Iterator[bool] = iter((True,))

    def forward(of: Any, batch: Any) -> Any:
        hidden = last_hidden(of, batch)
        if next(unchecked, False):
            if hasattr(model, sockets.ATTACHED):
                sockets.check_called(model)
            if socket.of(model) is not None:
                socket.check_called(model)
        return hidden

    return forward


def _after_step(
    checked: Checked, balancing: BiasUpdate | None, on_step: Callable[[StepReport], None] | None
) -> Callable[[StepReport], None]:
    """Return what follows each optimizer step, before anything is evaluated or saved."""

    def heard(report: StepReport) -> None:
        if balancing is not None:
            balancing.step()
        checked.registry.plugins.call("halo_step_ended", family=checked.plan.family, plan=checked.plan, step=report)
        if on_step is not None:
            on_step(report)

    return heard
