"""torch's elastic agent, told what a rank's end means here: no restarts, the first failure counts, signals ask to save.

Not for starting it or for what people read (`launch.py`). Imports torch, so it is imported when all checks are done.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from halo_core.cli.watch import Ended, Watch

LOOK_EVERY = 0.5
"""Seconds between looks at the other machines; an end on this one is seen at once."""
GOODBYE = 10.0
"""Seconds that the machine with the store waits for the others to have read how the run ended."""
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TAKEN_BY_TORCH = (*PASSED_ON, signal.SIGQUIT)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that failed, as the machines tell each other."""

    rank: int
    host: str
    code: int
    line: str
    everywhere: bool = False
    lost_peer: bool = False


class RankAgent(LocalElasticAgent):
    """Runs the ranks of one machine to their end. `watch` says how they ended, `elsewhere` what other machines told.

    Where torch's agent signals and then waits, this one looks at its processes itself: a failure ends the others even
    when they are stuck, and a person's signal lets all of them save.
    """

    def __init__(self, spec: WorkerSpec, *, folder: Path, nodes: int, save_timeout: float) -> None:
        # Its own log folder would stay behind, so it gets one inside ours.
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder / "elastic")), start_method="spawn")
        self.watch: Watch | None = None
        self.elsewhere: list[Failure] = []
        self.world = 0
        self.folder = folder
        self._nodes = nodes
        self._save_timeout = save_timeout
        self._published = False
        self._done = False
        self._before: dict[signal.Signals, Any] = {}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        before = {number: signal.getsignal(number) for number in TAKEN_BY_TORCH}
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self.world = worker_group.workers[0].world_size
        self.watch = Watch(
            {worker_group.workers[local].global_rank: pid for local, pid in pids.items()},
            self.folder, self._save_timeout,
        )
        self._before = before
        self._hear()
        return pids

    def _hear(self) -> None:
        """Hear signals ourselves: torch's handlers, set when the processes started, would end the launcher."""
        assert self.watch is not None
        if threading.current_thread() is not threading.main_thread():  # Python allows handlers nowhere else
            self._before = {}
        watch = self.watch

        def heard(number: int, frame: FrameType | None) -> None:
            # A rank knows the two that ask it to save; a terminal that goes away means the same.
            watch.ask(signal.SIGTERM if number == signal.SIGHUP else number)

        for number, handler in self._before.items():
            # nohup, for one, has SIGHUP ignored, and means it.
            ours = number in PASSED_ON and not (number == signal.SIGHUP and handler == signal.SIG_IGN)
            signal.signal(number, heard if ours else handler)

    def close(self) -> None:
        """End what still runs, let the other machines read how it went, and put back the handlers of before."""
        if self.watch is not None:
            self.watch.kill()
        self._goodbye(time.monotonic)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self.watch is not None
        self.watch.wait(LOOK_EVERY)
        self.watch.look()
        if self._nodes > 1:
            self._ask_the_others(worker_group)
        if self.watch.overdue:
            self.watch.kill()
        if self.watch.running or not self._all_machines_done():
            return RunResult(state=WorkerState.HEALTHY)
        self.watch.kill_leftovers()
        result: RunResult = super()._monitor_workers(worker_group)
        # After a good end the agent would wait for the machine that failed.
        return RunResult(state=WorkerState.FAILED) if self.elsewhere else result

    def _all_machines_done(self) -> bool:
        """Return whether no other machine's ranks are waited for, either: all ended well, or the run has failed."""
        assert self.watch is not None
        if self._nodes == 1 or self.elsewhere or any(one.code != 0 for one in self.watch.ended) or self.watch.killed:
            return True
        return self._tally("done", 0) == self._nodes

    def _ask_the_others(self, worker_group: WorkerGroup) -> None:
        """Tell the other machines of a failure or a good end here, and hear theirs, through the launchers' store."""
        assert self.watch is not None
        try:
            failures = self.watch.failures
            if failures and not self._published:
                self._published = True
                number = self._tally("failures", 1)
                self._own_store().set(f"halo/failure/{number}", json.dumps(asdict(self._failure(failures[0]))))
            if not self.watch.running and not self._done and all(one.code == 0 for one in self.watch.ended):
                self._done = True
                self._tally("done", 1)
            for number in range(1, self._tally("failures", 0) + 1):
                self._hear_failure(Failure(**json.loads(self._own_store().get(f"halo/failure/{number}"))))
        except RuntimeError as fault:  # torch's errors of a store are RuntimeErrors
            host = "the machine of node rank 0"
            line = f"its launcher is gone ({str(fault).splitlines()[0]})"
            self._hear_failure(Failure(rank=0, host=host, code=1, line=line, lost_peer=True))

    def _hear_failure(self, failure: Failure) -> None:
        assert self.watch is not None
        if failure.host != self._host() and failure not in self.elsewhere:
            self.elsewhere.append(failure)
            self.watch.tell(failure.line)

    def _failure(self, ended: Ended) -> Failure:
        report = ended.report
        return Failure(rank=ended.rank, host=self._host(), code=ended.code, line="" if report is None else report.line,
                       everywhere=report is not None and report.everywhere, lost_peer=ended.lost_peer)

    def _host(self) -> str:
        # Two launchers may run on one machine.
        return f"{socket.gethostname()} (node rank {self.get_worker_group().group_rank})"

    def _own_store(self) -> Any:
        return self.get_worker_group().store

    def _tally(self, name: str, step: int) -> int:
        return int(self._own_store().add(f"halo/{name}", step))

    def _goodbye(self, clock: Callable[[], float]) -> None:
        """Let every machine read how the run ended before the store goes with the launcher that holds it."""
        if self._nodes == 1 or self.get_worker_group().store is None:
            return
        try:
            left = self._tally("left", 1)
            end = clock() + GOODBYE
            while self.get_worker_group().group_rank == 0 and left < self._nodes and clock() < end:
                time.sleep(0.05)
                left = self._tally("left", 0)
        except RuntimeError:
            return  # the store is gone already, so nobody needs it
