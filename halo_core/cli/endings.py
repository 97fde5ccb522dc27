"""What a process of several says when it ends badly: a report for the launcher, or a word on its own stderr.

Not for noticing that a process ended (`watch.py`). The launcher alone talks to people; without one of ours, rank 0
tells what every rank would say, and any other rank only what is its own.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from halo_core.errors import EXIT_BUG, EXIT_INTERRUPTED

FOLDER_VARIABLE = "HALO_ENDINGS"
"""The folder of the reports, set by our launcher for the processes that it starts."""
LAUNCHER_VARIABLE = "HALO_LAUNCHER"
"""The process id of our launcher."""
PARENT_DEATH_SIGNAL = 1
"""The option of Linux's prctl that names the signal for the day the parent ends. Source: prctl(2)."""

RANK_0_TELLS = 5.0
"""Seconds that the other ranks leave rank 0 to tell what all would say; a launcher ends them as soon as it has."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a rank ended. text: what a person should read. line: the same in one line, for other machines.

    everywhere: every rank ends with this same text.

    lost_peer: a collective failed because another rank was gone, so that rank's report is the one to tell.
    when: Unix time in nanoseconds.
    """

    rank: int
    code: int
    text: str
    line: str = ""
    everywhere: bool = False
    lost_peer: bool = False
    when: int = 0


class JobEnded(Exception):
    """A run of several processes has ended and everything about it was said. Ends the command with its exit code."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(f"exit code {exit_code}")


def enter(rank: int) -> None:
    """Prepare this process for being one of several, before it says anything.

    Only rank 0 keeps its stdout. Under our launcher the others' stderr goes to a file, which the launcher shows where a
    rank dies without a report, and this process ends when the launcher dies.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if rank > 0:
        _redirect(sys.stdout.fileno(), os.devnull)
        if folder is not None:
            _redirect(sys.stderr.fileno(), stderr_of(Path(folder), rank))
    faulthandler.enable()
    if folder is not None:
        _end_with(int(os.environ[LAUNCHER_VARIABLE]))


def end(fault: BaseException, rank: int, explain: Callable[[BaseException], tuple[int, str]]) -> NoReturn:
    """Tell why this rank ends, and end the process at once: destructors would wait for ranks that no longer answer.

    explain: returns the exit code of a fault and the text for people.
    """
    code, text = explain(fault)
    code = code or EXIT_BUG  # a rank that leaves before the others never ends well
    everywhere = bool(getattr(fault, "everywhere", code == EXIT_INTERRUPTED))
    line = f"{type(fault).__name__}: {fault}".splitlines()[0]
    report = Report(rank=rank, code=code, text=text, line=line, everywhere=everywhere, lost_peer=lost_a_peer(fault),
                    when=time.time_ns())
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is not None:
        write(Path(folder), report)
    elif rank == 0:
        print(text, file=sys.stderr)
    elif not everywhere:
        print(f"halo: rank {rank} on {socket.gethostname()}:\n{text}", file=sys.stderr)
    else:
        # A launcher ends all ranks when the first has ended, so rank 0 would be ended before it has told it.
        time.sleep(RANK_0_TELLS)
    _leave(code)


def done() -> NoReturn:
    """End a rank that did its part, at once: at a usual exit gloo's threads sometimes abort the process."""
    _leave(0)


def end_well() -> NoReturn:
    """End this process after a good run, with Python's own last acts and without those of C++ libraries.

    torch 2.13 aborts now and then (1 of 40 processes on a busy CPU) when it ends after groups of a mesh on gloo, and a
    run whose model is written would end with an error.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    _flush()
    os._exit(0)


def lost_a_peer(fault: BaseException) -> bool:
    """Return whether a fault came from a collective or a store whose other side had gone."""
    seen: list[BaseException] = []
    left: list[BaseException | None] = [fault]
    while left:
        one = left.pop()
        if one is None or one in seen:
            continue
        seen.append(one)
        # By name: torch need not have been imported. gloo raises plain RuntimeErrors that name its files.
        if type(one).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError") or "gloo/" in str(one):
            return True
        left += [one.__cause__, one.__context__]
    return False


def write(folder: Path, report: Report) -> None:
    """Write a report where `read` finds it, whole or not at all."""
    partial = folder / f"rank-{report.rank}.partial"
    partial.write_text(json.dumps(asdict(report)), encoding="utf-8")
    partial.replace(folder / f"rank-{report.rank}.json")


def read(folder: Path, rank: int) -> Report | None:
    """Return the report of a rank, or None where it left none."""
    file = folder / f"rank-{rank}.json"
    return Report(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def stderr_of(folder: Path, rank: int) -> Path:
    """Return the file that holds the stderr of a rank other than 0."""
    return folder / f"rank-{rank}.stderr"


def _leave(code: int) -> NoReturn:
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # whoever read it is gone
            continue


def _redirect(stream: int, target: str | Path) -> None:
    file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, stream)
    os.close(file)


def _end_with(launcher: int) -> None:
    """Have the kernel kill this process when its launcher dies: nobody would hear it or end it any more."""
    import ctypes

    # Not a signal that asks to save: a launcher that had to be killed may have ranks that hang.
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != launcher:  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
