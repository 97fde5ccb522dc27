"""`halo train`: from words on the command line to a plan, a dry-run, or a run.

Not for training: `halo_core.trainer` does that, the Python API calls it as well.
"""

from __future__ import annotations

from pathlib import Path

from halo_core import config as configuration
from halo_core import plan as planning
from halo_core.cli.main import load_registry
from halo_core.errors import Problem, Refused


def run(
    words: tuple[str, ...], *, family: str | None, nproc: int, plugin_files: tuple[Path, ...], dry_run: bool
) -> None:
    """Check the run, then print its plan (`dry_run`) or do it.

    Raises:
        Refused: with every problem of the command line, the file and the plan.
    """
    file, overrides = split(words)
    read = configuration.read(file, overrides)
    checked = planning.build(read, load_registry(plugin_files), nproc=nproc, family=family, dry_run=dry_run)
    if dry_run:
        from halo_core.cli.plan_table import print_plan

        print_plan(checked)
        return
    from halo_core.trainer.run import train

    train(checked)


def split(words: tuple[str, ...]) -> tuple[Path | None, tuple[str, ...]]:
    """Return (CONFIG, overrides) from the words that are no option of `halo train`, in any order.

    Raises:
        Refused: a flag without a value, two files, or a file that does not exist.
    """
    problems: list[Problem] = []
    files: list[str] = []
    overrides: list[str] = []
    for word in words:
        if Path(word).is_file():
            files.append(word)
        elif "=" in word:
            overrides.append(word)
        elif word.startswith("-"):
            problems.append(
                Problem(
                    key=word,
                    value="",
                    where="command line",
                    why="a setting needs its value in the same word",
                    remedy=f"--{word.lstrip('-')}=VALUE",
                )
            )
        else:
            files.append(word)
    for name in files:
        if Path(name).is_dir():
            problems.append(
                Problem(
                    key="CONFIG", value=name, where="command line", why="it is a folder", remedy="give a .yaml file"
                )
            )
        elif not Path(name).is_file():
            problems.append(
                Problem(
                    key="CONFIG",
                    value=name,
                    where="command line",
                    why="there is no such file",
                    remedy="give the path of a .yaml file; a setting is written key=value",
                )
            )
    if len(files) > 1 and not problems:
        problems.append(
            Problem(
                key="CONFIG",
                value=" ".join(files),
                where="command line",
                why="a run has one file",
                remedy="keep one; settings beside it are written key=value",
            )
        )
    if problems:
        raise Refused(problems)
    return (Path(files[0]) if files else None), tuple(overrides)
