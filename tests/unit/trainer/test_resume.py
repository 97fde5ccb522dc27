"""A resumed run is the uninterrupted run, bit for bit; another run is refused by name. Not for writing folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from halo_core.checkpoint import atomic, find, resume
from halo_core.checkpoint.find import OPTIMIZER, WEIGHTS
from halo_core.checkpoint.identity import BATCH, DATA, HARMLESS, LENGTH, Identity, data_of, differences
from halo_core.checkpoint.save import stored_weights
from halo_core.config.keys import KEYS
from halo_core.errors import Refused
from halo_core.trainer.interrupts import Interrupts

# 10 rows, 2 x 2 a step: 3 steps an epoch, the last of them short.
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_run_resumed_in_the_middle_of_an_epoch_is_bit_equal(
    small: Any, tmp_path: Path, optim: str, dropout: float
) -> None:
    common = {**EVERY_STEP, "optim": optim, "dropout": dropout, "weight_decay": 0.01, "warmup_steps": 2,
              "lr_scheduler_type": "cosine", "max_grad_norm": 0.5}
    whole = small.run(tmp_path / "whole", raises=True, **common)
    first = small.run(tmp_path / "parts", stop_after=6, **common)
    assert isinstance(first.error, SystemExit)
    second = small.run(tmp_path / "parts", resume_from_checkpoint=True, raises=True, **common)
    assert second.reports[0].step == 6, "step 6 was reported but not saved, so it is made again"
    assert small.same(whole.weights(), second.weights())
    assert small.same(whole.moments(), second.moments())
    assert whole.row_ids == first.row_ids[:5] + second.row_ids
    assert whole.metric_rows() == second.metric_rows()
    assert len(whole.metric_rows()) == 9


def test_resuming_without_the_random_state_differs_so_the_comparison_can_fail(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = {**EVERY_STEP, "dropout": 0.4}
    whole = small.run(tmp_path / "whole", raises=True, **common)
    small.run(tmp_path / "parts", stop_after=6, **common)
    monkeypatch.setattr(resume, "load_random", lambda checkpoint: ())
    second = small.run(tmp_path / "parts", resume_from_checkpoint=True, raises=True, **common)
    assert not small.same(whole.weights(), second.weights())


def test_generators_that_the_checkpoint_does_not_know_start_from_the_seed(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a GPU do when the first part ran without one."""
    small.run(tmp_path / "first", dropout=0.3, stop_after=4, **EVERY_STEP)
    monkeypatch.setattr(resume, "load_random", lambda checkpoint: ())
    common = {"resume_from_checkpoint": str(tmp_path / "first"), "dropout": 0.3, "raises": True, **EVERY_STEP}
    one, other = (
        small.run(tmp_path / name, before=lambda *_, draws=draws: torch.rand(draws), **common).weights()
        for name, draws in (("one", 1), ("other", 2))
    )
    assert small.same(one, other)


def test_run_resumed_into_another_folder_is_bit_equal_and_brings_its_metrics(small: Any, tmp_path: Path) -> None:
    whole = small.run(tmp_path / "whole", raises=True, **EVERY_STEP)
    small.run(tmp_path / "old", stop_after=5, **EVERY_STEP)
    kept = (tmp_path / "old" / "metrics.jsonl").read_bytes()
    second = small.run(tmp_path / "new", resume_from_checkpoint=str(tmp_path / "old" / "checkpoint-3"), raises=True,
                       **EVERY_STEP)
    assert small.same(whole.weights(), second.weights())
    assert whole.metric_rows() == second.metric_rows()
    assert (tmp_path / "old" / "metrics.jsonl").read_bytes() == kept


def test_buffers_that_training_moves_are_restored(small: Any, tmp_path: Path) -> None:
    small.run(tmp_path, raises=True, **EVERY_STEP)
    saved = find.find(str(tmp_path / "checkpoint-4"), tmp_path)
    assert saved is not None
    model = small.model()
    resume.load_weights(saved, model)
    assert int(model.seen) > 0 and "lm_head.weight" not in stored_weights(model), "a tied tensor is stored once"


