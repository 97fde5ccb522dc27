"""Starts the processes of a run on this machine with torch's elastic launcher, and says how the run ended.

Not for what a process then does: it runs the same command and joins the others (`process_group.py`).
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from halo_core.cli import endings
from halo_core.cli.watch import Ended, Watch
from halo_core.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_MISTAKE, Problem, Refused
from halo_core.ranks import Ranks, spans

if TYPE_CHECKING:
    from halo_core.cli.agent import Failure, RankAgent

MEETING = 600
"""Seconds that the launchers of several machines wait for each other."""
LAST_LINES = 30
"""Lines of a rank's stderr that are shown when it died without a report."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The processes to start. nproc: on this machine. node_rank: which of `nodes` machines this one is.

    endpoint: HOST:PORT where the launchers of several machines meet, on the machine of node rank 0.
    """

    nproc: int
    nodes: int = 1
    node_rank: int = 0
    endpoint: str = ""

    @property
    def world(self) -> int:
        """Return the number of processes on all machines."""
        return self.nproc * self.nodes


def job_problems(nproc: int, nodes: int | None, node_rank: int | None, endpoint: str | None) -> list[Problem]:
    """Return what is wrong with the launch options as given; None is an option that was left out."""
    several = nodes is not None and nodes > 1
    problems = []
    if nodes is not None and nodes < 1:
        problems.append(Problem(key="--nnodes", value=nodes, why="a run has at least one machine", remedy="--nnodes 1"))
    for key, value in (("--node-rank", node_rank), ("--rdzv-endpoint", endpoint)):
        if value is not None and not several:
            problems.append(Problem(key=key, value=value, why="it says where this machine stands among several",
                                    remedy="give --nnodes N as well, or leave it out"))
    if several and node_rank is None:
        problems.append(Problem(key="--nnodes", value=nodes, why="which of the machines this one is was not said",
                                remedy="--node-rank 0 on the first machine, --node-rank 1 on the second, ..."))
    elif several and node_rank is not None and nodes is not None and not 0 <= node_rank < nodes:
        problems.append(Problem(key="--node-rank", value=node_rank, why=f"there are {nodes} machines",
                                remedy=f"a number from 0 to {nodes - 1}"))
    if several and endpoint is None:
        problems.append(Problem(key="--nnodes", value=nodes, why="where the machines meet was not said",
                                remedy="--rdzv-endpoint HOST:PORT, the same everywhere: a free port of node rank 0"))
    elif several and endpoint is not None and not _is_endpoint(endpoint):
        problems.append(Problem(key="--rdzv-endpoint", value=endpoint, why="it is not HOST:PORT",
                                remedy="a host that every machine can reach and a free port, such as node0:29500"))
    if nproc > 1 and not sys.platform.startswith("linux"):
        problems.append(Problem(key="--nproc", value=nproc, why="only Linux can start several processes here",
                                remedy="--nproc 1"))
    return problems


def join_problems(nproc: int, ranks: Ranks) -> list[Problem]:
    """Return whether `--nproc` contradicts the processes that something else has started; 1 is the default."""
    if nproc in (1, ranks.world, ranks.local_world):
        return []
    return [
        Problem(key="--nproc", value=nproc,
                why=f"{ranks.started_by} has already started {ranks.world} processes of this run",
                remedy=f"leave --nproc out; or, to start {nproc} processes from this one, tell which machine it is: "
                "--nnodes N --node-rank R --rdzv-endpoint HOST:PORT")
    ]


def command(words: Sequence[str]) -> tuple[str, ...]:
    """Return the command of one process: this Python running `halo` with the same words."""
    # -P: without it the folder that the person stands in comes first among imports, and holds files of any name.
    return (sys.executable, "-P", "-m", "halo_core.cli.main", *words)


def launch(command: Sequence[str], job: Job, *, save_timeout: float) -> int:
    """Start the processes, wait for their end, tell it on stderr, and return the exit code of the run.

    command: what each process runs, with RANK, WORLD_SIZE and their like in its environment. save_timeout: seconds
    that the ranks have to save after Ctrl-C or SIGTERM.

    Raises:
        Refused: more processes than GPUs, or machines that did not meet.
    """
    problems = gpu_problems(job.nproc)
    if problems:
        raise Refused(problems)
    folder = Path(tempfile.mkdtemp(prefix="halo-ranks-"))
    keep = False
    try:
        with _inherited(environment(job, folder, os.environ)), _silent():
            code, text = _run(_agent(command, job, folder, save_timeout), job)
        spoke = any(file.stat().st_size for file in folder.glob("*.stderr"))
        keep = spoke and code not in (0, EXIT_MISTAKE, EXIT_INTERRUPTED)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    if text:
        print(text, file=sys.stderr)
    if keep:
        print(f"halo: what the ranks said on stderr: {folder}", file=sys.stderr)
    return code


def gpu_problems(nproc: int) -> list[Problem]:
    """Return whether this machine has a GPU for every process; without any, the processes run on the CPU."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() >= nproc:
        return []
    seen = torch.cuda.device_count()
    return [
        Problem(key="--nproc", value=nproc, why=f"each process needs a GPU of its own, and {seen} can be seen here",
                remedy=f"--nproc {seen}, or CUDA_VISIBLE_DEVICES= (empty) to train on the CPU")
    ]


