"""Halo's core: post-training of mixture-of-experts models whose families are plugins of facts.

The Python API beside the command line: `train`, `check`, `matrix`. Importing this package imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halo_core.plan import Checked
    from halo_core.registry import Registry
    from halo_core.trainer.run import RunResult

__all__ = ["check", "matrix", "train"]


def check(
    config: str | Path | Mapping[str, Any],
    *,
    family: str | None = None,
    nproc: int = 1,
    dry_run: bool = True,
    registry: Registry | None = None,
) -> Checked:
    """Return the plan of a run with what it was made from; nothing is loaded or started.

    config: a YAML file, or a mapping of the same keys. dry_run: mechanisms that are not built yet become rows of
    `plan.not_built`; with False they refuse, as they do when the run is started.

    Raises:
        halo_core.errors.Refused: with every problem found.
    """
    from halo_core import config as configuration
    from halo_core import plan as planning
    from halo_core import registry as facts
    from halo_core.trainer import preflight

    registry = registry or facts.load()
    if isinstance(config, Mapping):
        read = configuration.read(None, given=config, more_words=registry.words())
    else:
        read = configuration.read(Path(config), more_words=registry.words())
    also = preflight.problems(read.config, registry)
    return planning.build(read, registry, nproc=nproc, family=family, dry_run=dry_run, also=also)


def train(
    config: str | Path | Mapping[str, Any],
    rows: Iterable[Mapping[str, Any]] | None = None,
    on_step: Callable[[Any], None] | None = None,
    *,
    family: str | None = None,
) -> RunResult:
    """Train in this process and return where the result lies and how it went.

    config: as for `check`. rows: training rows (`messages`, `prompt` + `completion`, or `text`) instead of
    `dataset_name`. on_step: called after each optimizer step with the frozen StepReport.

    Raises:
        halo_core.errors.Refused: before any weight is read, with every problem found.
    """
    given = None if rows is None else list(rows)
    if given is not None and isinstance(config, Mapping) and not config.get("dataset_name"):
        config = {**config, "dataset_name": "rows given in Python"}
    checked = check(config, family=family, dry_run=False)
    from halo_core.trainer.run import train as run

    return run(checked, rows=given, on_step=on_step)


def matrix() -> list[dict[str, str]]:
    """Return every cell of the support matrix: {family, architecture, feature, verdict, reason, by}."""
    from halo_core import registry as facts
    from halo_core import support

    architectures = facts.load().architectures()
    return [architecture.cell(feature).as_dict() for architecture in architectures for feature in support.FEATURES]
