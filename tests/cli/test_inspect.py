"""`halo run inspect` on the checkpoints of a real run: what it tells, and that its No is the No of `halo train`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halo_core.cli.main import exit_code

SETTINGS = {"model_name_or_path": "tiny", "family": "lfm2", "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2, "max_steps": 3, "save_steps": 1, "report_to": "none"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of run.yaml, its rows, and `out`, in which it has run."""
    folder = tmp_path_factory.mktemp("finished")
    talk = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d e"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for _ in range(3)))
    settings = {**SETTINGS, "dataset_name": folder / "rows.jsonl", "output_dir": folder / "out"}
    (folder / "run.yaml").write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
    assert exit_code(["train", str(folder / "run.yaml")]) == 0
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run, for changing."""
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    text = (folder / "run.yaml").read_text().replace(str(finished), str(folder))
    (folder / "run.yaml").write_text(text)
    return folder


def refusals(err: str) -> list[str]:
    """Return the problems of a refusal, without what tells of the command that found them."""
    text = err.removeprefix("halo: refused\n")
    parts = re.split(r"^\d+\. ", text, flags=re.MULTILINE) if re.match(r"1\. ", text) else [text]
    return [part.strip() for part in parts if part.strip()]


def test_a_whole_checkpoint_is_described_without_torch(
    finished: Path, without_torch: Callable[..., Any]
) -> None:
    ran = without_torch("run", "inspect", finished / "out" / "checkpoint-2")
    assert ran.returncode == 0, ran.stderr
    told = dict(line.split(maxsplit=1) for line in ran.stdout.splitlines())
    assert told["checkpoint"] == str(finished / "out" / "checkpoint-2")
    assert told["step"] == "2, epoch 1.00"
    assert told["model"] == "tiny (lfm2_moe, family lfm2)"
    assert told["optim"].startswith("AdamW of ") and told["optim"].endswith("(adamw_torch_fused)")
    assert "torch 2." in told["versions"] and "lfm2 " in told["plugins"]
    assert told["whole"] == "every byte is the one that was written"
    assert re.fullmatch(r"\d+ tensors, [\d,]+ bytes in 1 file", told["weights"])
    assert "by one process" in told["written"]


def test_a_runs_folder_means_its_newest_checkpoint(finished: Path, halo: Callable[..., Any]) -> None:
    code, out, _ = halo("run", "inspect", finished / "out")
    assert code == 0 and "checkpoint-3" in out.splitlines()[0]


def test_json_has_everything_in_numbers(finished: Path, halo: Callable[..., Any]) -> None:
    code, out, _ = halo("run", "inspect", finished / "out" / "checkpoint-3", "--json", "--quick")
    told = json.loads(out)
    assert code == 0
    assert (told["step"], told["world"], told["is_sound"], told["is_every_byte_read"]) == (3, 1, True, False)
    assert told["held"]["weights"]["num_bytes"] > 1_000_000 and told["held"]["optimizer"]["tensors"] > 50
    assert told["config"]["gradient_accumulation_steps"] == 2 and told["problems"] == [] and "can_resume" not in told


@pytest.mark.parametrize(
    ("damage", "said", "quickly"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-5]), r"weights.safetensors has \d+ bytes instead of", True),
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"!"), r"weights.safetensors is damaged", False),
        (lambda file: file.unlink(), r"weights.safetensors is missing", True),
        (lambda file: shutil.copy(file.parent.parent / "checkpoint-2" / file.name, file), r"is damaged", False),
    ],
    ids=["truncated", "flipped", "missing", "of another step"],
)
def test_what_is_not_whole_is_told_by_name_with_exit_code_2(
    run: Path, halo: Callable[..., Any], damage: Callable[[Path], Any], said: str, quickly: bool
) -> None:
    checkpoint = run / "out" / "checkpoint-3"
    damage(checkpoint / "weights.safetensors")
    code, out, err = halo("run", "inspect", checkpoint)
    assert code == 2 and re.search(said, out) and re.search(said, err) and "use " in err
    code, _, err = halo("run", "inspect", checkpoint, "--quick")
    assert (code == 2) == quickly
    code, out, err = halo("run", "inspect", checkpoint, "--json")
    told = json.loads(out)
    assert code == 2 and err == "" and not told["is_sound"] and re.search(said, told["problems"][0]["why"])


def test_what_is_no_checkpoint_is_refused(run: Path, halo: Callable[..., Any], tmp_path: Path) -> None:
    for folder, said in ((tmp_path / "nowhere", "it does not exist"), (run / "out" / "halo", "complete.json is miss")):
        code, out, err = halo("run", "inspect", folder)
        assert code == 2 and said in err and out == ""
    (run / "out" / "checkpoint-3" / "complete.json").unlink()
    code, _, err = halo("run", "inspect", run / "out" / "checkpoint-3")
    assert code == 2 and "it was never finished" in err


def test_files_of_the_right_size_with_other_contents_are_told_by_a_quick_look(
    run: Path, halo: Callable[..., Any]
) -> None:
    checkpoint = run / "out" / "checkpoint-3"
    weights = checkpoint / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:8] + b"?" + weights.read_bytes()[9:])
    code, out, err = halo("run", "inspect", checkpoint, "--quick")
    assert code == 2 and "weights.safetensors: its safetensors header cannot be read" in out
    assert "model_name_or_path" not in err
    state = checkpoint / "state.json"
    state.write_text(state.read_text().replace('"identity"', '"idenTity"'))
    code, _, err = halo("run", "inspect", checkpoint, "--quick")
    assert code == 2 and "state.json cannot be read: no 'identity'" in err and "Traceback" not in err


def test_a_file_that_is_no_part_of_it_is_told(run: Path, halo: Callable[..., Any]) -> None:
    (run / "out" / "checkpoint-3" / "weights-rank-0-of-2.safetensors").write_bytes(b"")
    code, out, _ = halo("run", "inspect", run / "out" / "checkpoint-3")
    assert code == 0 and "weights-rank-0-of-2.safetensors is no part of it" in out


def test_a_run_that_can_go_on_is_told_so_with_what_changes(finished: Path, without_torch: Callable[..., Any]) -> None:
    ran = without_torch("run", "inspect", finished / "out", "--config", finished / "run.yaml", "max_steps=5")
    assert ran.returncode == 0, ran.stderr
    assert "the run can go on from it" in ran.stdout
    assert "note: max_steps was 3 and is 5: the learning rate follows the new length" in ran.stdout


CHANGES = [
    ("learning_rate=1e-3",), ("gradient_accumulation_steps=3", "seed=7"), ("optim=sgd",), ("output_dir=elsewhere",),
    ("model_name_or_path=tiny-dense",), ("save_strategy=best",),
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_its_no_is_the_no_of_train_word_for_word(
    run: Path, halo: Callable[..., Any], changes: tuple[str, ...], tmp_path: Path
) -> None:
    checkpoint = run / "out" / "checkpoint-2"
    if "output_dir=elsewhere" in changes:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "metrics.jsonl").write_text("")
    code, _, told = halo("run", "inspect", checkpoint, "--config", run / "run.yaml", *changes)
    assert code == 2
    code, _, err = halo("train", run / "run.yaml", *changes, f"resume_from_checkpoint={checkpoint}")
    assert code == 2
    assert refusals(told) == refusals(err)


def test_other_processes_are_refused_with_the_value_that_restores_the_batch(
    finished: Path, halo: Callable[..., Any]
) -> None:
    at = ("run", "inspect", finished / "out" / "checkpoint-2", "--config", finished / "run.yaml")
    code, _, err = halo(*at, "--nproc", "2", "expert_parallel_size=2")
    assert code == 2 and "a step would take 4 rows" in err and "set gradient_accumulation_steps: 1" in err
    code, out, _ = halo(*at, "--nproc", "2", "expert_parallel_size=2", "gradient_accumulation_steps=1")
    assert code == 0 and "the mesh was one process and is ep 2" in out and "random numbers" in out


def test_missing_moments_are_told_and_allowed_as_in_train(run: Path, halo: Callable[..., Any]) -> None:
    (run / "out" / "checkpoint-2" / "optimizer.safetensors").unlink()
    at = ("run", "inspect", run / "out" / "checkpoint-2", "--config", run / "run.yaml")
    code, _, err = halo(*at)
    assert code == 2 and "set allow_warm_restart: true" in err
    code, out, _ = halo(*at, "allow_warm_restart=true")
    assert code == 0 and "the run can go on from it" in out


def test_moved_data_is_left_for_the_run_to_compare(run: Path, halo: Callable[..., Any]) -> None:
    shutil.copy(run / "rows.jsonl", run / "moved.jsonl")
    code, out, _ = halo("run", "inspect", run / "out", "--config", run / "run.yaml", f"dataset_name={run}/moved.jsonl")
    assert code == 0 and "compared token by token when the run starts" in out


def test_converting_to_bf16_says_what_it_did_and_refuses_a_checkpoint(
    finished: Path, halo: Callable[..., Any], tmp_path: Path
) -> None:
    code, out, _ = halo("run", "convert-to-bf16", finished / "out", tmp_path / "narrow")
    assert code == 0 and re.match(r"\d+ tensors are bf16 now, [\d,]+ bytes instead of", out)
    names = {path.name for path in (tmp_path / "narrow").iterdir()}
    assert "config.json" in names and "tokenizer.json" in names
    assert not {"halo", "metrics.jsonl", "checkpoint-3"} & names
    code, _, err = halo("run", "convert-to-bf16", finished / "out" / "checkpoint-3", tmp_path / "other")
    assert code == 2 and "it is a point to resume from" in err
