"""A small model, small rows and one call that runs the loop over them. Not for families: some tests bring their own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halo_core.checkpoint import find
from halo_core.checkpoint.identity import Identity, data_of, plain
from halo_core.config.keys import RunConfig
from halo_core.data.batch import IGNORED, Batch
from halo_core.data.collate import collate
from halo_core.data.order import StepOrder, total_steps
from halo_core.data.rows import Row
from halo_core.methods.sft import Sft
from halo_core.optim.build import build_optimizer
from halo_core.optim.schedule import build_schedule
from halo_core.trainer import metrics, run_folder
from halo_core.trainer.interrupts import Interrupts
from halo_core.trainer.loop import FitResult, fit

VOCABULARY = 40


class SmallModel(nn.Module):
    """Mixes each token with the one before; has dropout, a norm, a scalar, and a buffer that training moves."""

    def __init__(self, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.mix = nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.lm_head = nn.Linear(16, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed.weight
        self.to(dtype)

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += input_ids.numel()
        now = self.embed(input_ids)
        before = torch.cat([torch.zeros_like(now[:, :1]), now[:, :-1]], dim=1)
        mixed = torch.tanh(self.mix(torch.cat([now, before], dim=-1)))
        return self.norm(self.dropout(mixed)) * self.scale


def model_hidden(model: Any, batch: Batch) -> torch.Tensor:
    return model.hidden(batch.input_ids)


def head_of(model: Any) -> Any:
    def head(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = nn.functional.cross_entropy(model.lm_head(hidden).float(), targets, reduction="none",
                                             ignore_index=IGNORED)
        return -losses

    return head


def small_rows(count: int, seed: int = 0, longest: int = 12) -> list[Row]:
    """Return rows of very unequal length whose next token often follows from the one before."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        length = draw.randint(3, longest)
        first = draw.randrange(VOCABULARY)
        tokens = [(first + 3 * place + draw.choice((0, 0, 0, 1))) % VOCABULARY for place in range(length)]
        supervised = [False, *(draw.random() < 0.7 for _ in range(length - 2)), True]
        rows.append(Row(row_id=number, input_ids=tokens, supervised=supervised))
    return rows


@dataclass
class Ran:
    """What one run left: the model, the optimizer, the result, every report, and the row ids of each step."""

    model: Any
    optimizer: Any
    result: FitResult | None = None
    error: BaseException | None = None
    reports: list[Any] = field(default_factory=list)
    folder: Path = Path()

    @property
    def row_ids(self) -> list[tuple[int, ...]]:
        return [report.row_ids for report in self.reports]

    def metric_rows(self) -> list[dict[str, float]]:
        """Return the rows of metrics.jsonl without the times."""
        rows = metrics.rows(self.folder / metrics.FILE_NAME)
        return [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in rows]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def moments(self) -> dict[str, torch.Tensor]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {f"{names[parameter]}.{kind}": value.clone() for parameter, state in self.optimizer.state.items()
                for kind, value in state.items()}


def settings(**changes: Any) -> RunConfig:
    base = RunConfig(per_device_train_batch_size=2, per_device_eval_batch_size=3, gradient_accumulation_steps=2,
                     learning_rate=0.05, num_train_epochs=3.0, save_strategy="no", seed=1, optim="adamw_torch",
                     gradient_checkpointing=False)
    return replace(base, **changes)


def run_small(
    folder: Path, *, rows: list[Row] | None = None, evaluation: list[Row] | None = None, dropout: float = 0.0,
    dtype: torch.dtype = torch.float32, stop_after: int | None = None, raises: bool = False, on_step: Any = None,
    before: Any = None, reporters: tuple[Any, ...] = (), interrupts: Interrupts | None = None, **changes: Any,
) -> Ran:
    """Run the loop as a command would: find a checkpoint, build, restore, train.

    stop_after: raise SystemExit once that step is reported, as a crash would. before(model): called before training.
    raises: let errors through instead of keeping them in `error`.
    """
    config = settings(**changes)
    rows = small_rows(10) if rows is None else rows
    order = StepOrder(len(rows), config.per_device_train_batch_size, 1, config.gradient_accumulation_steps,
                      config.seed if config.data_seed is None else config.data_seed)
    total = total_steps(order, max_steps=config.max_steps, num_train_epochs=config.num_train_epochs)
    torch.manual_seed(3)
    model = SmallModel(dropout, dtype)
    if before is not None:
        before(model)
    optimizer = build_optimizer(model, config)
    ran = Ran(model=model, optimizer=optimizer, folder=folder)
    identity = Identity(config=plain(vars(config)), plan={"architecture": "small"}, data=data_of(rows), environment={})

    def heard(report: Any) -> None:
        ran.reports.append(report)
        if on_step is not None:
            on_step(report)
        if report.step == stop_after:
            raise SystemExit("stopped by the test")

    try:
        checkpoint = find.find(config.resume_from_checkpoint, folder, warm=config.allow_warm_restart)
        if checkpoint is not None:
            find.check(checkpoint, identity)
        opened = run_folder.open_folder(folder, config=identity.config, plan={}, environment={})
        ran.result = fit(
            model=model, model_hidden=model_hidden, head=head_of(model), method=Sft(collate_rows=collate), rows=rows,
            evaluation=evaluation, order=order, pad_id=0, optimizer=optimizer,
            schedule=build_schedule(config, total), total_steps=total, config=config, folder=opened,
            identity=identity, device=torch.device("cpu"), interrupts=interrupts or Interrupts(),
            reporters=reporters, on_step=heard, checkpoint=checkpoint,
        )
    except BaseException as error:
        ran.error = error
        if raises or (stop_after is None and not isinstance(error, Exception)):
            raise
    return ran


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Return whether two sets of named tensors are the same bits."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Small:
    """The functions above, for tests."""

    model = SmallModel
    rows = staticmethod(small_rows)
    settings = staticmethod(settings)
    run = staticmethod(run_small)
    same = staticmethod(same)
    head_of = staticmethod(head_of)
    model_hidden = staticmethod(model_hidden)
    vocabulary = VOCABULARY


@pytest.fixture
def small() -> Small:
    """Return the small model, rows and run."""
    return Small()
