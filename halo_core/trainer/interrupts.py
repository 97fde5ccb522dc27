"""Ctrl-C and SIGTERM become a flag that the loop reads once per step; a second signal ends the run at once.

Not for saving: the loop does that when it sees the flag.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from halo_core import process_group

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context in which the first signal only sets `requested`. The handlers of before are put back at its end.

    `say` prints a line for people. Outside the main thread Python allows no handlers, so none are set; `request`
    works everywhere.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self.requested: str | None = None
        self._say = say
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def request(self, name: str) -> None:
        """Ask the loop to save and end after the current step."""
        self.requested = name

    def _heard(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested is not None:
            if process_group.world() > 1:
                # One wish may arrive twice: a scheduler signals every process, and so does a launcher it signals. At a
                # person's second signal the launcher ends its processes itself.
                return
            raise KeyboardInterrupt(f"second signal ({name}): ended at once, nothing more was saved")
        self.requested = name
        self._say(f"{name}: finishing this step, then saving a checkpoint; a second signal ends at once")
