"""The launch options of `halo train`: what is refused before anything starts, and what is started. Nothing is, here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halo_core.cli import launch, train
from halo_core.cli.launch import Job, job_problems, join_problems
from halo_core.cli.main import exit_code
from halo_core.ranks import Ranks

JOINED = Ranks(rank=1, world=16, local_world=8, started_by="SLURM")
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what would make this process one of several."""
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ((8, None, None, None), []),
        ((8, 1, None, None), []),
        ((8, 2, 1, "node0:29500"), []),
        ((8, 2, 1, "[::1]:29500"), []),
        ((8, 0, None, None), ["--nnodes"]),
        ((8, None, 0, None), ["--node-rank"]),
        ((8, 1, 0, "a:1"), ["--node-rank", "--rdzv-endpoint"]),
        ((8, 2, None, None), ["--nnodes", "--nnodes"]),
        ((8, 2, 2, "a:1"), ["--node-rank"]),
        ((8, 2, -1, "a:1"), ["--node-rank"]),
        ((8, 2, 0, "a"), ["--rdzv-endpoint"]),
        ((8, 2, 0, "a:port"), ["--rdzv-endpoint"]),
        ((8, 2, 0, ":29500"), ["--rdzv-endpoint"]),
        ((8, 2, 0, "a:70000"), ["--rdzv-endpoint"]),
    ],
)
def test_options_that_do_not_fit_each_other_are_refused(given: tuple[Any, ...], keys: list[str]) -> None:
    assert [problem.key for problem in job_problems(*given)] == keys


def test_only_linux_starts_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.sys, "platform", "darwin")
    assert [problem.remedy for problem in job_problems(2, None, None, None)] == ["--nproc 1"]
    assert job_problems(1, None, None, None) == []


@pytest.mark.parametrize(("nproc", "fits"), [(1, True), (8, True), (16, True), (2, False), (32, False)])
def test_nproc_may_repeat_what_something_else_has_started_but_not_contradict_it(nproc: int, fits: bool) -> None:
    problems = join_problems(nproc, JOINED)
    assert (problems == []) == fits
    assert fits or "SLURM has already started 16 processes" in problems[0].why


def test_everything_is_refused_at_once_before_torch_and_before_a_process_starts(tmp_path: Path) -> None:
    program = (
        "import sys; from halo_core.cli import launch; from halo_core.cli.main import exit_code\n"
        "launch.launch = lambda *a, **k: sys.exit('started')\n"
        "code = exit_code(sys.argv[1:]); sys.exit('torch' if 'torch' in sys.modules else code)"
    )
    words = ["train", "--nproc=3", "--nnodes=2", "learning_rat=1", "model_name_or_path=tiny"]
    said = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=tmp_path)
    assert said.returncode == 2, said.stderr
    for part in ("--node-rank 0 on the first machine", "--rdzv-endpoint HOST:PORT", "learning_rat: 1"):
        assert said.stderr.count(part) == 1, said.stderr


@pytest.mark.parametrize("variable", ["RANK", "SLURM_STEP_NUM_TASKS"])
def test_half_a_place_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str
) -> None:
    monkeypatch.setenv(variable, "2")
    assert exit_code(["train", "model_name_or_path=tiny"]) == 2
    assert "not set" in capsys.readouterr().err


def test_a_sound_run_starts_the_same_words_once_for_each_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    planned: list[int] = []

    def check(words: tuple[str, ...], options: Any, world: int, problems: Sequence[Any]) -> Any:
        assert not problems
        planned.append(world)
        return SimpleNamespace(config=SimpleNamespace(save_timeout=77.0))

    def start(command: Sequence[str], job: Job, *, save_timeout: float) -> int:
        started.append((tuple(command), job, save_timeout))
        return 130

    monkeypatch.setattr(train, "check", check)
    monkeypatch.setattr(launch, "launch", start)
    words = ["--family", "f", "--plugin", "p.py", "run.yaml", "key=a b", "--max-steps=3"]
    machines = ["--nproc", "4", "--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "a:1"]
    assert exit_code(["train", *words, *machines]) == 130
    command = (sys.executable, "-P", "-m", "halo_core.cli.main", "train", *words)
    job = Job(nproc=4, nodes=2, node_rank=1, endpoint="a:1")
    assert (started, planned) == ([(command, job, 77.0)], [8])
    assert capsys.readouterr() == ("", ""), "the launcher has said everything"


def test_the_command_of_a_process_does_not_import_from_the_folder_it_stands_in(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise SystemExit('imported from here')")
    command = launch.command(("plugins",))
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert said.returncode == 0, said.stderr


def test_processes_get_threads_and_an_address_unless_they_were_chosen(tmp_path: Path) -> None:
    chosen = {"OMP_NUM_THREADS": "5", "GLOO_SOCKET_IFNAME": "eth0"}
    job = Job(nproc=1000)
    assert set(launch.environment(job, tmp_path, chosen)) == {"HALO_ENDINGS", "HALO_LAUNCHER"}
    given = launch.environment(job, tmp_path, {})
    assert (given["OMP_NUM_THREADS"], given["GLOO_SOCKET_IFNAME"]) == ("1", "lo")
    assert "GLOO_SOCKET_IFNAME" not in launch.environment(Job(nproc=2, nodes=2), tmp_path, {})
