"""`halo bench` in one process on the CPU: what it trains, what it says, what it refuses. Times are not looked at."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halo_core import registry, support
from halo_core.bench import page, random_rows, random_weights, receipt
from halo_core.cli.main import exit_code
from halo_core.data.order import StepOrder
from halo_core.kernels.experts.reference import reference
from halo_core.models.build import build_meta
from halo_core.models.tiny import tiny_config

ARCHITECTURES = {architecture.name: architecture for architecture in registry.load().architectures()}
CPU = torch.device("cpu")
TOLERANCE = 1e-5
"""fp32, one loss near 8 summed in another order."""


@pytest.fixture
def halo(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*words: str | Path) -> tuple[int, str]:
        code = exit_code(["bench", *map(str, words)])
        out, err = capsys.readouterr()
        return code, out + err

    return run


def built(name: str, seed: int = 0) -> Any:
    architecture = ARCHITECTURES[name]
    config = tiny_config(architecture).to_dict()
    model = build_meta(architecture, config, dtype=torch.float32, experts=reference)
    random_weights.fill(model, CPU, seed=seed)
    return model


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_tensor_is_made_and_the_seed_decides_which(name: str) -> None:
    first, again, other = (everything(built(name, seed)) for seed in (3, 3, 4))
    for key, tensor in first.items():
        assert torch.isfinite(tensor.float()).all(), key
        assert torch.equal(tensor, again[key]), key
    random = [key for key, tensor in first.items() if tensor.detach().flatten()[:100].unique().numel() > 50]
    assert len(random) >= 10
    assert all(not torch.equal(first[key], other[key]) for key in random if isinstance(first[key], nn.Parameter))
    values = [float(first[key].detach().flatten()[-1]) for key in random if isinstance(first[key], nn.Parameter)]
    assert len(set(values)) == len(values), "no two end alike"


def test_a_tied_head_stays_the_embedding() -> None:
    model = built("lfm2_moe")
    assert model.config.tie_word_embeddings
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_buffer_that_the_model_does_not_compute_is_an_error() -> None:
    architecture = ARCHITECTURES["qwen3"]
    model = build_meta(architecture, tiny_config(architecture).to_dict(), dtype=torch.float32)
    model.get_decoder().norm.register_buffer("scale", torch.empty(3, device="meta"))
    with pytest.raises(RuntimeError, match=r"norm\.scale"):
        random_weights.fill(model, CPU, seed=0)


def test_the_first_loss_is_that_of_transformers_on_the_same_weights_and_rows(
    halo: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    out = tmp_path / "receipt.json"
    code, said = halo("--model", "tiny", "--family", "qwen3", "--seq", 20, "--batch", 2, "--steps", 2, "--warmup", 1,
                      "--out", out, "gradient_accumulation_steps=2", "seed=5")  # fmt: skip
    assert code == 0, said
    found = json.loads(out.read_text())
    architecture = ARCHITECTURES["qwen3_moe"]
    model = built("qwen3_moe", seed=5)
    rows = random_rows.make(16, length=20, vocab_size=model.config.vocab_size, seed=5)
    window = StepOrder(num_rows=16, per_device=2, data_ranks=1, accumulation=2, seed=5).window(1)
    tokens = torch.tensor([rows[index].input_ids for index in window])
    assert tokens.shape == (4, 20)
    plain = build_meta(architecture, model.config.to_dict(), dtype=torch.float32)  # transformers' own experts
    random_weights.fill(plain, CPU, seed=5)
    expected = plain(input_ids=tokens, labels=tokens).loss.item()
    assert abs(found["result"]["losses"][0] - expected) < TOLERANCE
    assert len(found["result"]["losses"]) == len(found["result"]["grad_norms"]) == 3
    assert len(set(found["result"]["losses"])) == 3
    assert found["result"]["tokens_per_step"] == 80
    assert found["result"]["wire"] == {}
    assert found["fixture"]["rows_per_step"] == 4


def test_a_receipt_says_what_ran_and_nothing_of_the_machines_folders(
    halo: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    (tmp_path / "my-model").mkdir()
    config = {"model_type": "qwen3_moe", **ARCHITECTURES["qwen3_moe"].spec.tiny, "vocab_size": 300}
    (tmp_path / "my-model" / "config.json").write_text(json.dumps(config))
    yaml = tmp_path / "run.yaml"
    yaml.write_text(f"dataset_name: {tmp_path}/rows.jsonl\noutput_dir: {tmp_path}\noptim: sgd\nlearning_rate: 0.1\n")
    out = tmp_path / "receipt.json"
    code, said = halo(yaml, "--model", tmp_path / "my-model" / "config.json", "--layers", 2, "--seq", 9, "--batch", 1,
                      "--steps", 1, "--warmup", 0, "--out", out)  # fmt: skip
    assert code == 0, said
    text = out.read_text()
    found = json.loads(text)
    assert str(tmp_path) not in text
    assert found["fixture"] | {"parameters": 0} == {
        "model": "my-model", "architecture": "qwen3_moe", "layers": 2, "guessed": [], "parameters": 0,
        "sequence_length": 9, "rows_per_step": 1, "seed": 42, "dtype": "float32", "optim": "sgd", "learning_rate": 0.1,
    }  # fmt: skip
    assert found["layout"] == dict.fromkeys(("processes", "replicate", "shard", "cp", "ep", "etp"), 1)
    assert found["environment"]["torch"] == torch.__version__
    assert len(found["result"]["timed_step_seconds"]) == 1
    assert receipt.read(tmp_path) == {"receipt": found}
    assert "2 layers" in said and "my-model" in said


def test_rows_of_many_lengths_are_the_same_however_they_are_laid_out(
    halo: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_too = {"packing", "padding_free"}
    monkeypatch.setattr(
        support, "MECHANISMS", tuple(replace(m, built=m.built or m.feature in built_too) for m in support.MECHANISMS)
    )
    lengths = [len(row.input_ids) for row in random_rows.make(12, length=64, mean_length=16, vocab_size=99, seed=42)]
    assert lengths == sorted(lengths) and 0.8 * 16 < sum(lengths) / 12 < 1.2 * 16 and min(lengths) >= 2
    found = {}
    for name, keys in {"padded": (), "packed": ("packing=true",), "flat": ("padding_free=true",)}.items():
        code, said = halo("--model", "tiny", "--family", "qwen3", "--seq", 64, "--mean-length", 16, "--rows", 12,
                          "--batch", 2, "--warmup", 1, "--out", tmp_path / f"{name}.json", *keys)  # fmt: skip
        assert code == 0, said
        found[name] = json.loads((tmp_path / f"{name}.json").read_text())
    results = {name: one["result"] for name, one in found.items()}
    assert {result["tokens"] for result in results.values()} == {sum(lengths)}, "every row, once"
    assert results["flat"]["positions"] == sum(lengths) < results["packed"]["positions"] <= 64 * 2 * 3
    assert results["padded"]["positions"] > 1.2 * sum(lengths)
    assert [len(result["timed_step_seconds"]) for result in results.values()][::2] == [6, 6]
    assert len(results["packed"]["timed_step_seconds"]) == 2
    assert results["flat"]["losses"] == pytest.approx(results["padded"]["losses"], abs=TOLERANCE)
    for result in results.values():
        speed = result["tokens"] / sum(result["timed_step_seconds"])
        assert result["tokens_per_second_per_process"] == pytest.approx(speed)
    text = page.markdown(receipt.read(tmp_path))
    rows = [line.split(" | ")[1:7] for line in text.partition("## Rows of many")[2].splitlines() if "json)" in line]
    assert [row[:3] for row in rows] == [["2", how, "sdpa"] for how in ("packed", "padded", "padding-free")]
    assert rows[1][4] == "1.00 x" and rows[2][5] == "0.0%"
    assert "## Speed and memory" not in text


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--model", "tiny", "--family", "lfm2", "--seq", "8", "--mean-length", "9"), ["--mean-length: 9", "8 tokens"]),
        (("--model", "tiny", "--family", "lfm2", "--seq", "8", "--rows", "9"), ["--rows: 9", "add --mean-length"]),
        (("--model", "openai/gpt-oss-20b", "--layers", "99"), ["--layers: 99", "from 1 to 24"]),
        (("--model", "tiny", "--family", "lfm2", "--seq", "8", "learning_rat=1"), ["learning_rat"]),
        (("--model", "tiny", "--family", "lfm2", "max_length=null"), ["max_length", "--seq 4096"]),
        (("--model", "tiny", "--family", "lfm2", "--out", "nowhere/x.json"), ["--out: nowhere/x.json", "nowhere"]),
        (("--model", "tiny", "--family", "lfm2", "lowp_precision=fp8"), ["lowp_precision"]),
        (("--seq", "8"), ["model_name_or_path", "a run needs a model"]),
    ],
)
def test_mistakes_are_refused(halo: Callable[..., tuple[int, str]], words: tuple[str, ...], parts: list[str]) -> None:
    code, said = halo(*words)
    assert code == 2
    assert all(part in said for part in parts), said


def test_weights_stored_in_a_quantised_form_are_no_obstacle_without_weights(
    halo: Callable[..., tuple[int, str]],
) -> None:
    code, said = halo("--model", "openai/gpt-oss-20b", "--layers", "1", "--seq", "8", "lowp_precision=fp8")
    assert code == 2
    assert "mxfp4" not in said
