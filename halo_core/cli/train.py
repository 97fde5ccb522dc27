"""`halo train`: from words on the command line to a plan, a dry-run, or a run.

Not for training: `halo_core.trainer` does that, the Python API calls it as well.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from halo_core import config as configuration
from halo_core import plan as planning
from halo_core.cli.main import load_registry
from halo_core.errors import Problem, Refused
from halo_core.trainer import preflight


def run(
    words: tuple[str, ...], *, family: str | None, nproc: int, plugin_files: tuple[Path, ...], dry_run: bool
) -> None:
    """Check the run, then print its plan (`dry_run`) or do it.

    Raises:
        Refused: with every problem of the command line, the file and the plan.
    """
    file, overrides, problems = split(words)
    registry = load_registry(plugin_files)
    read = configuration.read(file, overrides, more_words=registry.words())
    read = replace(read, problems=(*problems, *read.problems))
    also = preflight.problems(read.config, registry)
    checked = planning.build(read, registry, nproc=nproc, family=family, dry_run=dry_run, also=also)
    if dry_run:
        from halo_core.cli.plan_table import print_plan

        print_plan(checked)
        return
    from halo_core.trainer.run import train

    train(checked)


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
