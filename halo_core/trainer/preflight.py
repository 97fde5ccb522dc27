"""What a run's settings need that no model is needed to tell: trackers, evaluations for the best, a free output_dir.

Not for features and sizes (`plan.py`). No torch here: these problems stand in the same report as the plan's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from halo_core import process_group
from halo_core.checkpoint.find import Checkpoint
from halo_core.checkpoint.find_together import find_together
from halo_core.config import RunConfig
from halo_core.errors import Problem, Refused
from halo_core.ranks import ranks_from
from halo_core.registry import Registry
from halo_core.trainer import policy, run_folder, trackers


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins: its folder, and the checkpoint it goes on from, if any."""

    folder: Path
    checkpoint: Checkpoint | None


def problems(config: RunConfig, registry: Registry) -> tuple[Problem, ...]:
    """Return everything that stands in the way, without touching a file.

    One process among several leaves out where the run begins: `start` settles that with the others.
    """
    found = [*policy.check(config), *trackers.check(config.report_to, tracker_targets(registry))]
    if ranks_from(os.environ).world == 1:
        try:
            start(config)
        except Refused as refusal:
            found += refusal.problems
    return tuple(found)


def start(config: RunConfig) -> Start:
    """Return where the run begins; codes such as `%Y` in output_dir stand for the time of this call. A collective.

    Raises:
        Refused: on every process: the checkpoint asked for cannot be used, or output_dir holds another run.
    """
    folder = run_folder.expand(str(config.output_dir), process_group.from_rank_0(datetime.now()))
    checkpoint = find_together(config.resume_from_checkpoint, folder, warm=config.allow_warm_restart)
    process_group.collect_problems(run_folder.problems(folder, resumed_from=checkpoint.path if checkpoint else None))
    return Start(folder=folder, checkpoint=checkpoint)


def tracker_targets(registry: Registry) -> dict[str, str]:
    """Return name -> "module:attribute" of the trackers that plugins bring."""
    return {name: spec.target for (kind, name), (spec, _) in registry.backends.items() if kind == "tracker"}
