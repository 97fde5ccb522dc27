"""One run at a time in one output_dir: refused while another goes on, free again when that ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from halo_core import process_group
from halo_core.errors import Refused
from halo_core.trainer import lock, run_folder
from tests.distributed import ranks


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BETWEEN", 0.0)


def occupied(path: Path, resumed_from: Path | None = None, say: Callable[[str], None] = print):  # type: ignore[no-untyped-def]
    return run_folder.occupied(path, resumed_from=resumed_from, say=say)


def elsewhere(path: Path) -> tuple[int, int]:
    """Occupy `path` in another process and return its id and the pipe whose closing lets it end."""
    told, tell = os.pipe()
    heard, hear = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hear)
        with occupied(path):
            os.write(tell, b"!")
            os.read(heard, 1)
        os._exit(0)
    os.close(heard)
    assert os.read(told, 1) == b"!"
    return child, hear


def test_a_folder_in_use_is_refused_early_and_when_it_is_opened_with_who_uses_it(tmp_path: Path) -> None:
    child, pipe = elsewhere(tmp_path)
    (problem,) = run_folder.problems(tmp_path, resumed_from=None)
    assert problem.key == "output_dir" and f"a run is going on in it (process {child} on " in problem.why
    assert "name a new output_dir" in problem.remedy
    (same,) = run_folder.problems(tmp_path, resumed_from=tmp_path / "checkpoint-1")
    assert same == problem
    with pytest.raises(Refused, match=f"a run is going on in it .process {child} on "), occupied(tmp_path):
        raise AssertionError("two runs in one folder")
    os.close(pipe)
    os.waitpid(child, 0)
    assert run_folder.problems(tmp_path, resumed_from=None) == ()
    with occupied(tmp_path):
        pass


def test_a_killed_run_holds_nothing(tmp_path: Path) -> None:
    child, pipe = elsewhere(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(pipe)
    assert (tmp_path / "halo" / "lock").read_text().startswith(f"process {child} on ")
    with occupied(tmp_path):
        assert (tmp_path / "halo" / "lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_run_that_ended_in_between_is_seen_when_the_folder_is_taken(tmp_path: Path) -> None:
    with occupied(tmp_path):
        run_folder.open_folder(tmp_path, config={}, plan={}, environment={})
    with pytest.raises(Refused, match="it already holds a run"), occupied(tmp_path):
        raise AssertionError("a second run would write over the first")
    with occupied(tmp_path, resumed_from=tmp_path / "checkpoint-1"):
        pass


def test_a_file_system_without_locks_is_told_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(handle: object, kind: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    said: list[str] = []
    with occupied(tmp_path, say=said.append):
        assert said == [f"nothing keeps a second run out of {tmp_path}: its file system has no locks "
                        "([Errno 38] Function not implemented)"]
    assert run_folder.problems(tmp_path, resumed_from=None) == ()


def second_run(path: Path) -> str:
    with pytest.raises(Refused) as caught, occupied(path):
        raise AssertionError("two runs in one folder")
    return str(caught.value)


def test_processes_of_one_run_share_their_lock_and_those_of_another_are_all_refused(tmp_path: Path) -> None:
    def together() -> bool:
        with occupied(tmp_path / "shared"):
            found = lock.holder(tmp_path / "shared" / "halo" / "lock")
            process_group.barrier()  # the one that holds it stays until the other has looked
        return found is not None

    assert ranks.run(2, together) == [True, True]
    child, pipe = elsewhere(tmp_path / "used")
    for said in ranks.run(2, second_run, tmp_path / "used"):
        assert f"a run is going on in it (process {child} on " in said
    os.close(pipe)
    os.waitpid(child, 0)
