"""metrics.jsonl itself: unrounded rows, a torn last line, what a resume keeps. Not for what the loop reports."""

from __future__ import annotations

from pathlib import Path

from halo_core.trainer import metrics
from halo_core.trainer.report import EvaluationReport, Interval, StepReport


def report(step: int, loss: float = 1.0) -> StepReport:
    return StepReport(step=step, epoch=step / 3, loss=loss, grad_norm=step * 2.0, learning_rate=0.1 * step, tokens=10,
                      supervised_tokens=5, seconds=2.0, row_ids=(1, 2))


def test_floats_come_back_to_the_last_bit_and_rows_are_there_before_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / metrics.FILE_NAME
    file = metrics.MetricsFile(path)
    file.stepped(report(1, loss=0.1 + 0.2))
    file.evaluated(EvaluationReport(step=1, epoch=1 / 3, eval_loss=2 / 3, eval_rows=2, eval_tokens=4,
                                    eval_supervised_tokens=3, eval_seconds=0.1))
    first, second = metrics.rows(path)
    assert first["loss"] == 0.1 + 0.2 and "row_ids" not in first
    assert second["eval_loss"] == 2 / 3 and "loss" not in second
    file.ended()


def test_carrying_over_cuts_later_rows_and_a_torn_line(tmp_path: Path) -> None:
    source, target = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    file = metrics.MetricsFile(source)
    for step in (1, 2, 3):
        file.stepped(report(step))
    file.ended()
    source.write_text(source.read_text() + '{"step": 2, "lo')
    metrics.carry_over(source, target, 2)
    assert [row["step"] for row in metrics.rows(target)] == [1, 2] and len(metrics.rows(source)) == 3
    metrics.carry_over(source, source, 1)
    assert [row["step"] for row in metrics.rows(source)] == [1]
    metrics.carry_over(tmp_path / "none", tmp_path / "c.jsonl", 1)
    assert not (tmp_path / "c.jsonl").exists()


def test_interval_gives_mean_loss_summed_counts_and_the_last_norm() -> None:
    emitted: list[tuple[StepReport, int]] = []
    interval = Interval(2, lambda summary, steps: emitted.append((summary, steps)))
    for step, loss in ((1, 1.0), (2, 2.0), (3, 5.0)):
        interval.add(report(step, loss))
    interval.flush()
    interval.flush()
    assert [(s.step, s.loss, s.tokens, s.seconds, s.grad_norm, steps) for s, steps in emitted] == [
        (2, 1.5, 20, 4.0, 4.0, 2), (3, 5.0, 10, 2.0, 6.0, 1)]
