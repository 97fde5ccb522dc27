"""Watches the processes of one machine: which ended how and in what order, when the rest must end, and why.

Not for starting them, and not for what people read (`launch.py`). Knows process ids and reports, no torch.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from halo_core.cli import endings
from halo_core.cli.endings import Report
from halo_core.errors import EXIT_INTERRUPTED

GRACE = 2.0
"""Seconds that the other ranks have to end by themselves after the first failure: long enough for the same refusal, or
for the rank that really failed first, short enough that ranks stuck in a collective do not keep machines."""
NAP = 0.02
"""Seconds between looks at the processes: rarely do two end between them."""
STOPPED = (EXIT_INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)
"""Endings of a process that was asked to stop. A negative number is a signal, as in `subprocess`."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that has ended by itself. code: its exit code, or the negative number of the signal that killed it."""

    rank: int
    code: int
    report: Report | None = None

    @property
    def lost_peer(self) -> bool:
        """Return whether it failed only because another rank was gone."""
        return self.report is not None and self.report.lost_peer


class Watch:
    """The processes of one machine. pids: rank -> process id, each the leader of its own process group.

    save_timeout: seconds that the ranks have to save after they were asked to stop.
    """

    def __init__(
        self, pids: Mapping[int, int], folder: Path, save_timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ended: list[Ended] = []
        self.killed: list[int] = []
        self.asked: list[signal.Signals] = []
        self.told: str | None = None
        self._pids = dict(pids)
        self._running = dict(pids)
        self._folder = folder
        self._save_timeout = save_timeout
        self._clock = clock
        self._failed_at: float | None = None
        self._stopping_since: float | None = None

    @property
    def running(self) -> tuple[int, ...]:
        """Return the ranks that have not ended."""
        return tuple(self._running)

    @property
    def stopping(self) -> bool:
        """Return whether the run ends because somebody asked it to."""
        return self._stopping_since is not None

    @property
    def failures(self) -> list[Ended]:
        """Return the processes that failed, most likely cause first."""
        found = [one for one in self.ended if one.code != 0 and not (self.stopping and _follows_a_stop(one))]
        # A process that a signal killed has no report; among equals the order in which they were seen stays.
        return sorted(found, key=lambda one: one.lost_peer)

    def wait(self, seconds: float) -> None:
        """Return when a process ends, or after some seconds."""
        end = self._clock() + seconds
        # Not by pidfd: containers of several kinds forbid it.
        while self._clock() < end and all(_status(pid) is None for pid in self._running.values()):
            time.sleep(NAP)

    def look(self) -> None:
        """Take note of the processes that have ended since the last look. They stay zombies for the launcher."""
        new = []
        for rank, pid in list(self._running.items()):
            status = _status(pid)
            if status is None:
                continue
            del self._running[rank]
            if rank not in self.killed:
                code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
                new.append(Ended(rank=rank, code=code, report=endings.read(self._folder, rank)))
        self.ended += sorted(new, key=lambda one: 0 if one.report is None else one.report.when)
        if not self.stopping and any(one.code == EXIT_INTERRUPTED for one in self.ended):
            self._stopping_since = self._clock()  # asked by somebody else, such as a scheduler
        if self._failed_at is None and (self.failures or self.told is not None):
            self._failed_at = self._clock()

    def ask(self, number: int) -> None:
        """Pass a signal on, so that the ranks save and end; a second one ends them at once.

        Only the first is passed on: a rank that a scheduler signals as well would hear two.
        """
        self.asked.append(signal.Signals(number))
        if len(self.asked) > 1:
            self.kill()
            return
        if not self.stopping:
            self._stopping_since = self._clock()
        for pid in self._running.values():
            self._send(pid, signal.Signals(number))

    def tell(self, what: str) -> None:
        """Take note that the run has failed on another machine."""
        if self.told is None:
            self.told = what

    @property
    def overdue(self) -> bool:
        """Return whether processes still run although their time is over."""
        if not self._running:
            return False
        now = self._clock()
        if self._failed_at is not None:
            return now >= self._failed_at + GRACE
        return self._stopping_since is not None and now >= self._stopping_since + self._save_timeout

    def kill(self) -> None:
        """End every process that still runs, with the processes that it started."""
        for rank, pid in self._running.items():
            if rank not in self.killed:
                self.killed.append(rank)
            self._send(pid, signal.SIGKILL, group=True)

    def kill_leftovers(self) -> None:
        """End what ended processes have left behind, such as workers that read data."""
        for rank, pid in self._pids.items():
            if rank not in self._running:
                self._send(pid, signal.SIGKILL, group=True)

    def _send(self, pid: int, number: signal.Signals, *, group: bool = False) -> None:
        try:
            (os.killpg if group else os.kill)(pid, number)
        except (ProcessLookupError, PermissionError):
            return


def _status(pid: int) -> os.waitid_result | None:
    """Return how a process ended, or None while it runs. It stays a zombie, so that its parent still finds it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def _follows_a_stop(one: Ended) -> bool:
    return one.code in STOPPED or one.lost_peer
