"""The run's folder: its name, when it is refused, its records, and that all of it works without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from halo_core.checkpoint import atomic
from halo_core.trainer import run_folder

NOW = datetime(2031, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(("given", "expected"), [
    ("runs/%Y-%m-%d_%H-%M-%S", "runs/2031-02-03_04-05-06"), ("runs/100%%", "runs/100%"), ("runs/5%-off", "runs/5%-off"),
    ("runs/plain", "runs/plain"), ("%%Y", "%Y"),
])
def test_codes_of_date_and_time_are_expanded(given: str, expected: str) -> None:
    assert str(run_folder.expand(given, NOW)) == expected


def open_small(path: Path) -> run_folder.RunFolder:
    config = {"seed": 1, "learning_rate": 2e-5, "report_to": ("wandb",), "run_name": None}
    return run_folder.open_folder(path, config=config, plan={"family": "small", "where": Path("x")},
                                  environment=run_folder.environment(device="cpu", plugins={"small": "1.0"}))


def test_records_hold_the_run(tmp_path: Path) -> None:
    folder = open_small(tmp_path / "new" / "run")
    assert sorted(path.name for path in folder.records.iterdir()) == ["environment.json", "plan.json", "run.yaml"]
    assert yaml.safe_load((folder.records / "run.yaml").read_text()) == {
        "seed": 1, "learning_rate": 2e-5, "report_to": ["wandb"], "run_name": None}
    assert json.loads((folder.records / "plan.json").read_text()) == {"family": "small", "where": "x"}
    environment = json.loads((folder.records / "environment.json").read_text())
    assert environment["plugins"] == {"small": "1.0"} and environment["device"] == "cpu"
    assert environment["torch"] and environment["transformers"].startswith("5.24") and environment["python"]


def checkpoint(path: Path) -> Path:
    with atomic.publishing(path, needed=1) as writer:
        writer.file("part", [b"1"])
    return path


def test_new_and_empty_folders_and_folders_with_other_files_are_free(tmp_path: Path) -> None:
    assert run_folder.problems(tmp_path / "new", resumed_from=None) == ()
    (tmp_path / "notes.txt").write_text("mine")
    assert run_folder.problems(tmp_path, resumed_from=None) == ()


@pytest.mark.parametrize("trace", ["metrics.jsonl", "halo/run.yaml", "config.json", "model.safetensors"])
def test_folder_that_holds_a_run_or_a_model_is_refused_with_the_way_out(tmp_path: Path, trace: str) -> None:
    (tmp_path / trace).parent.mkdir(exist_ok=True)
    (tmp_path / trace).write_text("")
    (problem,) = run_folder.problems(tmp_path, resumed_from=None)
    assert problem.key == "output_dir" and trace.split("/")[0] in problem.why
    assert problem.remedy == "delete it, or name a new output_dir", "there is no checkpoint to go on from"
    checkpoint(tmp_path / "checkpoint-1")
    (problem,) = run_folder.problems(tmp_path, resumed_from=None)
    assert "resume_from_checkpoint: true" in problem.remedy


def test_resuming_is_allowed_in_the_checkpoints_own_folder_or_a_free_one_only(tmp_path: Path) -> None:
    own, other, free = tmp_path / "own", tmp_path / "other", tmp_path / "free"
    found = checkpoint(own / "checkpoint-2")
    checkpoint(other / "checkpoint-1")
    assert run_folder.problems(own, resumed_from=found) == ()
    assert run_folder.problems(free, resumed_from=found) == ()
    (problem,) = run_folder.problems(other, resumed_from=found)
    assert "belongs to another folder" in problem.why and str(own) in problem.remedy


def test_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert run_folder.problems(tmp_path / "file", resumed_from=None)[0].why == "this is a file"


def test_opening_cleans_what_a_killed_save_left(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-4.partial").mkdir()
    open_small(tmp_path)
    assert not (tmp_path / "checkpoint-4.partial").exists()


def test_refusing_a_folder_a_checkpoint_or_a_tracker_imports_no_torch() -> None:
    code = ("import sys\n"
            "from halo_core.checkpoint import atomic, find, identity, rotation\n"
            "from halo_core.trainer import metrics, policy, run_folder, trackers, stopped, interrupts, progress, best\n"
            "sys.exit(any(name.split('.')[0] in ('torch', 'transformers') for name in sys.modules))")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