def environment(job: Job, folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the processes get beside those of the launcher (`given`) and of torch's agent."""
    variables = {endings.FOLDER_VARIABLE: str(folder), endings.LAUNCHER_VARIABLE: str(os.getpid())}
    if "OMP_NUM_THREADS" not in given:  # each process would start as many threads as there are cores
        variables["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // job.nproc))
    if job.nodes == 1 and "GLOO_SOCKET_IFNAME" not in given:  # where the host's own name has no address, gloo fails
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return variables


def ending(agent: RankAgent, job: Job) -> tuple[int, str]:
    """Return the exit code of the run and what this machine's person should read.

    The failure that came first decides, on whichever machine. A text that every rank has is told where rank 0 runs.
    """
    watch = agent.watch
    assert watch is not None
    speaks = job.node_rank == 0
    failures = watch.failures
    own = failures[0] if failures else None
    other = agent.elsewhere[0] if agent.elsewhere else None
    if other is not None and (own is None or (own.lost_peer and not other.lost_peer)):
        return _shell_code(other.code), "" if other.everywhere and not speaks else _elsewhere_text(other, agent.world)
    if own is not None:
        is_shared = own.report is not None and (own.report.everywhere or _all_say(watch, own))
        if is_shared and own.report is not None:
            return own.code, own.report.text if speaks else ""
        return _shell_code(own.code), _failure_text(own, agent)
    if watch.stopping or watch.killed:
        return EXIT_INTERRUPTED, _stop_text(watch) if speaks or watch.killed else ""
    return 0, ""


def _is_endpoint(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdigit() and 0 < int(port) < 2**16


def _agent(command: Sequence[str], job: Job, folder: Path, save_timeout: float) -> RankAgent:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    from halo_core.cli.agent import RankAgent

    program, *words = command
    if job.nodes == 1:
        # Port 0: the launcher takes a free one, and the processes use the same store.
        meeting = RendezvousParameters(backend="c10d", endpoint="127.0.0.1:0", run_id=uuid.uuid4().hex, min_nodes=1,
                                       max_nodes=1, local_addr="127.0.0.1")
    else:
        # Static: ranks follow --node-rank, and a machine that comes late can never restart the others.
        meeting = RendezvousParameters(backend="static", endpoint=job.endpoint, run_id="halo", min_nodes=job.nodes,
                                       max_nodes=job.nodes, rank=job.node_rank, timeout=MEETING)
    spec = WorkerSpec(
        role="halo",
        local_world_size=job.nproc,
        entrypoint=program,
        args=tuple(word.replace("$", "$$") for word in words),  # the agent reads them as templates
        rdzv_handler=get_rendezvous_handler(meeting),
        max_restarts=0,
        monitor_interval=0.001,  # the agent waits by itself
        local_addr="127.0.0.1" if job.nodes == 1 else None,
    )
    return RankAgent(spec, folder=folder, nodes=job.nodes, save_timeout=save_timeout)


def _run(agent: RankAgent, job: Job) -> tuple[int, str]:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        agent.run()
        return ending(agent, job)
    except (KeyboardInterrupt, SignalException):  # before the processes were there to hear it
        return EXIT_INTERRUPTED, "halo: interrupted"
    except (DistError, RendezvousError) as fault:
        if agent.watch is not None:
            raise
        line = (str(fault).strip() or type(fault).__name__).splitlines()[0]
        raise Refused(
            Problem(key="--rdzv-endpoint", value=job.endpoint or "127.0.0.1",
                    why=f"the launchers of {job.nodes} machines did not meet there: {line}",
                    remedy="start all of them with the same endpoint, a free port of the machine of --node-rank 0, "
                    f"within {MEETING} seconds")
        ) from fault
    finally:
        agent.close()


@contextmanager
def _inherited(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables that the processes started in a block inherit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _silent() -> Iterator[None]:
    """Keep the agent from logging the failure of a process in its own words."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _all_say(watch: Watch, own: Ended) -> bool:
    texts = {one.report.text if one.report is not None else None for one in watch.ended}
    return not watch.killed and len(watch.ended) > 1 and own.report is not None and texts == {own.report.text}


def _failure_text(own: Ended, agent: RankAgent) -> str:
    who = f"halo: rank {own.rank} of {agent.world}"
    if own.lost_peer and own.report is not None:
        return f"{who} waited for a rank that is gone and left no word\n{own.report.text}"
    if own.report is not None:
        return f"{who} failed first, with exit code {own.code}\n{own.report.text}"
    if own.code < 0:
        name = signal.Signals(-own.code).name
        hint = ": the machine was out of memory, or somebody killed it" if name == "SIGKILL" else ""
        head = f"{who} was killed by {name}{hint}"
    else:
        head = f"{who} ended with exit code {own.code} and no word of its own"
    file = endings.stderr_of(agent.folder, own.rank)
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    return "\n".join([head, *lines[-LAST_LINES:]])


def _elsewhere_text(failure: Failure, world: int) -> str:
    how = f"exit code {failure.code}" if failure.code > 0 else signal.Signals(-failure.code).name
    line = f": {failure.line}" if failure.line else ""
    return f"halo: rank {failure.rank} of {world} on {failure.host} failed first ({how}){line}"


def _stop_text(watch: Watch) -> str:
    reports = sorted((one.report for one in watch.ended if one.report is not None and one.code == EXIT_INTERRUPTED),
                     key=lambda report: report.rank)
    lines = [reports[0].text if reports else "halo: interrupted"]
    if len(watch.asked) > 1:
        lines.append("halo: a second signal ended the run at once, nothing more was saved")
    elif watch.killed:
        lines.append(f"halo: {spans(sorted(watch.killed))} had not ended within save_timeout, and were killed")
    return "\n".join(lines)


def _shell_code(code: int) -> int:
    """Return an exit code as shells give it: 128 and the signal's number for a process that a signal killed."""
    return (code if code >= 0 else 128 - code) or EXIT_BUG