def test_true_without_a_checkpoint_says_what_was_looked_for(small: Any, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-7").mkdir()
    with pytest.raises(Refused, match=r"no complete checkpoint-<step> folder lies in .*checkpoint-7 is passed over"):
        find.find(True, tmp_path)
    with pytest.raises(Refused, match="does not exist"):
        find.find(str(tmp_path / "checkpoint-8"), tmp_path)


def test_truncated_newest_checkpoint_is_passed_over_and_set_aside(small: Any, tmp_path: Path) -> None:
    whole = small.run(tmp_path / "whole", raises=True, **EVERY_STEP)
    small.run(tmp_path / "parts", stop_after=6, **EVERY_STEP)
    weights = tmp_path / "parts" / "checkpoint-5" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1])
    second = small.run(tmp_path / "parts", resume_from_checkpoint=True, raises=True, **EVERY_STEP)
    assert second.reports[0].step == 5
    assert small.same(whole.weights(), second.weights()) and whole.metric_rows() == second.metric_rows()
    assert (tmp_path / "parts" / "checkpoint-5.set-aside").is_dir()


def test_damaged_byte_is_found_by_its_checksum(small: Any, tmp_path: Path) -> None:
    small.run(tmp_path, stop_after=3, **EVERY_STEP)
    weights = tmp_path / "checkpoint-2" / WEIGHTS
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(Refused, match=r"weights\.safetensors is damaged"):
        find.find(str(tmp_path / "checkpoint-2"), tmp_path)
    found = find.find(True, tmp_path)
    assert found is not None and found.step == 1 and "damaged" in found.skipped[0]


def test_missing_optimizer_file_is_refused_by_name(small: Any, tmp_path: Path) -> None:
    small.run(tmp_path, stop_after=3, **EVERY_STEP)
    (tmp_path / "checkpoint-2" / OPTIMIZER).unlink()
    with pytest.raises(Refused, match=r"optimizer\.safetensors is missing"):
        find.find(str(tmp_path / "checkpoint-2"), tmp_path)


def test_folder_of_checkpoints_means_its_newest(small: Any, tmp_path: Path) -> None:
    small.run(tmp_path, stop_after=4, **EVERY_STEP)
    found = find.find(str(tmp_path), tmp_path / "elsewhere")
    assert found is not None and found.path == tmp_path / "checkpoint-3"


