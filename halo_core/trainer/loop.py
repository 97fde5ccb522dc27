"""The training loop: steps, and after each step reports, evaluation, saving and interrupts.

Not for building anything: model, data, method, optimizer and schedule arrive as arguments, and no method has a
special case here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from halo_core import process_group
from halo_core.checkpoint import agreement, atomic, randomness, resume, rotation
from halo_core.checkpoint.find import Checkpoint
from halo_core.checkpoint.find_together import find_together
from halo_core.checkpoint.identity import Identity
from halo_core.checkpoint.save import capture
from halo_core.checkpoint.saver import Saver
from halo_core.data.order import StepOrder, evaluation_batches
from halo_core.errors import Problem, Refused
from halo_core.methods.method import Method
from halo_core.optim.schedule import Schedule
from halo_core.sharding.sharded import Sharded
from halo_core.trainer import best as best_so_far
from halo_core.trainer import metrics
from halo_core.trainer.best import Best
from halo_core.trainer.evaluate import evaluate
from halo_core.trainer.interrupts import Interrupts
from halo_core.trainer.moved import MovedCheck
from halo_core.trainer.policy import best_metric, build_policy, tracks_best
from halo_core.trainer.report import EvaluationReport, Reporter, RunStart, StepReport
from halo_core.trainer.run_folder import RunFolder
from halo_core.trainer.step import ModelHidden, TokenHead, run_step
from halo_core.trainer.stopped import Interrupted, StepFault, TrainingStopped

if TYPE_CHECKING:
    from halo_core.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """How a run ended: its last step and reports, and its best and newest checkpoint, where there are any."""

    step: int
    last: StepReport | None
    evaluation: EvaluationReport | None
    best: Best | None
    checkpoint: Path | None


def fit(
    *,
    model: nn.Module,
    model_hidden: ModelHidden,
    head: TokenHead,
    method: Method,
    rows: Sequence[Any],
    evaluation: Sequence[Any] | None,
    order: StepOrder,
    pad_id: int,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    total_steps: int,
    config: RunConfig,
    folder: RunFolder,
    identity: Identity,
    device: torch.device,
    interrupts: Interrupts,
    reporters: Sequence[Reporter] = (),
    on_step: Callable[[StepReport], None] | None = None,
    checkpoint: Checkpoint | None = None,
    sharded: Sharded | None = None,
    data_rank: int = 0,
) -> FitResult:
    """Train `model` in place from `checkpoint` (or from its weights as they are) up to `total_steps`.

    model_hidden: (model, batch) -> last hidden states [B, S, H]. head: (hidden [T, H], targets [T]) -> log-probability
    [T] fp32, 0 where ignored. rows, evaluation: what the method collates. order: which rows each step takes.
    reporters: listeners beside metrics.jsonl. on_step: called after each optimizer step. checkpoint: already checked
    against `identity`. sharded: the model cut over processes, which all call this together; data_rank: which share of
    the rows is this process's. At the end the model holds the last weights, or the best with `load_best_model_at_end`.

    Raises:
        Refused: the checkpoint does not fit the model or the optimizer, or lies beyond the last step.
        TrainingStopped: the run cannot go on; earlier checkpoints are untouched.
        Interrupted: a signal came; a checkpoint was saved.
    """
    run = _Run(model=model, model_hidden=model_hidden, head=head, method=method, evaluation=evaluation, pad_id=pad_id,
               optimizer=optimizer, config=config, folder=folder, identity=identity, device=device,
               interrupts=interrupts, sharded=sharded, data_ranks=order.data_ranks, data_rank=data_rank,
               saver=Saver(beside=config.save_async, timeout=config.save_timeout))
    policy = build_policy(config, total=total_steps, steps_per_epoch=order.steps_per_epoch)
    start = 0 if checkpoint is None else checkpoint.step
    if start > total_steps:
        raise Refused(Problem(key="max_steps", value=total_steps, why=f"the checkpoint is already at step {start}",
                              remedy="raise max_steps or num_train_epochs, or resume from an earlier checkpoint"))
    model.train()
    notes = run.begin(checkpoint)
    moved = MovedCheck(dict(model.named_parameters()))
    run.listeners = tuple(reporters)
    if process_group.rank() == 0:
        run.metrics_file = metrics.MetricsFile(folder.metrics)
        run.listeners = (run.metrics_file, *reporters)
    beginning = RunStart(step=start, total_steps=total_steps, steps_per_epoch=order.steps_per_epoch)
    with interrupts, run.reporting(beginning), run.saver:
        for text in notes:
            run.note(text)
        if checkpoint is not None and policy.due(start).evaluate and run.evaluated_step != start:
            run.evaluate_now(start, order.epoch_of(start))
            if run.is_best(start):
                run.take_best(start, checkpoint.path)
        for step in range(start + 1, total_steps + 1):
            began = time.perf_counter()
            rate = schedule.apply(optimizer, step)
            parts = order.micro_batches(step, data_rank)
            batches = [method.collate([rows[index] for index in part], pad_id) for part in parts]
            with run.faults_at(step):
                outcome = run_step(model=model, model_hidden=model_hidden, head=head, method=method, batches=batches,
                                   optimizer=optimizer, max_grad_norm=config.max_grad_norm, device=device,
                                   sharded=sharded, sums_in_fp32=config.grad_accumulation_dtype == "float32")
            report = StepReport(step=step, epoch=order.epoch_of(step), learning_rate=rate,
                                seconds=time.perf_counter() - began, **vars(outcome))
            run.last = report
            for listener in run.listeners:
                listener.stepped(report)
            if on_step is not None:
                on_step(report)
            with run.faults_at(step):
                moved.after_step(rate, outcome.grad_norm)
            due = policy.due(step)
            if due.evaluate and not run.is_interrupted():
                run.evaluate_now(step, report.epoch)
            if run.saver.is_going and process_group.any_rank(run.saver.has_ended()):
                run.take_save(step)
            # Read once: a signal that comes while saving is seen after the next step.
            signal_name = run.signal_name()
            is_best = run.is_best(step)
            if due.save or signal_name is not None or (is_best and str(config.save_strategy) == "best"):
                if run.metrics_file is not None:
                    run.metrics_file.sync()
                run.save_now(step, report.epoch, is_best)
            if signal_name is not None:
                run.take_save(step)
                assert run.newest is not None
                raise Interrupted(signal_name=signal_name, step=step, checkpoint=run.newest)
        run.take_save(total_steps)
        if config.load_best_model_at_end and run.best is not None and run.best.step != total_steps:
            run.note(f"the best checkpoint is {run.best.checkpoint} (step {run.best.step}): its weights are taken")
            found = find_together(run.best.checkpoint, folder.path)
            assert found is not None
            resume.load_weights(found, model)
    return FitResult(step=total_steps, last=run.last, evaluation=run.last_evaluation, best=run.best,
                     checkpoint=run.newest)


@dataclass(kw_only=True)
class _Run:
    """What the loop carries from step to step, and the acts it repeats."""

    model: nn.Module
    model_hidden: ModelHidden
    head: TokenHead
    method: Method
    evaluation: Sequence[Any] | None
    pad_id: int
    optimizer: torch.optim.Optimizer
    config: RunConfig
    folder: RunFolder
    identity: Identity
    device: torch.device
    interrupts: Interrupts
    sharded: Sharded | None
    data_ranks: int
    data_rank: int
    saver: Saver
    metrics_file: metrics.MetricsFile | None = None
    listeners: tuple[Reporter, ...] = ()
    last: StepReport | None = None
    last_evaluation: EvaluationReport | None = None
    evaluated_step: int | None = None
    best: Best | None = None
    newest: Path | None = None
    told_memory: bool = False

    def begin(self, checkpoint: Checkpoint | None) -> list[str]:
        """Take over a checkpoint, or seed a new run; return what a person should know."""
        randomness.seed_all(self.config.seed)  # in a resumed run for devices that the checkpoint knows nothing of
        writes_metrics = process_group.rank() == 0
        if checkpoint is None:
            if writes_metrics:  # rows of a run that ended before its first checkpoint
                self.folder.metrics.unlink(missing_ok=True)
            return []
        resume.load_weights(checkpoint, self.model)
        warm = resume.load_optimizer(checkpoint, self.model, self.optimizer, warm=self.config.allow_warm_restart)
        source = checkpoint.path.parent
        moved = agreement.once_per_folder(
            self.folder.path, lambda: atomic.set_aside(self.folder.path, after=checkpoint.step))
        self.evaluated_step = checkpoint.progress["evaluated_step"]
        if writes_metrics:
            metrics.carry_over(source / metrics.FILE_NAME, self.folder.metrics, checkpoint.step,
                               evaluated=self.evaluated_step == checkpoint.step)
        record = checkpoint.progress["best"]
        self.best = best_so_far.recalled(record, (self.folder.path, source))
        if process_group.any_rank(self.best is None):  # machines may see different folders
            self.best = None
        self.newest = checkpoint.path
        self._rotate(checkpoint.path)  # a run killed between a save and its rotation left one too many
        away = resume.load_random(checkpoint)
        notes = [*checkpoint.skipped, *warm, *away, f"going on from {checkpoint.path} after step {checkpoint.step}"]
        notes += [f"a later checkpoint was set aside as {path.name}" for path in moved]
        if record is not None and self.best is None:
            notes.append(f"the best checkpoint so far, of step {record['step']}, is gone: the search begins anew")
        return notes

    @contextmanager
    def reporting(self, start: RunStart) -> Iterator[None]:
        """Open and close every listener, also when the run ends by an exception."""
        for listener in self.listeners:
            listener.started(start)
        try:
            yield
        finally:
            for listener in self.listeners:
                listener.ended()

    @contextmanager
    def faults_at(self, step: int) -> Iterator[None]:
        """Turn a fault inside a step or a save into the end of the run, told with the last good checkpoint."""
        try:
            yield
        except (StepFault, atomic.SaveFailed) as fault:
            with suppress(atomic.SaveFailed):  # of a save that goes on beside training: the first fault is told
                self.newest = self.saver.taken() or self.newest
            raise TrainingStopped(step=step, what=fault.what, remedy=fault.remedy, checkpoint=self.newest) from fault

    def note(self, text: str) -> None:
        """Tell every listener."""
        for listener in self.listeners:
            listener.noted(text)

    def evaluate_now(self, step: int, epoch: float) -> None:
        """Evaluate and report, unless a signal comes meanwhile: the resumed run makes up for it then."""
        assert self.evaluation is not None, "policy.check refuses an evaluation without rows"
        with self.faults_at(step):
            report = evaluate(model=self.model, model_hidden=self.model_hidden, head=self.head, method=self.method,
                              rows=self.evaluation, batches=self._evaluation_batches(), sharded=self.sharded,
                              pad_id=self.pad_id, device=self.device, step=step, epoch=epoch,
                              abandoned=self.is_interrupted)
        if report is None:
            return
        self.last_evaluation = report
        self.evaluated_step = step
        for listener in self.listeners:
            listener.evaluated(report)

    def _evaluation_batches(self) -> list[list[int]]:
        assert self.evaluation is not None
        size = self.config.per_device_eval_batch_size
        return evaluation_batches(len(self.evaluation), size, self.data_ranks, self.data_rank)

    def is_interrupted(self) -> bool:
        """Return whether a signal came to any process; a collective."""
        return process_group.any_rank(self.interrupts.requested is not None)

    def signal_name(self) -> str | None:
        """Return the signal that came to any process, the same name on all of them; a collective."""
        names = agreement.gathered(self.interrupts.requested) if self.is_interrupted() else []
        return next((name for name in names if name is not None), None)

    def is_best(self, step: int) -> bool:
        """Return whether step `step` was evaluated and beats the best so far; never when no best is asked for."""
        if self.evaluated_step != step or self.last_evaluation is None or not tracks_best(self.config):
            return False
        return best_so_far.is_better(self._value(), self.best, best_metric(self.config)[1])

    def take_best(self, step: int, path: Path) -> None:
        """Remember the checkpoint of the last evaluation as the best."""
        self.best = Best(step=step, value=self._value(), checkpoint=path)

    def save_now(self, step: int, epoch: float, is_best: bool) -> None:
        """Save, or begin to where `save_async` asks for it; checkpoints that are no longer kept are deleted after it.

        The save before is waited for.
        """
        self.take_save(step)
        path = self.folder.path / f"checkpoint-{step}"
        if is_best:
            self.take_best(step, path)
        progress = {"best": best_so_far.recorded(self.best), "evaluated_step": self.evaluated_step, "epoch": epoch}
        with self.faults_at(step):
            captured = capture(self.folder.path, step=step, model=self.model, optimizer=self.optimizer,
                               progress=progress, identity=self.identity)
            if self.saver.beside and not self.told_memory:
                self.told_memory = True
                self.note(f"save_async keeps {captured.num_bytes / 2**30:.3f} GiB in host memory for each process's "
                          "part of a checkpoint")
            self.saver.begin(captured, self._rotate)
        if not self.saver.beside:
            self.take_save(step)

    def take_save(self, step: int) -> None:
        """Wait for a save that was begun; its checkpoint is then the newest.

        Raises:
            TrainingStopped: on every process: it failed.
        """
        with self.faults_at(step):
            self.newest = self.saver.taken() or self.newest

    def _rotate(self, newest: Path, group: Any = None) -> None:
        """Delete checkpoints beyond `save_total_limit`; the newest and the best stay. A collective of `group`."""
        kept = [newest, *([] if self.best is None else [self.best.checkpoint])]
        limit = self.config.save_total_limit
        agreement.once_per_folder(self.folder.path,
                                  lambda: rotation.rotate(self.folder.path, limit=limit, keep=kept), group)

    def _value(self) -> float:
        assert self.last_evaluation is not None
        return self.last_evaluation.row()[best_metric(self.config)[0]]
