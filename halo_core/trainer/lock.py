"""A lock on a file that ends with the process that took it, also where that is killed.

Not for deciding what is locked: see `run_folder.py`. The operating system holds the lock, not the file: one that is
left behind locks nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import IO

ATTEMPTS, BETWEEN = 10, 0.05
"""How often a lock is tried, and the seconds between: whoever looks whether it is held holds it for an instant."""
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Held(Exception):
    """Another process holds the lock; the text says which."""


class Unsupported(Exception):
    """The file system has no locks."""


def take(file: Path) -> IO[str]:
    """Lock `file`, which is made where it does not exist, and return it open: closing it gives the lock back.

    Raises:
        Held, Unsupported: see there.
        OSError: the file cannot be opened.
    """
    handle = file.open("a+", encoding="utf-8")
    try:
        for attempt in range(ATTEMPTS):
            if _locked(handle, fcntl.LOCK_EX):
                break
            if attempt + 1 == ATTEMPTS:
                raise Held(_said(file))
            time.sleep(BETWEEN)
        handle.truncate(0)
        now = datetime.now().astimezone()
        handle.write(f"process {os.getpid()} on {socket.gethostname()}, since {now:%Y-%m-%d %H:%M:%S %z}\n")
        handle.flush()
    except BaseException:
        handle.close()
        raise
    return handle


def holder(file: Path) -> str | None:
    """Return who holds the lock of `file`; None where nobody does, or where that cannot be found out."""
    try:
        with file.open(encoding="utf-8") as handle:
            return None if _locked(handle, fcntl.LOCK_SH) else _said(file)
    except (OSError, Unsupported):
        return None


def _locked(handle: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as fault:
        if fault.errno in _UNSUPPORTED:
            raise Unsupported(str(fault)) from fault
        raise
    return True


def _said(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip() or "a process that has not said which it is"