def test_missing_and_foreign_tensors_are_all_named_and_nothing_is_copied(small: Any, tmp_path: Path) -> None:
    small.run(tmp_path, stop_after=2, **EVERY_STEP)
    checkpoint = find.find(True, tmp_path)
    assert checkpoint is not None
    model = small.model()
    model.renamed = model.mix
    del model.mix
    model.norm = torch.nn.LayerNorm(8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(Refused) as refusal:
        resume.load_weights(checkpoint, model)
    text = str(refusal.value)
    assert "the checkpoint has no renamed.weight" in text and "the model has no mix.weight" in text
    assert "norm.weight is [16] there and [8] here" in text
    assert small.same(before, model.state_dict())


def test_other_dtype_is_refused(small: Any, tmp_path: Path) -> None:
    small.run(tmp_path, stop_after=2, **EVERY_STEP)
    checkpoint = find.find(True, tmp_path)
    assert checkpoint is not None
    with pytest.raises(Refused, match=r"float32 there and torch\.bfloat16 here"):
        resume.load_weights(checkpoint, small.model(dtype=torch.bfloat16))


def test_moments_of_unknown_parameters_are_refused(small: Any, tmp_path: Path) -> None:
    ran = small.run(tmp_path, stop_after=2, **EVERY_STEP)
    checkpoint = find.find(True, tmp_path)
    assert checkpoint is not None
    fewer = torch.optim.AdamW([ran.model.mix.weight])
    with pytest.raises(Refused, match=r"this run's optimizer does not update norm\.weight"):
        resume.load_optimizer(checkpoint, ran.model, fewer)
    with pytest.raises(Refused, match=r"its optimizer is AdamW and this run's is SGD"):
        resume.load_optimizer(checkpoint, ran.model, torch.optim.SGD(ran.model.parameters()))


def test_changed_run_is_refused_with_every_key_and_both_values(small: Any, tmp_path: Path) -> None:
    small.run(tmp_path, stop_after=2, **EVERY_STEP)
    changed = small.run(tmp_path, resume_from_checkpoint=True, seed=9, learning_rate=0.1,
                        per_device_train_batch_size=4, **EVERY_STEP)
    assert isinstance(changed.error, Refused)
    text = str(changed.error)
    assert "seed: 9" in text and "the checkpoint has 1," in text
    assert "learning_rate: 0.1" in text and "the checkpoint has 0.05," in text
    assert "a step would take 8 rows, and the checkpoint was made with 4" in text
    assert "gradient_accumulation_steps: 1" in text


def test_other_rows_are_refused_and_moved_ones_are_not(small: Any, tmp_path: Path) -> None:
    small.run(tmp_path, stop_after=2, dataset_name="here.jsonl", **EVERY_STEP)
    moved = small.run(tmp_path, resume_from_checkpoint=True, dataset_name="there.jsonl", **EVERY_STEP)
    assert moved.error is None
    other = small.run(tmp_path, rows=small.rows(10, seed=5), resume_from_checkpoint=True, dataset_name="there.jsonl",
                      **EVERY_STEP)
    assert isinstance(other.error, Refused) and "the rows are not those of the checkpoint" in str(other.error)


def test_harmless_changes_are_allowed_and_a_longer_run_follows_its_own_schedule(small: Any, tmp_path: Path) -> None:
    said = _Notes()
    small.run(tmp_path / "short", raises=True, max_steps=4, **EVERY_STEP)
    longer = small.run(tmp_path / "short", raises=True, max_steps=6, logging_steps=5, save_total_limit=2,
                       save_strategy="steps", save_steps=3, resume_from_checkpoint=True, reporters=(said,))
    assert [report.step for report in longer.reports] == [5, 6]
    assert said.texts == [f"going on from {tmp_path / 'short' / 'checkpoint-4'} after step 4"]
    whole = small.run(tmp_path / "whole", raises=True, max_steps=6, **EVERY_STEP)
    assert [r.learning_rate for r in longer.reports] == [r.learning_rate for r in whole.reports[4:]]
    assert [r.row_ids for r in longer.reports] == [r.row_ids for r in whole.reports[4:]]


def test_notes_tell_of_length_split_and_versions() -> None:
    first = {"max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "seed": 1}
    second = {"max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "seed": 1, "new": 1}
    data = {"count": 3, "digest": "a"}
    saved = Identity(config=first, plan={"attention": "sdpa"}, data=data, environment={"torch": "2.11"})
    now = Identity(config=second, plan={"attention": "sdpa"}, data=data, environment={"torch": "2.13"})
    problems, notes = differences(saved, now)
    assert problems == []
    assert [note.split(":")[0] for note in notes] == [
        "max_steps was 4 and is 6", "4 rows a step as before, split into 1 micro-batches instead of 2",
        "torch was 2.11 and is 2.13"]
    problems, _ = differences(saved, replace(now, plan={"attention": "eager"}))
    assert [problem.key for problem in problems] == ["the plan's attention"]


def test_keys_that_may_change_are_keys() -> None:
    names = set(KEYS)
    for keys in (HARMLESS, DATA, LENGTH, BATCH):
        assert set(keys) <= names, set(keys) - names


def test_one_changed_token_mask_or_number_changes_the_digest(small: Any) -> None:
    rows = small.rows(4)
    digests = {data_of(rows)["digest"]}
    for change in ({"row_id": 9}, {"input_ids": [*rows[1].input_ids[:-1], 0]},
                   {"supervised": [not flag for flag in rows[1].supervised]}):
        digests.add(data_of([rows[0], replace(rows[1], **change), *rows[2:]])["digest"])
    digests.add(data_of(rows[::-1])["digest"])
    assert len(digests) == 5


def test_checkpoint_beyond_the_last_step_is_refused(small: Any, tmp_path: Path) -> None:
    small.run(tmp_path, raises=True, max_steps=4, **EVERY_STEP)
    shorter = small.run(tmp_path, max_steps=3, resume_from_checkpoint=True, **EVERY_STEP)
    assert isinstance(shorter.error, Refused) and "already at step 4" in str(shorter.error)


def test_finished_run_resumed_does_no_step_and_keeps_its_weights(small: Any, tmp_path: Path) -> None:
    whole = small.run(tmp_path, raises=True, max_steps=4, **EVERY_STEP)
    again = small.run(tmp_path, raises=True, max_steps=4, resume_from_checkpoint=True, **EVERY_STEP)
    assert again.reports == [] and small.same(whole.weights(), again.weights())
    assert whole.metric_rows() == again.metric_rows()


def test_later_checkpoints_are_set_aside_when_an_earlier_one_is_resumed(small: Any, tmp_path: Path) -> None:
    small.run(tmp_path, stop_after=6, **EVERY_STEP)
    again = small.run(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-2"), stop_after=4, **EVERY_STEP)
    assert [path.name for path in atomic.checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert (tmp_path / "checkpoint-5.set-aside").is_dir()
    assert [row["step"] for row in again.metric_rows()] == [1, 2, 3, 4]


def test_same_rows_a_step_in_another_split_may_resume(small: Any, tmp_path: Path) -> None:
    small.run(tmp_path, stop_after=4, **EVERY_STEP)
    other = small.run(tmp_path, resume_from_checkpoint=True, per_device_train_batch_size=1,
                      gradient_accumulation_steps=4, raises=True, **EVERY_STEP)
    whole = small.run(tmp_path / "whole", raises=True, **EVERY_STEP)
    assert other.row_ids == whole.row_ids[3:]


@pytest.mark.parametrize("number", [1, 2, 99])
def test_checkpoint_of_another_format_is_refused(small: Any, tmp_path: Path, number: int) -> None:
    small.run(tmp_path, stop_after=2, **EVERY_STEP)
    folder = tmp_path / "checkpoint-1"
    state = json.loads((folder / find.STATE).read_text())
    text = json.dumps({**state, "format": number})
    (folder / find.STATE).write_text(text)
    marker = json.loads((folder / atomic.MARKER).read_text())
    marker["files"].pop(find.STATE)
    (folder / atomic.MARKER).write_text(json.dumps(marker))
    with pytest.raises(Refused, match=f"has format {number}, and this version reads format 3"):
        find.find(str(folder), tmp_path)


def test_evaluation_missed_by_an_interrupt_is_made_up_for(small: Any, tmp_path: Path) -> None:
    common = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
              "evaluation": small.rows(5, seed=8)}
    whole = small.run(tmp_path / "whole", raises=True, **common)
    interrupts = Interrupts()
    first = small.run(tmp_path / "parts", interrupts=interrupts,
                      on_step=lambda report: interrupts.request("SIGTERM") if report.step == 4 else None, **common)
    assert first.metric_rows()[-1]["step"] == 4 and "eval_loss" not in first.metric_rows()[-1]
    # Killed before its first checkpoint, so the evaluation that was made up for is made once more.
    small.run(tmp_path / "parts", resume_from_checkpoint=True, stop_after=5, **common)
    second = small.run(tmp_path / "parts", resume_from_checkpoint=True, raises=True, **common)
    assert whole.metric_rows() == second.metric_rows()
    assert small.same(whole.weights(), second.weights())


def noted(run: Any, folder: Path, **changes: Any) -> tuple[Any, list[str]]:
    """Return a run and what it told."""
    notes = _Notes()
    return run(folder, reporters=(notes,), **changes), notes.texts


def test_a_missing_optimizer_file_is_gone_without_where_a_warm_restart_is_allowed(small: Any, tmp_path: Path) -> None:
    small.run(tmp_path, stop_after=4, **EVERY_STEP)
    for step in (1, 2, 3):
        (tmp_path / f"checkpoint-{step}" / OPTIMIZER).unlink()
    path = str(tmp_path / "checkpoint-3")
    refused = small.run(tmp_path, resume_from_checkpoint=path, **EVERY_STEP)
    assert isinstance(refused.error, Refused) and "optimizer.safetensors is missing" in str(refused.error)
    assert "set allow_warm_restart: true to go on with the weights" in str(refused.error)
    for asked in (path, True):  # the newest that can be used, where none is complete
        ran, said = noted(small.run, tmp_path, resume_from_checkpoint=asked, allow_warm_restart=True, stop_after=4,
                          **EVERY_STEP)
        assert ran.reports[0].step == 4
        assert {float(value) for name, value in ran.moments().items() if name.endswith(".step")} == {1.0}
        assert "optimizer.safetensors is missing: allow_warm_restart goes on without it" in said
        (told,) = (text for text in said if text.startswith("the moments of 6 of 6 parameters begin at zero: "))
        assert "embed.weight" in told and "norm.bias" in told


def test_a_complete_older_checkpoint_comes_before_a_newer_one_without_its_moments(small: Any, tmp_path: Path) -> None:
    small.run(tmp_path, stop_after=4, **EVERY_STEP)
    (tmp_path / "checkpoint-3" / OPTIMIZER).unlink()
    found = find.find(True, tmp_path, warm=True)
    assert found is not None and found.step == 2 and "optimizer.safetensors is missing" in found.skipped[0]


def test_missing_weights_are_never_gone_without(small: Any, tmp_path: Path) -> None:
    small.run(tmp_path, stop_after=2, **EVERY_STEP)
    (tmp_path / "checkpoint-1" / WEIGHTS).unlink()
    for asked in (True, str(tmp_path / "checkpoint-1")):
        ran = small.run(tmp_path, resume_from_checkpoint=asked, allow_warm_restart=True, **EVERY_STEP)
        assert isinstance(ran.error, Refused) and "weights.safetensors is missing" in str(ran.error)
        assert "set allow_warm_restart" not in str(ran.error)


def test_a_missing_random_state_is_gone_without_and_told(small: Any, tmp_path: Path) -> None:
    small.run(tmp_path, stop_after=2, dropout=0.2, **EVERY_STEP)
    (tmp_path / "checkpoint-1" / find.RANDOM).unlink()
    common = {"resume_from_checkpoint": True, "dropout": 0.2, "stop_after": 2, **EVERY_STEP}
    assert isinstance(small.run(tmp_path, **common).error, Refused)
    ran, said = noted(small.run, tmp_path, allow_warm_restart=True, **common)
    assert ran.reports[0].step == 2 and "random.safetensors is missing: allow_warm_restart goes on without it" in said
    assert {float(value) for name, value in ran.moments().items() if name.endswith(".step")} == {2.0}


def test_state_of_one_parameter_that_does_not_fit_is_dropped_whole_and_named(small: Any, tmp_path: Path) -> None:
    ran = small.run(tmp_path, stop_after=2, **EVERY_STEP)
    checkpoint = find.find(True, tmp_path)
    assert checkpoint is not None
    model = ran.model
    fewer = torch.optim.AdamW([parameter for name, parameter in model.named_parameters() if name != "norm.bias"])
    (note,) = resume.load_optimizer(checkpoint, model, fewer, warm=True)
    assert note == "the optimizer's state of norm.bias is dropped: this run does not update them"
    # One moment of one parameter is taken out of the file: its count of steps goes with it.
    path = checkpoint.path / OPTIMIZER
    tensors = load_file(path)
    del tensors["exp_avg_sq/mix.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(Refused, match=r"parts of exp_avg_sq/mix\.weight are in none of its files"):
        resume.load_optimizer(checkpoint, model, torch.optim.AdamW(model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters())
    (note,) = resume.load_optimizer(checkpoint, model, optimizer, warm=True)
    assert note == "the moments of 1 of 6 parameters begin at zero: mix.weight"
    assert model.mix.weight not in optimizer.state or not optimizer.state[model.mix.weight]
    assert all(float(optimizer.state[parameter]["step"]) == 1.0
               for name, parameter in model.named_parameters() if name != "mix.weight")


def test_parameters_that_the_first_part_did_not_update_are_named(small: Any, tmp_path: Path) -> None:
    def freeze(model: Any) -> None:
        model.norm.bias.requires_grad = False

    small.run(tmp_path, stop_after=2, before=freeze, **EVERY_STEP)
    ran = small.run(tmp_path, resume_from_checkpoint=True, **EVERY_STEP)
    assert isinstance(ran.error, Refused) and "its optimizer did not update norm.bias" in str(ran.error)
    ran, said = noted(small.run, tmp_path, resume_from_checkpoint=True, allow_warm_restart=True, stop_after=2,
                      **EVERY_STEP)
    assert "the moments of 1 of 6 parameters begin at zero: norm.bias" in said


def test_another_optimizer_is_refused_and_a_warm_restart_drops_all_its_state(small: Any, tmp_path: Path) -> None:
    small.run(tmp_path, stop_after=3, **EVERY_STEP)
    other = {**EVERY_STEP, "resume_from_checkpoint": True, "optim": "sgd", "learning_rate": 0.05}
    refused = small.run(tmp_path, **other)
    assert isinstance(refused.error, Refused)
    assert "optim: sgd" in str(refused.error) and "allow_warm_restart: true" in str(refused.error)
    ran, said = noted(small.run, tmp_path, allow_warm_restart=True, **other)
    assert ran.error is None and ran.reports[0].step == 3
    assert ("the state of AdamW is dropped, since this run's optimizer is SGD: the moments of all 6 parameters begin "
            "at zero") in said


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_fp32"])
def test_bf16_weights_go_on_bit_for_bit_with_moments_and_masters_of_their_own_dtype(
    small: Any, tmp_path: Path, optim: str
) -> None:
    common = {**EVERY_STEP, "optim": optim, "dtype": torch.bfloat16, "bf16": True, "learning_rate": 1e-3}
    whole = small.run(tmp_path / "whole", raises=True, **common)
    small.run(tmp_path / "parts", stop_after=6, **common)
    second = small.run(tmp_path / "parts", resume_from_checkpoint=True, raises=True, **common)
    assert second.reports[0].step == 6 and small.same(whole.weights(), second.weights())
    one, other = (states(ran) for ran in (whole, second))
    assert one.keys() == other.keys() and len(one) > 12
    for name, value in one.items():
        assert type(value) is type(other[name])
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[name].dtype and torch.equal(value, other[name]), name
        else:
            assert value == other[name] == 9
    kinds = {name.partition("/")[0]: value for name, value in one.items()}
    assert ("master" in kinds) == (optim == "adamw_fp32")
    assert kinds["exp_avg"].dtype == (torch.float32 if optim == "adamw_fp32" else torch.bfloat16)


def states(ran: Any) -> dict[str, Any]:
    names = {parameter: name for name, parameter in ran.model.named_parameters()}
    return {f"{kind}/{names[parameter]}": value for parameter, state in ran.optimizer.state.items()
            for kind, value in state.items()}


class _Notes:
    """A reporter that keeps what is said."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def started(self, start: Any) -> None: ...
    def stepped(self, report: Any) -> None: ...
    def evaluated(self, report: Any) -> None: ...
    def ended(self) -> None: ...

    def noted(self, text: str) -> None:
        self.texts.append(text)
