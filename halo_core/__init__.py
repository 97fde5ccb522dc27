"""Halo's core: post-training of mixture-of-experts models whose families are plugins of facts.

The Python API beside the command line: `train`, `check`, `matrix`. Importing this package imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halo_core.plan import Checked
    from halo_core.registry import Registry
    from halo_core.trainer.run import RunResult

__all__ = ["check", "matrix", "train"]

ROWS_IN_PYTHON = "rows given in Python"
"""Stands as dataset_name in the records of a run whose rows came from Python."""


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
    return _check(config, family=family, nproc=nproc, dry_run=dry_run, registry=registry)


def train(
    config: str | Path | Mapping[str, Any],
    rows: Iterable[Mapping[str, Any]] | None = None,
    on_step: Callable[[Any], None] | None = None,
    *,
    family: str | None = None,
) -> RunResult:
    """Train in this process and return where the result lies and how it went.

    config: as for `check`. rows: training rows (`messages`, `prompt` + `completion`, or `text`) instead of
    `dataset_name` and `datasets`, which are not read then. on_step: called after each optimizer step with the frozen
    StepReport.

    Raises:
        halo_core.errors.Refused: before any weight is read, with every problem found.
    """
    given = None if rows is None else _listed(rows)
    checked = _check(config, family=family, nproc=1, dry_run=False, with_rows=given is not None)
    from halo_core.trainer.run import train as run

    return run(checked, rows=given, on_step=on_step)


def matrix() -> list[dict[str, str]]:
    """Return every cell of the support matrix: {family, architecture, feature, verdict, reason, by}."""
    from halo_core import registry as facts
    from halo_core import support

    architectures = facts.load().architectures()
    return [architecture.cell(feature).as_dict() for architecture in architectures for feature in support.FEATURES]


def _check(
    config: str | Path | Mapping[str, Any],
    *,
    family: str | None,
    nproc: int,
    dry_run: bool,
    registry: Registry | None = None,
    with_rows: bool = False,
) -> Checked:
    """Return what `check` returns; `with_rows`, rows from Python take the place of the data sets that are named."""
    from halo_core import config as configuration
    from halo_core import plan as planning
    from halo_core import registry as facts
    from halo_core.trainer import preflight

    registry = registry or facts.load()
    file, given = (None, config) if isinstance(config, Mapping) else (Path(config), {})
    read = configuration.read(file, given=given, more_words=registry.words())
    if with_rows:
        unread = [key for key in ("dataset_name", "datasets") if getattr(read.config, key)]
        notes = tuple(f"{key} is not read, because rows are given in Python" for key in unread)
        config_of_rows = replace(read.config, dataset_name=ROWS_IN_PYTHON, datasets=None)
        read = replace(read, config=config_of_rows, notes=(*read.notes, *notes))
    also = preflight.problems(read.config, registry)
    return planning.build(read, registry, nproc=nproc, family=family, dry_run=dry_run, also=also)


def _listed(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows as a list; what yields texts (a path, one row, a table's columns) is no list of rows."""
    from halo_core.errors import Problem, Refused

    listed = list(rows)
    if listed and all(isinstance(row, str) for row in listed):
        why = "it yields texts instead of rows, as a path, a single row, a DataFrame and a DatasetDict do"
        remedy = "give a list of mappings ([row], frame.to_dict('records'), one split), or name a file as dataset_name"
        raise Refused(Problem(key="rows", value=type(rows).__name__, why=why, remedy=remedy))
    return listed
