"""Runs a launcher in a forked process, as a command would run it, and brings back its exit code and output.

Not for ranks: those start from nothing (`launched.py`). Forking saves each launcher the import of torch.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed.elastic.agent.server.local_elastic_agent  # noqa: F401  imported once, before forks

from halo_core.cli import launch
from halo_core.cli.main import explain

LAUNCHED = Path(__file__).with_name("launched.py")
SAVE_TIMEOUT = 60.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a launcher ended."""

    code: int
    out: str
    err: str


class Forked:
    """A function that runs in a child process and returns its exit code; its output goes to files."""

    def __init__(self, function: Callable[[], int]) -> None:
        self._out, self._err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115  closed when read
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.dup2(self._out.fileno(), 1)
                os.dup2(self._err.fileno(), 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # pytest has put its own in place
                code = function()
            except BaseException as fault:
                code, text = explain(fault)
                print(text, file=sys.stderr)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def ended(self) -> Ended:
        """Wait for the end."""
        _, status = os.waitpid(self.pid, 0)
        texts = []
        for file in (self._out, self._err):
            file.seek(0)
            texts.append(file.read().decode())
            file.close()
        return Ended(code=os.waitstatus_to_exitcode(status), out=texts[0], err=texts[1])


def start(*words: object, nproc: int = 2, save_timeout: float = SAVE_TIMEOUT, **job: object) -> Forked:
    """Start a launcher whose processes do an act of `launched.py`."""
    command = (sys.executable, str(LAUNCHED), *map(str, words))
    whole = launch.Job(nproc=nproc, **job)  # type: ignore[arg-type]
    return Forked(lambda: launch.launch(command, whole, save_timeout=save_timeout))


def run(*words: object, **options: object) -> Ended:
    """Start a launcher and wait for its end."""
    return start(*words, **options).ended()  # type: ignore[arg-type]


def run_two_machines(*words: object) -> tuple[Ended, Ended]:
    """Run two launchers of two processes each that meet on the loopback device."""
    endpoint = f"127.0.0.1:{free_port()}"
    both = [start(*words, nodes=2, node_rank=rank, endpoint=endpoint) for rank in (0, 1)]
    return both[0].ended(), both[1].ended()


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
