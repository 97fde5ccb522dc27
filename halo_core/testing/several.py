"""A whole run by several processes beside the same run by one: data, plan, training, export.

Not for single collectives or for what one process computes. Each rank is a forked process on gloo.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from halo_core import config as configuration
from halo_core import plan
from halo_core.registry import Registry
from halo_core.testing import ranks
from halo_core.testing.cases import Case
from halo_core.trainer.run import train

WINDOW = 8
"""Rows of one optimizer step, over all processes and micro-batches."""
STEPS = 4
WORDS = ("stone", "river", "a long way from here", "one", "seven hills and a cloud", "no", "green", "to the sea")
ROWS = tuple(
    {"messages": [{"role": "user", "content": f"say {word} {number % 5}"}, {"role": "assistant", "content": word}]}
    for number, word in enumerate(WORDS * 4)
)
"""Rows of unequal length, so that a mean of means is not the mean."""


def trained(
    registry: Registry,
    case: Case,
    keys: Mapping[str, Any],
    world: int,
    folder: Path,
    rows: Sequence[Mapping[str, Any]] = ROWS,
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return the metrics rows and the exported tensors of a run by `world` processes on the case's model.

    Half of each step's rows come in a second micro-batch. folder: a new one.
    """
    given = {
        "model_name_or_path": str(case.folder), "dataset_name": "rows given in Python", "output_dir": str(folder),
        "max_steps": STEPS, "optim": "sgd", "learning_rate": float(case.reference["learning_rate"]),
        "lr_scheduler_type": "constant", "per_device_train_batch_size": WINDOW // 2 // world,
        "gradient_accumulation_steps": 2, "save_strategy": "no", "attn_implementation": "eager", **keys,
    }
    checked = plan.build(configuration.read(None, given=given), registry, nproc=world)
    ranks.run(world, lambda: train(checked, rows=rows, say=lambda text: None) and None)
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return log, load_file(folder / "model.safetensors")
