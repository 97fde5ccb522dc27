"""Runs a function on several forked processes that form one gloo group, and brings back what each returned.

Not for launchers or signals: those have tests of their own, with processes that start from nothing. A fork starts in
a fifth of a second because everything imported here is imported there; so a test imports what it needs at its top.
"""

from __future__ import annotations

import io
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # distributed tensors and checkpoints import it at their first use: once here, not once a rank
import torch.distributed as dist

TIMEOUT = 120.0
"""Seconds after which a run counts as stuck. Far above any test here, so that a busy machine is no failure."""


@dataclass(eq=False)  # not frozen: an exception is given its traceback while it passes
class RankFailed(AssertionError):
    """A rank raised, died or hung; `rank` is the first that did, `text` its traceback, `error` its exception if any."""

    rank: int
    text: str
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}"


def run(world: int, function: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Return what `function(*arguments)` returned on each of `world` ranks, in the order of ranks.

    Inside, `torch.distributed` is ready on gloo and torch runs one thread.

    Raises:
        RankFailed: the first rank that raised, with its traceback; all others are ended.
    """
    context = get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        store = Path(folder) / "store"
        children, pipes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            child = context.Process(target=_child, args=(rank, world, store, theirs, function, arguments), daemon=True)
            child.start()
            theirs.close()
            children.append(child)
            pipes.append(ours)
        try:
            return _collected(pipes, timeout)
        finally:
            for child in children:
                child.terminate()
            for child in children:
                child.join(timeout=10)
                if child.is_alive():
                    child.kill()
                    child.join()


def _collected(pipes: list[Connection], timeout: float) -> list[Any]:
    waiting = dict(enumerate(pipes))
    results: dict[int, Any] = {}
    end = time.monotonic() + timeout
    while waiting:
        ready = wait(list(waiting.values()), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise RankFailed(min(waiting), f"nothing came back within {timeout:.0f} s (ranks {sorted(waiting)})")
        failures = []
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            try:
                when, text, payload = waiting.pop(rank).recv()
            except EOFError:
                when, text, payload = time.monotonic(), "the process ended without a word", None
            if text:
                failures.append((when, rank, text, payload))
            else:
                # Bytes, not tensors: those would arrive as shared memory that its maker may have closed.
                results[rank] = torch.load(io.BytesIO(payload), weights_only=False)
        if failures:  # the first in time is the cause; others may have failed because their peer was gone
            _, rank, text, error = min(failures, key=lambda failure: failure[:2])
            raise RankFailed(rank, text, error)
    return [results[rank] for rank in range(len(results))]


def _child(rank: int, world: int, store: Path, pipe: Connection, function: Any, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # first of all: a pool of the parent's threads does not exist here
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT)
        )
        outcome = io.BytesIO()
        torch.save(function(*arguments), outcome)
        pipe.send((time.monotonic(), "", outcome.getvalue()))
        dist.destroy_process_group()
    except BaseException as error:
        _tell(pipe, error)
        os._exit(1)  # without destructors that wait for the others
    os._exit(0)


def _tell(pipe: Connection, error: BaseException | None) -> None:
    assert error is not None
    when, text = time.monotonic(), "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception that does not survive pickling still has a text
        error = None
    pipe.send((when, text, error))
