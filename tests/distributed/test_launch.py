"""The launcher on one machine: what reaches the processes, whose error is told, and who ends whom. No training here."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from halo_core.cli import endings, launch, watch
from halo_core.cli.watch import Watch
from tests.distributed import launchers
from tests.distributed.launchers import Forked

REFUSED = "halo: refused\npacking: true\n    why: this cannot be\n    do:  packing: false\n"


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each launcher a folder of temporary files of its own."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    return scratch


def test_processes_get_words_variables_and_folder_and_only_rank_0_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_is_left: Path
) -> None:
    monkeypatch.setenv("HALO_OF_THE_TEST", "a variable")
    monkeypatch.chdir(tmp_path)
    words = ["key=$HOME $$ ${local_rank}", "--plugin", "über/file.py"]
    ended = launchers.run("says_what_it_got", *words)
    assert (ended.code, ended.err) == (0, "")
    assert [json.loads(line) for line in ended.out.splitlines()] == [
        {"words": words, "variable": "a variable", "folder": str(tmp_path), "moment": "said by 0", "any": True,
         "rank": 0, "world": 2}
    ]
    assert list(nothing_is_left.iterdir()) == []


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """End the others soon after a failure: they are stuck."""
    monkeypatch.setattr(watch, "GRACE", 0.2)


@pytest.mark.parametrize("act", ["refuses_everywhere", "refuses_alike"])
def test_a_refusal_of_every_rank_is_told_once_with_exit_code_2(act: str, nothing_is_left: Path) -> None:
    ended = launchers.run(act, nproc=3)
    assert (ended.code, ended.out, ended.err) == (2, "", REFUSED)
    assert list(nothing_is_left.iterdir()) == []


def test_a_refusal_of_one_rank_is_every_ranks_and_told_once_with_its_name() -> None:
    ended = launchers.run("refuses_on_one")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "halo: refused\nrank 1: dataset_name: x\n    why: no such file\n    do:  copy it\n"


@pytest.mark.usefixtures("impatient")
def test_an_error_of_one_rank_is_told_alone_and_ends_the_ones_that_are_stuck() -> None:
    ended = launchers.run("one_raises", nproc=3)
    assert ended.code == 1
    lines = ended.err.splitlines()
    assert lines[:2] == ["halo: rank 1 of 3 failed first, with exit code 1", "Traceback (most recent call last):"]
    assert lines[-2:] == ["KeyError: 'the cause'", lines[-1]] and "report it" in lines[-1]
    assert "elastic" not in ended.err and ended.err.count("Traceback") == 1


@pytest.mark.usefixtures("impatient")
def test_the_exit_code_is_that_of_the_first_failing_rank() -> None:
    ended = launchers.run("one_explains_itself")
    assert (ended.code, ended.out) == (7, "")
    assert ended.err == "halo: rank 1 of 2 failed first, with exit code 7\nhalo: stopped at step 3\n"


@pytest.mark.usefixtures("impatient")
def test_a_killed_rank_ends_one_that_waits_for_it_and_its_own_fate_is_told() -> None:
    ended = launchers.run("one_is_killed")
    assert ended.code == 128 + signal.SIGKILL
    assert ended.err.splitlines()[0].startswith("halo: rank 1 of 2 was killed by SIGKILL: ")
    assert "Traceback" not in ended.err and "gloo" not in ended.err


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_dies_without_a_report_is_told_by_its_stderr_which_is_kept(nothing_is_left: Path) -> None:
    ended = launchers.run("one_dies_without_a_word")
    assert ended.code == 5
    [folder] = nothing_is_left.iterdir()
    assert ended.err.splitlines() == [
        "halo: rank 1 of 2 ended with exit code 5 and no word of its own",
        "last words on stderr",
        f"halo: what the ranks said on stderr: {folder}",
    ]
    assert (folder / "rank-1.stderr").read_text() == "last words on stderr\n"


def test_a_rank_that_only_lost_its_peer_is_not_blamed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    started = launchers.start("loses_its_peer_first", tmp_path, nproc=3)
    report = Path(tempfile.gettempdir())
    with (tmp_path / "pipe").open("w"):  # opens when rank 1 reads
        while not list(report.glob("halo-ranks-*/rank-0.json")):
            os.sched_yield()
    ended = started.ended()
    assert ended.code == 1
    assert ended.err.startswith("halo: rank 1 of 3 failed first") and "KeyError: 'the cause'" in ended.err
    assert "gloo" not in ended.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_lets_every_rank_save(tmp_path: Path, number: signal.Signals) -> None:
    heard = "SIGTERM" if number == signal.SIGHUP else number.name
    ended = launchers.run("saves_when_asked", tmp_path, int(number), nproc=3)
    assert (ended.code, ended.err) == (130, "halo: interrupted\n")
    assert ended.out.startswith(f"{heard}: finishing this step") and ended.out.count("\n") == 1
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(3)] == [heard] * 3


def test_a_second_signal_ends_ranks_that_do_not_hear(tmp_path: Path) -> None:
    ended = launchers.run("deaf", tmp_path, int(signal.SIGINT), int(signal.SIGTERM))
    assert ended.code == 130
    assert ended.err == "halo: interrupted\nhalo: a second signal ended the run at once, nothing more was saved\n"


def test_ranks_that_do_not_end_in_the_time_of_a_save_are_named_and_killed(tmp_path: Path) -> None:
    ended = launchers.run("deaf", tmp_path, int(signal.SIGINT), save_timeout=0.1)
    assert ended.code == 130
    assert ended.err == "halo: interrupted\nhalo: ranks 0-1 had not ended within save_timeout, and were killed\n"


def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    started = launchers.start("holds_a_pipe", tmp_path)
    with (tmp_path / "pipe").open() as reader:
        assert reader.read() == ""  # the end of the pipe: every process that held it is gone
    assert started.ended().code == -signal.SIGKILL


def test_the_real_command_joins_collects_and_tells_a_mistake_once(tmp_path: Path) -> None:
    plugin = tmp_path / "grumpy.py"
    plugin.write_text("from halo_core.hookspecs import hookimpl\n\n\n@hookimpl\ndef halo_sulks():\n    return ()\n")
    words = ("--plugin", str(plugin), "model_name_or_path=tiny", "learning_rat=1", f"output_dir={tmp_path / 'out'}")
    command = launch.command(("train", *words))
    ended = Forked(lambda: launch.launch(command, launch.Job(nproc=2), save_timeout=60)).ended()
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("halo: refused\n1. ") and ended.err.count("learning_rat:") == 1
    assert ended.err.count("halo_sulks is not a hook") == 1 and "rank" not in ended.err


def test_torchruns_processes_join_and_rank_0_tells_for_all() -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    words = ["--nproc-per-node", "3", "--standalone", str(launchers.LAUNCHED), "refuses_everywhere"]

    def torchrun() -> int:
        sys.argv[0] = "torchrun"
        try:
            main(words)
        except ChildFailedError:
            return 1
        return 0

    ended = Forked(torchrun).ended()
    assert ended.code == 1 and ended.err.count("why: this cannot be") == 1


@pytest.mark.parametrize(
    ("seen", "nproc", "fits"), [(1, 2, False), (2, 2, True), (0, 8, True)], ids=["too few", "enough", "none: the CPU"]
)
def test_a_process_needs_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, nothing_is_left: Path, seen: int, nproc: int, fits: bool
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    problems = launch.gpu_problems(nproc)
    assert (problems == []) == fits
    if not fits:
        assert problems[0].remedy.startswith("--nproc 1, ")
        ended = launchers.run("one_is_killed", nproc=nproc)
        assert ended.code == 2 and "1 can be seen here" in ended.err and list(nothing_is_left.iterdir()) == []


def test_a_process_is_not_seen_to_end_before_it_does(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(ours, 1)
        os._exit(3)
    seen = Watch({0: child}, tmp_path, save_timeout=1.0)
    seen.wait(0.0)
    seen.look()
    assert seen.running == (0,) and seen.ended == []
    os.write(theirs, b".")
    seen.wait(60.0)
    seen.look()
    assert seen.running == () and [(one.rank, one.code) for one in seen.ended] == [(0, 3)]
    assert os.waitpid(child, 0)[0] == child, "the launcher still reaps it"


def test_reports_of_one_look_are_ordered_by_their_time_and_cause(tmp_path: Path) -> None:
    children = {}
    for rank, (code, lost, when) in enumerate([(1, True, 1), (4, False, 3), (6, False, 2)]):
        endings.write(tmp_path, endings.Report(rank=rank, code=code, text="", lost_peer=lost, when=when))
        children[rank] = os.fork()
        if children[rank] == 0:
            os._exit(code)
    for child in children.values():
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    seen = Watch(children, tmp_path, save_timeout=1.0)
    seen.look()
    assert [one.rank for one in seen.failures] == [2, 1, 0]
    for child in children.values():
        os.waitpid(child, 0)
