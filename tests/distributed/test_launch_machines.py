"""Two launchers that meet on the loopback device, as two machines do. Not for one machine (`test_launch.py`)."""

from __future__ import annotations

import json
import signal
import tempfile
from pathlib import Path

import pytest

from halo_core.cli import launch, watch
from tests.distributed import launchers


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(watch, "GRACE", 0.5)


def test_ranks_follow_the_machines_and_exchange_inside_and_across_them(tmp_path: Path) -> None:
    first, second = launchers.run_two_machines("exchanges", tmp_path)
    assert (first.code, first.err, second.code, second.err) == (0, "", 0, "")
    heard = [json.loads((tmp_path / f"heard-{rank}").read_text()) for rank in range(4)]
    assert [(one["node"], one["local_rank"]) for one in heard] == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]
    assert [one["ep"] for one in heard] == [3.0, 3.0, 12.0, 12.0]
    assert [one["replicate"] for one in heard] == [5.0, 10.0, 5.0, 10.0]


def test_a_refusal_of_every_rank_is_told_on_the_machine_of_rank_0_alone() -> None:
    first, second = launchers.run_two_machines("refuses_everywhere")
    assert (first.code, second.code, second.err) == (2, 2, "")
    assert first.err.count("why: this cannot be") == 1 and first.err.startswith("halo: refused\n")


@pytest.mark.parametrize("act", ["one_machine_fails", "one_machine_ends_well"])
def test_a_failure_on_one_machine_ends_the_other_and_is_told_there_in_one_line(act: str) -> None:
    first, second = launchers.run_two_machines(act)
    assert (first.code, second.code) == (1, 1)
    assert second.err.startswith("halo: rank 3 of 4 failed first") and "KeyError: 'the cause'" in second.err
    [line] = first.err.splitlines()
    assert line.startswith("halo: rank 3 of 4 on ")
    assert line.endswith("(node rank 1) failed first (exit code 1): KeyError: 'the cause'")


def test_a_rank_killed_on_one_machine_ends_the_ranks_of_the_other_that_wait_for_it() -> None:
    first, second = launchers.run_two_machines("one_is_killed", 2)
    assert (first.code, second.code) == (137, 137)
    assert second.err.startswith("halo: rank 2 of 4 was killed by SIGKILL") and "Traceback" not in first.err
    assert first.err.startswith("halo: rank 2 of 4 on ") and "failed first (SIGKILL)" in first.err


def test_machines_that_do_not_meet_are_refused_with_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MEETING", 1)
    endpoint = f"127.0.0.1:{launchers.free_port()}"
    ended = launchers.run("refuses_alike", nodes=2, node_rank=1, endpoint=endpoint)
    assert ended.code == 2
    assert ended.err.startswith(f"halo: refused\n--rdzv-endpoint: {endpoint}  \n") or endpoint in ended.err
    assert "did not meet" in ended.err and "Traceback" not in ended.err


def test_the_others_end_when_the_launcher_that_holds_the_store_is_killed(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{launchers.free_port()}"
    first = launchers.start("holds_its_launcher", tmp_path, nodes=2, node_rank=0, endpoint=endpoint)
    second = launchers.start("holds_its_launcher", tmp_path, nodes=2, node_rank=1, endpoint=endpoint)
    assert first.ended().code == -signal.SIGKILL
    ended = second.ended()
    assert ended.code == 1 and "its launcher is gone" in ended.err and "Traceback" not in ended.err
