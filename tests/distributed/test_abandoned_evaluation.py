"""An evaluation that a signal breaks off leaves a cut model as it was: the next step is the step without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from halo_core import config as configuration
from halo_core import plan
from halo_core import registry as facts
from halo_core.data.collate import collate
from halo_core.data.rows import Row
from halo_core.methods.sft import Sft
from halo_core.models.build import build_meta
from halo_core.models.hidden import Head, last_hidden
from halo_core.models.load import load_weights
from halo_core.models.tiny import write_tiny
from halo_core.plan import Checked
from halo_core.runtime import resolve
from halo_core.sharding.norm import local
from halo_core.testing import ranks
from halo_core.trainer.evaluate import evaluate
from halo_core.trainer.parallel import build_parallel
from halo_core.trainer.step import run_step

CPU = torch.device("cpu")
ROWS = [Row(row_id=n, input_ids=list(range(3, 12 + n)), supervised=[True] * (9 + n)) for n in range(4)]
SFT = Sft(collate_rows=collate)


def stepped(checked: Checked, folder: Path, breaks_off: bool) -> tuple[float, list[Any]]:
    resolved = resolve(checked)
    parallel = build_parallel(checked.plan.degrees, checked.architecture, checked.model_config, CPU)
    model = build_meta(
        checked.architecture, checked.model_config, dtype=torch.float32, attention="eager",
        experts=parallel.experts(resolved),
    )  # fmt: skip
    sharded = parallel.cut(model, checked.architecture, checked.config)
    load_weights(model, folder, checked.architecture)
    head, calls = Head(model, checked.architecture), iter((False, True))
    if breaks_off:
        report = evaluate(
            model=model, model_hidden=last_hidden, head=head, method=SFT, rows=ROWS, batches=[[0], [1]], pad_id=0,
            device=CPU, step=1, epoch=1.0, abandoned=lambda: next(calls), sharded=sharded,
        )  # fmt: skip
        assert report is None
    outcome = run_step(
        model=model, model_hidden=last_hidden, head=head, method=SFT, batches=[SFT.collate(ROWS, 0)],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0, device=CPU, sharded=sharded,
    )  # fmt: skip
    return outcome.grad_norm, [local(parameter.detach()).clone() for parameter in model.parameters()]


def test_step_after_an_abandoned_evaluation_is_the_step_without_it(tmp_path: Path) -> None:
    registry = facts.load()
    architecture = registry.families["lfm2"].architectures[0]
    write_tiny(architecture, tmp_path / "model")
    given = {"model_name_or_path": str(tmp_path / "model"), "dataset_name": "rows.jsonl",
             "output_dir": str(tmp_path / "run"), "expert_parallel_size": 2}  # fmt: skip
    checked = plan.build(configuration.read(None, given=given), registry, nproc=2)
    plain = ranks.run(2, stepped, checked, tmp_path / "model", False)
    after = ranks.run(2, stepped, checked, tmp_path / "model", True)
    for (norm, weights), (other_norm, other_weights) in zip(plain, after, strict=True):
        assert norm == other_norm > 0
        assert all(torch.equal(one, other) for one, other in zip(weights, other_weights, strict=True))
