"""Several processes that judge chunks side by side; the answers come in the order of the chunks.

Not for what is judged (`judge.py`). Workers are new interpreters, not forks: a process that has threads of a
tokenizer, of gloo or of CUDA cannot be forked safely, and a script without a main guard is not run again.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

from halo_core.config import RunConfig
from halo_core.data.judge import Judge, Outcome
from halo_core.data.read import Record
from halo_core.errors import Problem, Refused

KEY = "dataset_num_proc"
_AHEAD = 2
"""Chunks in flight for each worker: one that it judges and one that waits."""
_PROGRAM = "import sys; sys.path[:] = {path!r}; from halo_core.data.workers import serve; serve({handle})"


class Chunk(Protocol):
    """Some records, with whatever else travels along in this process."""

    @property
    def records(self) -> Sequence[Record]: ...


C = TypeVar("C", bound=Chunk)


def judged(
    chunks: Iterable[C],
    config: RunConfig,
    tokenizer: Any,
    *,
    num_proc: int,
    tokenise: Callable[[], bool],
) -> Iterator[tuple[C, Outcome]]:
    """Yield each chunk with its outcome, in order, judged by `num_proc` processes; 1 is this very process.

    tokenise: asked for each chunk; see `Judge`.

    Raises:
        Refused: the tokenizer cannot be handed to other processes, or one of them died.
    """
    if num_proc == 1:
        judge = Judge(config=config, tokenizer=tokenizer)
        for chunk in chunks:
            yield chunk, judge(chunk.records, tokenise=tokenise())
        return
    with _Workers(config, tokenizer, num_proc) as workers:
        waiting: deque[tuple[C, Future[Outcome]]] = deque()
        for chunk in chunks:
            waiting.append((chunk, workers.submit(chunk.records, tokenise())))
            if len(waiting) >= _AHEAD * num_proc:
                first, outcome = waiting.popleft()
                yield first, outcome.result()
        while waiting:
            first, outcome = waiting.popleft()
            yield first, outcome.result()


def serve(handle: int) -> None:
    """Answer chunks until the other side is gone; what a worker process does, and nothing else calls."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends this process
    connection = Connection(handle)
    try:
        if connection.recv():
            from transformers.dynamic_module_utils import init_hf_modules

            init_hf_modules()  # code that a tokenizer's repository brings is imported from there
        config, tokenizer = connection.recv()
        judge = Judge(config=config, tokenizer=tokenizer)
        while True:
            records, tokenise = connection.recv()
            connection.send(judge(records, tokenise=tokenise))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection

    def begin(self, brings_code: bool, needed: bytes) -> None:
        """Hand over what every chunk needs: the configuration and the tokenizer, pickled."""
        with self._alive():
            self.connection.send(brings_code)
            self.connection.send_bytes(needed)

    def judge(self, records: Sequence[Record], tokenise: bool) -> Outcome:
        with self._alive():
            self.connection.send((records, tokenise))
            outcome: Outcome = self.connection.recv()
        return outcome

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Tell the end of the process, met while talking to it, as a refusal."""
        try:
            yield
        except (EOFError, OSError) as fault:
            code = self.process.wait()
            told = f"signal {-code}, which often means too little memory" if code < 0 else f"exit code {code}"
            why = f"a process that prepares rows ended ({told}); its own words stand above"
            raise Refused(Problem(key=KEY, value=None, why=why, remedy=f"lower {KEY}, or set it to 1")) from fault


class _Workers:
    """The worker processes, one thread of this process for each that talks to it."""

    def __init__(self, config: RunConfig, tokenizer: Any, count: int) -> None:
        try:
            needed = pickle.dumps((config, tokenizer), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as fault:  # whatever a tokenizer written by others raises
            why = f"the tokenizer cannot be handed to other processes ({type(fault).__name__}: {fault})"
            raise Refused(Problem(key=KEY, value=count, why=why, remedy=f"set {KEY}: 1")) from fault
        brings_code = type(tokenizer).__module__.startswith("transformers_modules")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._threads = ThreadPoolExecutor(count)
        try:
            for _ in range(count):
                worker = _started()
                self._workers.append(worker)
                self._idle.put(worker)
            for worker in self._workers:
                worker.begin(brings_code, needed)
        except BaseException:
            self.__exit__()  # a block that never begins does not end what was started for it
            raise

    def __enter__(self) -> _Workers:
        return self

    def submit(self, records: Sequence[Record], tokenise: bool) -> Future[Outcome]:
        return self._threads.submit(self._judge, records, tokenise)

    def _judge(self, records: Sequence[Record], tokenise: bool) -> Outcome:
        worker = self._idle.get()
        try:
            return worker.judge(records, tokenise)
        finally:
            self._idle.put(worker)

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.wait()
            worker.connection.close()


def _started() -> _Worker:
    ours, theirs = Pipe()
    # Each worker is one of many: threads of their own would only get in each other's way.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    program = _PROGRAM.format(path=[entry or str(Path.cwd()) for entry in sys.path], handle=theirs.fileno())
    process = subprocess.Popen(
        [sys.executable, "-c", program], pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
    )
    theirs.close()
    return _Worker(process, ours)
