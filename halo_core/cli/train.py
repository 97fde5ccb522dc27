"""`halo train`: from words on the command line to a plan, a dry-run, or a run of one or several processes.

Not for training: `halo_core.trainer` does that, the Python API calls it as well.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from halo_core import config as configuration
from halo_core import plan as planning
from halo_core import process_group
from halo_core.cli import endings, launch
from halo_core.cli.main import explain, load_registry
from halo_core.errors import Problem, Refused
from halo_core.plan import Checked
from halo_core.ranks import Ranks, ranks_from
from halo_core.trainer import preflight

AGREED_VERSIONS = ("halo-moe", "torch", "transformers", "safetensors", "datasets", "tokenizers", "numpy")
"""Distributions whose versions every process of a run must share."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `halo train`, as typed; None and 1 are what was left out."""

    family: str | None = None
    nproc: int = 1
    nodes: int | None = None
    node_rank: int | None = None
    endpoint: str | None = None
    plugin_files: tuple[Path, ...] = ()
    dry_run: bool = False
    parameters: bool = False


def run(words: tuple[str, ...], options: Options) -> None:
    """Check the run, then print its plan (`dry_run`), do it, or start the processes that do it together.

    A process that a launcher or SLURM has started joins the others instead.

    Raises:
        Refused: with every problem of the command line, the file and the plan.
        JobEnded: the processes started here have ended; what they had to say was said.
    """
    ranks = Ranks() if options.nodes is not None else ranks_from(os.environ)
    if ranks.world > 1:
        wrong = launch.join_problems(options.nproc, ranks)
        take_part(ranks, lambda: check(words, options, ranks.world, wrong), lambda checked: act(checked, options))
    job = launch.Job(nproc=options.nproc, nodes=options.nodes or 1, node_rank=options.node_rank or 0,
                     endpoint=options.endpoint or "")
    problems = launch.job_problems(options.nproc, options.nodes, options.node_rank, options.endpoint)
    # A wrong number of machines is told once; the plan is then checked for one.
    checked = check(words, options, job.nproc if problems else job.world, problems)
    if job.world > 1 and not options.dry_run:
        command = launch.command(worker_words(words, options))
        raise endings.JobEnded(launch.launch(command, job, save_timeout=checked.config.save_timeout))
    act(checked, options)


def act(checked: Checked, options: Options) -> None:
    """Print the plan, or train, in this process and those that it has joined."""
    if options.dry_run:
        from halo_core.cli.plan_table import print_parameters, print_plan

        print_plan(checked)
        if options.parameters:
            print_parameters(checked)
        return
    from halo_core.trainer.run import train

    train(checked)


def take_part(ranks: Ranks, check: Callable[[], Checked], act: Callable[[Checked], None]) -> NoReturn:
    """Do a run as one of several processes, and end this process; after a failure with a word for people.

    check: makes the checked plan; what it refuses on any process is refused on all. act: does the run.
    """
    endings.enter(ranks.rank)
    try:
        checked: Checked | None = None
        problems: Sequence[Problem] = ()
        try:
            checked = check()
        except Refused as refusal:
            problems = refusal.problems
        timeout = process_group.TIMEOUT if checked is None else checked.config.save_timeout
        with process_group.joined(ranks, timeout=timeout):
            process_group.collect_problems(problems)
            assert checked is not None
            agree(checked)
            act(checked)
    except BaseException as fault:
        endings.end(fault, ranks.rank, explain)
    endings.end_well()


def agree(checked: Checked) -> None:
    """Check that every process makes the same plan from the same configuration, plugins and versions.

    Raises:
        Refused: on every process, with each difference.
    """
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in AGREED_VERSIONS}
    made_from = {"configuration": vars(checked.config), "plugins": dict(checked.plan.plugins), "versions": versions}
    process_group.agree("this run", made_from, remedy="start every process from the same files and environment")
    process_group.agree("the plan", checked.plan.digest(), remedy="give every process the same files of the model")


def check(words: tuple[str, ...], options: Options, world: int, problems: Sequence[Problem]) -> Checked:
    """Return the checked plan for `world` processes.

    Raises:
        Refused: with every problem of the command line (`problems` among them), the file and the plan.
    """
    file, overrides, wrong_words = split(words)
    registry = load_registry(options.plugin_files)
    read = configuration.read(file, overrides, more_words=registry.words())
    read = replace(read, problems=(*problems, *wrong_words, *read.problems))
    also = preflight.problems(read.config, registry)
    return planning.build(read, registry, nproc=world, family=options.family, dry_run=options.dry_run, also=also)


def worker_words(words: tuple[str, ...], options: Options) -> tuple[str, ...]:
    """Return the command line of one process: the same, without what only its launcher needs."""
    plugins = [word for file in options.plugin_files for word in ("--plugin", str(file))]
    family = ["--family", options.family] if options.family is not None else []
    return ("train", *family, *plugins, *words)


def split(words: tuple[str, ...]) -> tuple[Path | None, tuple[str, ...], tuple[Problem, ...]]:
    """Return (CONFIG, overrides, problems) from the words that are no option of `halo train`, in any order.

    The problems are settings without a value, which need not hide what else is wrong.

    Raises:
        Refused: two files, or a file that does not exist; without the file nothing else can be said.
    """
    problems: list[Problem] = []
    files: list[str] = []
    overrides: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if os.path.isfile(word):  # noqa: PTH113  Path.is_file raises where a word is too long for a file's name
            files.append(word)
        elif "=" in word:
            overrides.append(word)
        elif word.startswith("-"):
            value = left.pop(0) if left and _reads_as_value(left[0]) else None
            problems.append(_without_value(word, value))
        else:
            files.append(word)
    wrong = [problem for name in files if (problem := _file_problem(name)) is not None]
    if len(files) > 1 and not wrong:
        wrong = [_problem("CONFIG", " ".join(files), "a run has one file", "keep one; settings are written key=value")]
    if wrong:
        raise Refused([*problems, *wrong])
    return (Path(files[0]) if files else None), tuple(overrides), tuple(problems)


def _reads_as_value(word: str) -> bool:
    """Return whether a word after a setting without `=` can only be meant as its value."""
    is_config = Path(word).suffix in (".yaml", ".yml") and Path(word).is_file()
    return not (word.startswith("--") or "=" in word or is_config)


def _without_value(word: str, value: str | None) -> Problem:
    remedy = f"--{word.lstrip('-')}={'VALUE' if value is None else value}"
    return _problem(word, value or "", "a setting needs its value in the same word", remedy)


def _file_problem(name: str) -> Problem | None:
    if Path(name).is_dir():
        return _problem("CONFIG", name, "it is a folder", "give a .yaml file")
    if not Path(name).is_file():
        remedy = "give the path of a .yaml file; a setting is written key=value"
        return _problem("CONFIG", name, "there is no such file", remedy)
    return None


def _problem(key: str, value: str, why: str, remedy: str) -> Problem:
    return Problem(key=key, value=value, where="command line", why=why, remedy=remedy)
