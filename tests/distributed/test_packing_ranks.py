"""Packs and flat batches over several processes: every row seen as it should be, the same packs, and resuming.

Not for the numbers of packed documents against single rows, which every architecture's proof compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from halo_core import config as configuration
from halo_core import plan
from halo_core import registry as facts
from halo_core.data.batch import Batch
from halo_core.data.collate import collate
from halo_core.kernels import documents
from halo_core.models.tiny import write_tiny
from halo_core.testing import cases, packed_runs, ranks
from halo_core.trainer import run as training

TOLERANCE = 1e-5
"""Sums in another order, fp32."""
SAID = ("yes", "a stone by the river", "no", "seven hills and a cloud over them", "green", "one", "to the sea", "ten",
        "never", "the end of it")  # fmt: skip


def chat(count: int) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"say {said}"}, {"role": "assistant", "content": said}]}
        for said in SAID[:count]
    ]


def ran(folder: Path, world: int, keys: Mapping[str, Any], rows: int = 7, **more: Any) -> list[list[tuple[int, ...]]]:
    """Return, for each rank, the row ids of each step of a run with these keys."""
    given = {
        "model_name_or_path": "tiny", "family": "lfm2", "dataset_name": "rows given in Python", "max_length": 29,
        "output_dir": str(folder), "optim": "sgd", "learning_rate": 0.01, "lr_scheduler_type": "constant",
        "save_strategy": "no", "num_train_epochs": 2, "per_device_train_batch_size": 8 // world, "seed": 3, **keys,
    }  # fmt: skip
    checked = plan.build(configuration.read(None, given=given), facts.load(), nproc=world)

    def run() -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []
        training.train(
            checked, rows=chat(rows), on_step=lambda report: seen.append(report.row_ids), say=lambda text: None, **more
        )
        return seen

    return ranks.run(world, run)


def log(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def account(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "halo" / "account.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture
def evaluated(tmp_path: Path) -> dict[str, Any]:
    """Return keys that evaluate on three rows after each epoch."""
    file = tmp_path / "evaluation.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in chat(3)), encoding="utf-8")
    return {"eval_strategy": "epoch", "eval_dataset": str(file), "per_device_eval_batch_size": 2}


@pytest.mark.parametrize("keys", [
    {}, {"padding_free": True}, {"packing": True}, {"packing": True, "padding_free": True},
    {"packing": True, "eval_packing": False}, {"packing": True, "padding_free": True, "expert_parallel_size": 2},
], ids=["rows", "flat rows", "packs", "flat packs", "packs, rows evaluated", "flat packs, shared experts"])  # fmt: skip
def test_four_ranks_end_and_see_every_row_of_seven_once_an_epoch_and_three_once_an_evaluation(
    keys: dict[str, Any], evaluated: dict[str, Any], tmp_path: Path
) -> None:
    four, one = tmp_path / "four", tmp_path / "one"
    seen = ran(four, 4, {**keys, **evaluated})
    alone = ran(one, 1, {**keys, **evaluated, "expert_parallel_size": 1})
    assert [len(steps) for steps in seen] == [2] * 4, "ranks took different numbers of steps"
    for step, window in enumerate(alone[0]):
        assert sorted(window) == list(range(7))
        assert tuple(row for rank in seen for row in rank[step]) == window, "the order is not one rank's"
    assert any(not rank[0] for rank in seen) is bool(keys.get("packing")), "only with packs has a rank nothing to do"
    told, expected = log(four), log(one)
    assert [("loss" in row, "eval_loss" in row) for row in told] == [(True, False), (False, True)] * 2
    for row, wanted in zip(told, expected, strict=True):
        counts = ("tokens", "supervised_tokens", "documents", "eval_rows", "eval_tokens", "eval_supervised_tokens")
        assert [row.get(key) for key in counts] == [wanted.get(key) for key in counts]
        for key in ("loss", "grad_norm", "eval_loss"):
            assert key not in row or row[key] == pytest.approx(wanted[key], rel=TOLERANCE)
    train, evaluation = account(four)["train"], account(four)["evaluation"]
    assert account(four) == account(one)
    assert (told[0]["documents"], told[0]["tokens"]) == (7, train["tokens"])
    assert (told[1]["eval_rows"], told[1]["eval_tokens"]) == (3, evaluation["tokens"])
    assert (train["packing"] is not None) is bool(keys.get("packing"))
    assert (evaluation["packing"] is not None) is bool(keys.get("packing") and keys.get("eval_packing") is None)
    if keys.get("padding_free"):
        assert expected[0]["padding_tokens"] == 0


def test_packs_and_their_order_are_the_same_for_one_two_and_four_ranks_and_change_with_the_epoch(
    tmp_path: Path,
) -> None:
    keys = {"packing": True, "num_train_epochs": 3}
    windows = {}
    for world in (1, 2, 4):
        split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4 // world}
        seen = ran(tmp_path / str(world), world, {**keys, **split}, rows=10)
        windows[world] = [sorted(row for rank in seen for row in rank[step]) for step in range(len(seen[0]))]
        assert all(len(rank) == len(seen[0]) for rank in seen)
    assert windows[1] == windows[2] == windows[4]
    epoch = len(windows[1]) // 3
    assert epoch > 1 and len(windows[1]) == 3 * epoch, "this should take several steps an epoch"
    parts = [windows[1][start : start + epoch] for start in range(0, len(windows[1]), epoch)]
    assert all(sorted(row for window in part for row in window) == list(range(10)) for part in parts)
    assert parts[0] != parts[1], "each epoch has an order of its own"


def test_a_resumed_run_sees_the_same_packs_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    keys = {
        "packing": True, "padding_free": True, "packing_strategy": "bfd_split", "max_length": 13, "num_train_epochs": 3,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 5,
    }  # fmt: skip
    whole, again = tmp_path / "whole", tmp_path / "again"
    seen = ran(whole, 2, keys, rows=10)
    steps_an_epoch = len(seen[0]) // 3
    assert 5 % steps_an_epoch, "the run should stop in the middle of an epoch"
    assert account(whole)["train"]["packing"]["cut_rows"] > 0
    resumed = ran(again, 2, {**keys, "resume_from_checkpoint": str(whole / "checkpoint-5")}, rows=10)
    assert resumed == [rank[5:] for rank in seen]
    strip = [{key: value for key, value in row.items() if key != "seconds"} for row in log(whole)]
    assert [{key: value for key, value in row.items() if key != "seconds"} for row in log(again)] == strip
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (whole, again))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_resuming_with_other_packs_is_refused_and_flattening_them_is_said(tmp_path: Path) -> None:
    keys = {"packing": True, "max_steps": 2, "save_strategy": "steps", "save_steps": 1, "max_length": 29}
    ran(tmp_path / "run", 1, keys)
    back = {**keys, "resume_from_checkpoint": str(tmp_path / "run" / "checkpoint-1")}
    for change in ({"max_length": 64}, {"packing": False}, {"packing_strategy": "wrapped"}):
        [(key, value)] = change.items()
        with pytest.raises(ranks.RankFailed, match=f"{key}: {str(value).lower()}\n.*this would be another run"):
            ran(tmp_path / "other", 1, {**back, **change})
    [rest] = ran(tmp_path / "flat", 1, {**back, "padding_free": True})
    assert len(rest) == 1


def test_a_run_whose_documents_see_each_other_does_not_pass_the_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaking(*given: Any, **how: Any) -> Batch:
        batch = collate(*given, **how)
        joined = batch.segment_ids.clamp(max=1)
        return replace(batch, segment_ids=joined, documents=documents.find(joined))

    registry = facts.load()
    architecture = next(one for one in registry.architectures() if one.name == "lfm2_moe")
    write_tiny(architecture, tmp_path / "model")
    cases.shake(tmp_path / "model")
    reference = {"learning_rate": torch.tensor(0.01)}
    case = cases.Case(architecture=architecture, folder=tmp_path / "model", rows=(), reference=reference)
    monkeypatch.setattr(training, "collate", leaking)
    with pytest.raises(AssertionError, match="with each row alone"):
        packed_runs.prove_packing(registry, case)
    with pytest.raises(AssertionError, match="with each row alone"):
        packed_runs.prove_padding_free(registry, case)
