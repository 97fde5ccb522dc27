"""Saves at once, or from a copy while training goes on; one save at a time.

Not for what a checkpoint holds (`save.py`) nor for when one is due. Beside training a thread of its own writes, forces
to the disk and renames; its processes agree through a group that nobody else uses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from halo_core import process_group
from halo_core.checkpoint.host_memory import HostMemory
from halo_core.checkpoint.save import Capture, write


@dataclass(kw_only=True)
class _Beside:
    """A save that a thread does, and how it ended."""

    thread: threading.Thread | None = None
    path: Path | None = None
    error: BaseException | None = None


class Saver:
    """Writes captured checkpoints. beside: while training goes on. timeout: seconds that processes wait for each other.

    A context: what is being written when a run ends by an error is still finished, unless a person wants it to end at
    once. Making one is a collective; so is every method but `has_ended`.
    """

    def __init__(self, *, beside: bool, timeout: float) -> None:
        self.beside = beside
        self._group = process_group.side_group(timeout) if beside else None
        self._memory = HostMemory()
        self._going: _Beside | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        going = self._going
        if going is not None and going.thread is not None:
            if isinstance(error, KeyboardInterrupt):
                return  # the thread keeps its memory, and ends with the process
            going.thread.join()
        self._going = None
        self._memory.close()

    @property
    def is_going(self) -> bool:
        """Return whether a save was begun whose end was not yet taken; the same on every process."""
        return self._going is not None

    def begin(self, captured: Capture, after: Callable[[Path, Any], None]) -> None:
        """Write a captured checkpoint, or begin to: its tensors may change as soon as this returns.

        after: called with the published folder and the group through which it may communicate.

        Raises:
            SaveFailed: on every process, as `save.write`; beside training, `taken` raises it.
        """
        assert self._going is None, "one save at a time: the end of the last one is taken first"
        going = self._going = _Beside()
        if not self.beside:
            self._go(going, captured, after)
            return
        weights, moments = captured.weights, captured.moments
        copies = self._memory.copied({**{f"weights/{name}": tensor for name, tensor in weights.tensors.items()},
                                      **{f"optimizer/{name}": tensor for name, tensor in moments.tensors.items()}})
        copy = replace(
            captured,
            weights=replace(weights, tensors={name: copies[f"weights/{name}"] for name in weights.tensors}),
            moments=replace(moments, tensors={name: copies[f"optimizer/{name}"] for name in moments.tensors}),
        )
        going.thread = threading.Thread(target=self._go, args=(going, copy, after), name="halo-save", daemon=True)
        going.thread.start()

    def has_ended(self) -> bool:
        """Return whether the save that was begun has ended here, well or not; no collective."""
        return self._going is not None and (self._going.thread is None or not self._going.thread.is_alive())

    def taken(self) -> Path | None:
        """Wait for the save that was begun and return its folder; None where there is none.

        Raises:
            SaveFailed: on every process, as `save.write`.
        """
        going = self._going
        if going is None:
            return None
        if going.thread is not None:
            going.thread.join()  # still going until here: a signal meanwhile must not unlock what the thread reads
        self._going = None
        if going.error is not None:
            raise going.error
        return going.path

    def _go(self, going: _Beside, captured: Capture, after: Callable[[Path, Any], None]) -> None:
        try:
            path = write(captured, self._group)
            going.path = path  # whole, whatever becomes of what follows
            after(path, self._group)
        except BaseException as error:  # whoever takes the end of the save hears of it
            going.error = error
