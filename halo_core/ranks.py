"""This process among all of its run, as its environment tells: a launcher's variables, or SLURM's.

Not for joining the others (`process_group.py`), which needs torch; nothing here does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from halo_core.errors import Problem, Refused


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among all of its run. local_rank, local_world: among those of its machine.

    started_by: what started them, for messages. address, port: where rank 0, or its launcher, listens.
    """

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    local_world: int = 1
    started_by: str = ""
    address: str = ""
    port: int = 0


def ranks_from(environ: Mapping[str, str]) -> Ranks:
    """Return this process's place as its environment tells: a launcher's variables, or those of a SLURM job step.

    Raises:
        Refused: the variables are incomplete or no numbers.
    """
    if "RANK" in environ or environ.get("WORLD_SIZE", "1") != "1":
        return _of_a_launcher(environ)
    # A batch script or a shell is one process, however many tasks the job has.
    if environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _of_slurm(environ)
    return Ranks()


def local_world_from(environ: Mapping[str, str]) -> int:
    """Return how many processes of this run its environment says are on this machine.

    Raises:
        Refused: the variable is no number.
    """
    of_slurm = "RANK" not in environ and "SLURM_STEP_TASKS_PER_NODE" in environ
    return _number(environ, "SLURM_STEP_TASKS_PER_NODE" if of_slurm else "LOCAL_WORLD_SIZE", "1")


def first_host(hosts: str) -> str:
    """Return the first of SLURM's list of hosts: `a[03-05,9]-x,b2` gives a03-x."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\](.*))?", hosts)
    assert found is not None
    before, number, after = found.groups()
    return before if number is None else f"{before}{number}{first_host(after)}"


def spans(ranks: Sequence[int]) -> str:
    """Return sorted ranks as words: `rank 3`, `ranks 0-2, 5`."""
    groups = [list(group) for _, group in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    parts = [f"{group[0][1]}" if len(group) == 1 else f"{group[0][1]}-{group[-1][1]}" for group in groups]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(parts)}"


def _of_a_launcher(environ: Mapping[str, str]) -> Ranks:
    world = _number(environ, "WORLD_SIZE")
    if world == 1:
        return Ranks()
    return Ranks(
        rank=_number(environ, "RANK"),
        world=world,
        # Some start one process per machine, or per container with one GPU, and leave these out.
        local_rank=_number(environ, "LOCAL_RANK", "0"),
        local_world=_number(environ, "LOCAL_WORLD_SIZE", "1"),
        started_by="the launcher",
        address=_text(environ, "MASTER_ADDR"),
        port=_number(environ, "MASTER_PORT"),
    )


def _of_slurm(environ: Mapping[str, str]) -> Ranks:
    # Two steps of one job may run on one machine at a time, so the step chooses the port as well.
    chosen = 20000 + (_number(environ, "SLURM_JOB_ID") * 16 + _number(environ, "SLURM_STEP_ID", "0")) % 20000
    return Ranks(
        rank=_number(environ, "SLURM_PROCID"),
        world=_number(environ, "SLURM_STEP_NUM_TASKS"),
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_world=_number(environ, "SLURM_STEP_TASKS_PER_NODE", "1"),
        started_by="SLURM",
        address=environ.get("MASTER_ADDR") or first_host(_text(environ, "SLURM_STEP_NODELIST")),
        port=_number(environ, "MASTER_PORT", str(chosen)),
    )


def _text(environ: Mapping[str, str], name: str, default: str | None = None) -> str:
    found = environ.get(name) or default
    if found is None:
        raise Refused(
            Problem(key=f"${name}", value="not set", why="other variables say that this is one process of several",
                    remedy="start the processes with torchrun or srun, or unset RANK, WORLD_SIZE and their like")
        )
    return found


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = _text(environ, name, default)
    try:
        return int(text.split("(")[0])  # SLURM writes 4(x2) for four tasks on each of two machines
    except ValueError:
        raise Refused(Problem(key=f"${name}", value=text, why="it is not a number",
                              remedy="unset it, or start the processes with torchrun or srun")) from None
