"""`halo bench`: from words on the command line to a measurement of the training step, printed and kept as a receipt.

Not for measuring: `halo_core.bench` does that. What runs is planned and refused as a run of `halo train` would be.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from halo_core import config as configuration
from halo_core import plan as planning
from halo_core import process_group
from halo_core.bench import shape
from halo_core.cli import endings, launch
from halo_core.cli.main import load_registry
from halo_core.cli.train import split, take_part
from halo_core.errors import Problem, Refused
from halo_core.plan import Checked
from halo_core.ranks import ranks_from

ROWS = "random tokens"
"""What stands where a run names its data."""
ROWS_OF_MANY_LENGTHS = 32
"""How many are timed unless told otherwise."""
NOTHING_TO_READ = ("quantised_source",)
"""Features about weights of a source, which a measurement has none of."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `halo bench`, as typed; None is what was left out. seq, mean_length: tokens. batch, rows: rows."""

    model: str | None = None
    family: str | None = None
    layers: int | None = None
    seq: int | None = None
    batch: int | None = None
    mean_length: int | None = None
    rows: int | None = None
    steps: int = 5
    warmup: int = 3
    nproc: int = 1
    out: Path | None = None
    plugin_files: tuple[Path, ...] = ()


def run(words: tuple[str, ...], options: Options) -> None:
    """Measure in this process, or start the processes that do it together. One that a launcher started joins them.

    Raises:
        Refused: with every problem of the command line, the file and the plan.
        JobEnded: the processes started here have ended; what they had to say was said.
    """
    ranks = ranks_from(os.environ)
    if ranks.world > 1:
        wrong = launch.join_problems(options.nproc, ranks)
        take_part(ranks, lambda: check(words, options, ranks.world, wrong), lambda checked: measure(checked, options))
    checked = check(words, options, options.nproc, launch.job_problems(options.nproc, None, None, None))
    if options.nproc == 1:
        measure(checked, options)
        return
    job = launch.Job(nproc=options.nproc)
    command = launch.command(worker_words(words, options))
    raise endings.JobEnded(launch.launch(command, job, save_timeout=checked.config.save_timeout))


def check(words: tuple[str, ...], options: Options, world: int, problems: Sequence[Problem] = ()) -> Checked:
    """Return the checked plan for `world` processes, its config.json cut to the layers asked for.

    Raises:
        Refused: with every problem of the command line (`problems` among them), the file and the plan.
    """
    checked = planned(words, options, world, problems)
    missing = [row for row in checked.plan.not_built if row.feature not in NOTHING_TO_READ]
    if missing:
        raise Refused(
            Problem(key=row.key or row.feature, value=row.value, why=row.reason, by=row.by, kind="not built",
                    remedy=row.instead or "leave it out")
            for row in missing
        )
    return checked


def planned(words: tuple[str, ...], options: Options, world: int, problems: Sequence[Problem] = ()) -> Checked:
    """Return the same, with what this version has no mechanism for."""
    file, overrides, wrong_words = split(words)
    registry = load_registry(options.plugin_files)
    read = configuration.read(file, (*overrides, *given(options)), more_words=registry.words())
    config = replace(read.config, dataset_name=ROWS, datasets=None, eval_dataset=None, eval_strategy="no")
    wrong = [*problems, *wrong_words, *own_problems(options, config.max_length)]
    read = replace(read, config=config, problems=(*wrong, *read.problems))
    # As a dry-run: a configuration that a plugin bundles is enough.
    checked = planning.build(read, registry, nproc=world, family=options.family, dry_run=True)
    return replace(checked, model_config=shape.cut(checked.model_config, checked.architecture, options.layers))


def given(options: Options) -> tuple[str, ...]:
    """Return the options that are keys of a run, as overrides."""
    model = options.model
    if model is not None and Path(model).name == "config.json":
        model = str(Path(model).parent)
    keys = {
        "model_name_or_path": model, "max_length": options.seq, "per_device_train_batch_size": options.batch,
    }  # fmt: skip
    return tuple(f"{key}={value}" for key, value in keys.items() if value is not None)


def own_problems(options: Options, length: int | None) -> list[Problem]:
    """Return what is wrong with the options that no run has."""
    problems = []
    if length is None:
        problems.append(Problem(key="max_length", value=None, why="every row of a measurement has this length",
                                remedy="--seq 4096"))
    mean = options.mean_length
    if mean is not None and length is not None and not 1 <= mean <= length:
        problems.append(Problem(key="--mean-length", value=mean, why=f"no row is longer than {length} tokens",
                                remedy=f"--mean-length {max(1, length // 4)}, or a larger --seq"))
    if options.rows is not None and mean is None:
        problems.append(Problem(key="--rows", value=options.rows, why="it counts rows of many lengths",
                                remedy="add --mean-length, or give --steps instead"))
    if options.out is not None and not options.out.parent.is_dir():
        problems.append(Problem(key="--out", value=options.out, why=f"there is no folder {options.out.parent}",
                                remedy="make it first, or name a file elsewhere"))
    return problems


def worker_words(words: tuple[str, ...], options: Options) -> tuple[str, ...]:
    """Return the command line of one process: the same, without what only its launcher needs."""
    named = {
        "--model": options.model, "--family": options.family, "--layers": options.layers, "--seq": options.seq,
        "--batch": options.batch, "--mean-length": options.mean_length, "--rows": options.rows,
        "--steps": options.steps, "--warmup": options.warmup, "--out": options.out,
    }  # fmt: skip
    typed = [word for name, value in named.items() if value is not None for word in (name, str(value))]
    plugins = [word for file in options.plugin_files for word in ("--plugin", str(file))]
    return ("bench", *typed, *plugins, *words)


def measure(checked: Checked, options: Options) -> None:
    """Measure, print the result, and write the receipt where the first process is asked to."""
    from transformers.utils import logging as transformers_logging

    from halo_core import runtime
    from halo_core.bench import receipt
    from halo_core.bench.measure import complete, measure

    transformers_logging.set_verbosity_error()
    for note in checked.plan.notes:
        print(f"note: {note}")
    checked = complete(checked)
    resolved = runtime.resolve(checked)
    for note in resolved.notes:
        print(f"note: {note}")
    measured = measure(
        checked, resolved, steps=options.steps, warmup=options.warmup, mean_length=options.mean_length,
        rows=ROWS_OF_MANY_LENGTHS if options.rows is None else options.rows,
    )  # fmt: skip
    made = receipt.build(checked, resolved, measured, warmup=options.warmup, mean_length=options.mean_length)
    print(receipt.text(made))
    if options.out is not None and process_group.rank() == 0:
        receipt.write(made, options.out)
        print(f"receipt: {options.out}")
