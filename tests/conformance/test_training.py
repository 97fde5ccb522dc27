"""Every architecture trains at tiny size by the Python API with the defaults of a run: the loss falls, and the exported
folder holds exactly what was trained.

Not for exports of multimodal sources, which have tests of their own.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import halo_core
from halo_core import registry
from halo_core.models import sockets
from halo_core.models.tiny import write_tiny
from halo_core.trainer import run
from halo_core.trainer.report import StepReport

ARCHITECTURES = {architecture.name: architecture for architecture in registry.load().architectures()}
STEPS = 20
FALL = 0.5
"""Mean loss of the last three steps as a share of the first three's, at most; 0.13 to 0.22 was seen."""
COLOURS = ("red", "green", "blue", "white")


def rows(number: int = 40) -> list[dict[str, Any]]:
    """Return short dialogues whose answers follow a rule."""
    generator = random.Random(5)
    found = []
    for _ in range(number):
        words = generator.choices(COLOURS, k=generator.randint(1, 5))
        user = {"role": "user", "content": f"Say the last first: {' '.join(words)}"}
        found.append({"messages": [user, {"role": "assistant", "content": " ".join(reversed(words))}]})
    return found


def keys(output_dir: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(output_dir), "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 2e-3,
        "lr_scheduler_type": "constant", "save_strategy": "no", "report_to": "none", **more,
    }


@pytest.fixture
def exported_model(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets the model a run hands to its export, as transformers made it but for the weights."""
    caught: list[Any] = []
    real = run.export

    def export(model: Any, *arguments: Any, **named: Any) -> Any:
        written = real(model, *arguments, **named)
        if hasattr(model, sockets.ATTACHED):
            sockets.detach(model)
        caught.append(model.eval())
        return written

    monkeypatch.setattr(run, "export", export)
    return caught


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(4, 40).view(2, 18), use_cache=False).logits


def reloaded(folder: Path, like: Any, **named: Any) -> Any:
    """Return the folder's model, computing by the same attention and experts functions as the trained one."""
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=like.config._attn_implementation,
        experts_implementation=like.config._experts_implementation, **named,
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tiny_model_learns_and_its_export_reloads_with_equal_logits(
    name: str, tmp_path: Path, exported_model: list[Any]
) -> None:
    architecture = ARCHITECTURES[name]
    write_tiny(architecture, tmp_path / "source")
    reports: list[StepReport] = []
    given = keys(tmp_path / "out", model_name_or_path=str(tmp_path / "source"))
    result = halo_core.train(given, rows(), reports.append)
    losses = [report.loss for report in reports]
    assert len(losses) == STEPS
    assert sum(losses[-3:]) < FALL * sum(losses[:3])
    (model,) = exported_model
    written = reloaded(result.output_dir, model)
    assert type(written) is type(model)
    assert written.dtype == torch.float32
    assert torch.equal(logits(written), logits(model))
    assert not torch.equal(logits(written), logits(reloaded(tmp_path / "source", model)))
    tokenizer = AutoTokenizer.from_pretrained(result.output_dir)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tmp_path / "source").chat_template


@pytest.mark.parametrize("name", ["lfm2_moe", "gemma4"])
def test_export_of_a_bf16_source_trained_in_fp32_is_the_trained_weights_rounded(
    name: str, tmp_path: Path, exported_model: list[Any]
) -> None:
    source = tmp_path / "source"
    write_tiny(ARCHITECTURES[name], source)
    round_to_bf16(source / "model.safetensors")
    given = keys(tmp_path / "out", model_name_or_path=str(source), dtype="float32", max_steps=3)
    result = halo_core.train(given, rows())
    (model,) = exported_model
    before, after = load_file(source / "model.safetensors"), load_file(result.output_dir / "model.safetensors")
    assert {key: tensor.dtype for key, tensor in after.items()} == {key: tensor.dtype for key, tensor in before.items()}
    # In fp32 both, so that only the weights' rounding can differ.
    rounded = reloaded(result.output_dir, model, dtype=torch.float32)
    assert not torch.equal(logits(rounded), logits(model))
    stored = rounded.state_dict()
    for key, tensor in model.state_dict().items():
        kept = tensor if key.endswith("expert_bias") else tensor.bfloat16().float()
        assert torch.equal(stored[key], kept), key
    model.load_state_dict(stored)
    assert torch.equal(logits(rounded), logits(model))


def round_to_bf16(file: Path) -> None:
    """Store a source's weights as bf16; a selection bias stays fp32, as transformers itself keeps it."""
    with safe_open(file, framework="pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(file)
    stored = {key: t if key.endswith("expert_bias") else t.bfloat16() for key, t in tensors.items()}
    save_file(stored, file, metadata=metadata)


@pytest.mark.parametrize(("family", "tiny"), [("lfm2", "tiny"), ("qwen3_5", "tiny-dense")])
def test_tiny_by_name_needs_no_folder(family: str, tiny: str, tmp_path: Path) -> None:
    given = keys(tmp_path / "out", model_name_or_path=tiny, max_steps=2)
    result = halo_core.train(given, rows(8), family=family)
    assert AutoModelForCausalLM.from_pretrained(result.output_dir).config.model_type.startswith(family)
