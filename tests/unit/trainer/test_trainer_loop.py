"""The loop: its log, evaluation, saving, the best checkpoint, and the checks that stop it. Not for resuming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halo_core.checkpoint import atomic
from halo_core.data.rows import Row
from halo_core.trainer import loop, metrics, policy
from halo_core.trainer.report import StepReport
from halo_core.trainer.stopped import TrainingStopped


def test_loss_falls_and_every_step_is_a_row(small: Any, tmp_path: Path) -> None:
    ran = small.run(tmp_path, raises=True, rows=small.rows(10), num_train_epochs=6.0, logging_steps=7)
    rows = metrics.rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 19))
    assert rows[-1]["loss"] < 0.6 * rows[0]["loss"]
    assert list(rows[0]) == ["step", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "supervised_tokens",
                             "seconds", "documents", "padding_tokens"]
    assert [row["documents"] for row in rows[:3]] == [4, 4, 2]
    assert [row["epoch"] for row in rows[:4]] == [1 / 3, 2 / 3, 1.0, 4 / 3]
    assert rows[5]["loss"] == ran.reports[5].loss, "not rounded"
    assert ran.result.step == 18 and ran.result.last == ran.reports[-1] and ran.result.checkpoint is None


def test_every_epoch_takes_each_row_once_and_counts_its_tokens(small: Any, tmp_path: Path) -> None:
    rows = small.rows(10)
    ran = small.run(tmp_path, raises=True, rows=rows, num_train_epochs=2.0)
    for epoch in (ran.reports[:3], ran.reports[3:]):
        assert sorted(row for report in epoch for row in report.row_ids) == list(range(10))
        assert sum(report.tokens for report in epoch) == sum(len(row.input_ids) for row in rows)
        assert sum(report.supervised_tokens for report in epoch) == sum(row.num_targets for row in rows)


def test_report_carries_the_rate_the_step_used(small: Any, tmp_path: Path) -> None:
    ran = small.run(tmp_path, raises=True, max_steps=4, learning_rate=0.4, optim="sgd")
    assert [report.learning_rate for report in ran.reports] == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_rate_zero_trains_nothing_and_is_legal(small: Any, tmp_path: Path) -> None:
    start = small.model()
    ran = small.run(tmp_path, raises=True, learning_rate=0.0,
                    before=lambda model: model.load_state_dict(start.state_dict()))
    assert torch.equal(start.mix.weight, ran.model.mix.weight)


@pytest.mark.parametrize("rows", [5, 7])
def test_evaluation_counts_every_row_once_whatever_the_batch(small: Any, tmp_path: Path, rows: int) -> None:
    evaluation = small.rows(rows, seed=3)
    losses = []
    for size in (1, 2, rows, 100):
        ran = small.run(tmp_path / str(size), raises=True, evaluation=evaluation, per_device_eval_batch_size=size,
                        eval_strategy="epoch", num_train_epochs=1.0)
        report = ran.result.evaluation
        assert report.eval_rows == rows and report.eval_tokens == sum(len(row.input_ids) for row in evaluation)
        losses.append(report.eval_loss)
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-6)
    one_by_one = [small.run(tmp_path / f"row-{row.row_id}", raises=True, evaluation=[row], eval_strategy="epoch",
                            num_train_epochs=1.0).result.evaluation for row in evaluation]
    total = sum(report.eval_loss * report.eval_supervised_tokens for report in one_by_one)
    assert losses[0] == pytest.approx(total / sum(report.eval_supervised_tokens for report in one_by_one), abs=1e-6)


def test_evaluation_batches_without_supervision_leave_the_loss_finite_and_equal(small: Any, tmp_path: Path) -> None:
    evaluation = small.rows(4, seed=3)
    silent = [Row(row_id=50 + n, input_ids=[1, 2, 3], supervised=[False] * 3) for n in range(2)]
    common = {"raises": True, "eval_strategy": "epoch", "num_train_epochs": 1.0, "per_device_eval_batch_size": 2}
    plain = small.run(tmp_path / "plain", evaluation=evaluation, **common)
    mixed = small.run(tmp_path / "mixed", evaluation=[*evaluation[:2], *silent, *evaluation[2:]], **common)
    assert mixed.result.evaluation.eval_loss == plain.result.evaluation.eval_loss
    nothing = small.run(tmp_path / "nothing", evaluation=silent, **{**common, "raises": False})
    assert isinstance(nothing.error, TrainingStopped) and "none of the 2 evaluation rows" in str(nothing.error)


def test_evaluation_changes_nothing_about_training(small: Any, tmp_path: Path) -> None:
    plain = small.run(tmp_path / "plain", raises=True, dropout=0.3)
    evaluated = small.run(tmp_path / "evaluated", raises=True, dropout=0.3, evaluation=small.rows(5, seed=3),
                          eval_strategy="steps", eval_steps=2)
    assert small.same(plain.weights(), evaluated.weights())
    assert evaluated.model.training


def test_evaluation_rows_carry_eval_loss_and_no_loss(small: Any, tmp_path: Path) -> None:
    ran = small.run(tmp_path, raises=True, evaluation=small.rows(3, seed=3), eval_strategy="steps", eval_steps=4)
    rows = [row for row in ran.metric_rows() if "eval_loss" in row]
    assert [row["step"] for row in rows] == [4, 8, 9], "the last step is evaluated too"
    assert all("loss" not in row for row in rows)


@pytest.mark.parametrize(("settings", "evaluated", "saved"), [
    ({"eval_strategy": "steps", "save_strategy": "no", "logging_steps": 4}, [4, 8, 9], []),
    ({"eval_strategy": "steps", "eval_steps": 0.3, "save_strategy": "steps", "save_steps": 0.5}, [3, 6, 9], [5, 9]),
    ({"eval_strategy": "epoch", "save_strategy": "epoch"}, [3, 6, 9], [3, 6, 9]),
    ({"eval_strategy": "no", "save_strategy": "epoch", "max_steps": 5}, [], [3, 5]),
])
def test_what_follows_each_step(small: Any, settings: dict[str, Any], evaluated: list[int], saved: list[int]) -> None:
    config = small.settings(**settings)
    total = 9 if config.max_steps < 0 else config.max_steps
    rules = policy.build_policy(config, total=total, steps_per_epoch=3)
    dues = {step: rules.due(step) for step in range(1, total + 1)}
    assert [step for step, due in dues.items() if due.evaluate] == evaluated
    assert [step for step, due in dues.items() if due.save] == saved


def test_steps_save_also_at_the_end_and_rotation_keeps_the_newest(small: Any, tmp_path: Path) -> None:
    ran = small.run(tmp_path, raises=True, save_strategy="steps", save_steps=4, save_total_limit=2)
    assert [path.name for path in atomic.checkpoints(tmp_path)] == ["checkpoint-8", "checkpoint-9"]
    assert ran.result.checkpoint == tmp_path / "checkpoint-9"


def script(monkeypatch: pytest.MonkeyPatch, losses: dict[int, float]) -> None:
    """Let evaluations give these losses by step."""
    measure = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", lambda **given: replace(measure(**given), eval_loss=losses[given["step"]]))


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def test_best_checkpoint_survives_rotation_and_its_weights_are_taken_at_the_end(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5, 9: 1.0})
    models: list[Any] = []
    weights: dict[int, Any] = {}
    ran = small.run(tmp_path, raises=True, evaluation=small.rows(2, seed=3), eval_strategy="steps", eval_steps=2,
                    save_strategy="steps", save_steps=2, save_total_limit=1, load_best_model_at_end=True,
                    on_step=lambda report: weights.update({report.step: state(models[-1])}), before=models.append)
    assert [path.name for path in atomic.checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-9"]
    assert ran.result.best.step == 4 and ran.result.best.value == 1.0
    assert small.same(ran.weights(), weights[4]) and not small.same(ran.weights(), weights[9])


def test_greater_is_better_turns_the_choice_round(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, {3: 3.0, 6: 1.0, 9: 2.0})
    ran = small.run(tmp_path, raises=True, evaluation=small.rows(2, seed=3), eval_strategy="epoch",
                    save_strategy="epoch", load_best_model_at_end=True, greater_is_better=True)
    assert ran.result.best.step == 3


def test_save_strategy_best_saves_only_what_is_better(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, {2: 3.0, 4: 1.0, 6: 2.0, 8: 0.5, 9: 0.5})
    small.run(tmp_path, raises=True, evaluation=small.rows(2, seed=3), eval_strategy="steps", eval_steps=2,
              save_strategy="best")
    assert [path.name for path in atomic.checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4", "checkpoint-8"]


def test_best_is_remembered_over_a_resume(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, {2: 1.0, 4: 3.0, 6: 2.0, 8: 2.0, 9: 2.0})
    common = {"evaluation": small.rows(2, seed=3), "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps",
              "save_steps": 2, "save_total_limit": 1, "load_best_model_at_end": True}
    small.run(tmp_path, stop_after=5, **common)
    ran = small.run(tmp_path, resume_from_checkpoint=True, raises=True, **common)
    assert ran.result.best.step == 2
    assert [path.name for path in atomic.checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-9"]


@pytest.mark.parametrize(("settings", "key"), [
    ({"load_best_model_at_end": True}, "load_best_model_at_end"),
    ({"save_strategy": "best"}, "save_strategy"),
    ({"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch",
      "metric_for_best_model": "accuracy"}, "metric_for_best_model"),
    ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps",
      "save_steps": 6}, "save_steps"),
    ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.1, "save_strategy": "steps",
      "save_steps": 6}, "save_steps"),
    *[({"load_best_model_at_end": True, "eval_strategy": evaluates, "save_strategy": saves}, "save_strategy")
      for evaluates, saves in (("epoch", "no"), ("steps", "no"), ("epoch", "steps"), ("steps", "epoch"))],
])
def test_best_that_cannot_be_told_is_a_problem(small: Any, settings: dict[str, Any], key: str) -> None:
    assert [problem.key for problem in policy.check(small.settings(**settings))] == [key]


def test_best_that_can_be_told_is_none(small: Any) -> None:
    assert policy.check(small.settings()) == ()
    assert policy.check(small.settings(load_best_model_at_end=True, eval_strategy="steps", eval_steps=0.1,
                                       save_strategy="steps", save_steps=0.3)) == ()
    assert policy.check(small.settings(save_strategy="best", eval_strategy="epoch", metric_for_best_model="loss")) == ()


@pytest.mark.parametrize("total", [1, 7, 15, 31, 100])
def test_shares_of_a_run_keep_an_evaluation_at_each_save(small: Any, total: int) -> None:
    config = small.settings(load_best_model_at_end=True, eval_strategy="steps", eval_steps=0.1,
                            save_strategy="steps", save_steps=0.3)
    built = policy.build_policy(config, total=total, steps_per_epoch=5)
    due = [built.due(step) for step in range(1, total + 1)]
    assert any(point.save for point in due)
    assert all(point.evaluate for point in due if point.save)


def test_loss_that_is_not_finite_stops_with_step_name_and_last_checkpoint(small: Any, tmp_path: Path) -> None:
    models: list[Any] = []

    def plant(report: StepReport) -> None:
        if report.step == 3:
            with torch.no_grad():
                models[-1].mix.weight[0, 0] = float("nan")

    ran = small.run(tmp_path, before=models.append, on_step=plant, save_strategy="steps", save_steps=2)
    assert isinstance(ran.error, TrainingStopped) and ran.error.step == 4
    text = str(ran.error)
    assert "stopped at step 4" in text and "mix.weight" in text and str(tmp_path / "checkpoint-2") in text
    assert atomic.faults(tmp_path / "checkpoint-2", contents=True) == []
    assert [row["step"] for row in ran.metric_rows()] == [1, 2, 3]


def test_rate_that_blows_up_stops_and_leaves_the_checkpoint(small: Any, tmp_path: Path) -> None:
    ran = small.run(tmp_path, learning_rate=1e30, optim="sgd", max_grad_norm=0.0, save_strategy="steps", save_steps=1,
                    lr_scheduler_type="constant", num_train_epochs=20.0)
    assert isinstance(ran.error, TrainingStopped) and "not finite" in str(ran.error)
    assert ran.error.checkpoint is not None and atomic.faults(ran.error.checkpoint, contents=True) == []


def test_weights_that_never_move_stop_the_run(small: Any, tmp_path: Path) -> None:
    ran = small.run(tmp_path / "tiny-rate", dtype=torch.bfloat16, optim="sgd", learning_rate=1e-12,
                    before=lambda model: [p.data.fill_(1.0) for p in model.parameters()])
    assert isinstance(ran.error, TrainingStopped) and ran.error.step == 3
    assert "no weight changed in 3 steps" in str(ran.error)
    assert "1" in str(ran.error) and "smaller than the weights' dtype can hold" in str(ran.error)


def test_gradients_that_are_all_zero_stop_the_run_as_such(small: Any, tmp_path: Path) -> None:
    def silence(model: Any) -> None:
        for parameter in model.parameters():
            parameter.register_hook(torch.zeros_like)

    ran = small.run(tmp_path, before=silence, optim="sgd", warmup_steps=1)
    assert isinstance(ran.error, TrainingStopped) and "every gradient is zero" in str(ran.error)
    assert ran.error.step == 4, "the first step had rate 0 and does not count"


def test_one_weight_that_moves_is_enough(small: Any, tmp_path: Path) -> None:
    def only_scale(model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == "scale")

    assert small.run(tmp_path, before=only_scale).error is None


def test_same_seed_is_the_same_run_and_another_seed_is_not(small: Any, tmp_path: Path) -> None:
    first = small.run(tmp_path / "a", raises=True, dropout=0.3)
    again = small.run(tmp_path / "b", raises=True, dropout=0.3)
    other = small.run(tmp_path / "c", raises=True, dropout=0.3, seed=2)
    assert small.same(first.weights(), again.weights()) and first.row_ids == again.row_ids
    assert not small.same(first.weights(), other.weights()) and first.row_ids != other.row_ids
