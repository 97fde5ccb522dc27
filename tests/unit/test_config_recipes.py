"""The recipes under examples/: each parses, and each passes a dry-run's plan without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from halo_core.config import ConfigRead, read

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted(path for path in EXAMPLES.glob("*/*.yaml") if "quickstart" not in str(path.relative_to(EXAMPLES)))
PUBLISHED = """
model_name_or_path: LiquidAI/LFM2.5-8B-A1B, expert_parallel_size: 2, moe_balancing: bias_update, save_sharded_ep: false,
use_grouped_gemm: true, fp32_router: true, attn_implementation: flash_attention_2, packing: true, max_length: 8192,
per_device_train_batch_size: 1, gradient_accumulation_steps: 8, optim: adamw_torch_fused, learning_rate: 5.0e-06
"""
"""The lines of the published recipe for two GPUs; a data set and an output_dir come to them."""


def recipe(path: Path) -> ConfigRead:
    return read(path)


def test_there_is_a_recipe_for_each_published_model() -> None:
    models = {recipe(path).config.model_name_or_path for path in RECIPES}
    assert models == {
        "LiquidAI/LFM2.5-8B-A1B",
        "openai/gpt-oss-20b",
        "Qwen/Qwen3.5-35B-A3B",
        "google/gemma-4-26B-A4B-it",
        "Qwen/Qwen3-30B-A3B",
        "Qwen/Qwen3-4B",
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_reads_without_problems_and_notes(path: Path) -> None:
    result = recipe(path)
    assert result.problems == ()
    assert result.notes == ()
    assert path.read_text().startswith("# ")
    assert f"{path.relative_to(EXAMPLES.parent)}" in path.read_text()


def test_the_recipe_for_two_gpus_has_the_published_lines_and_no_other() -> None:
    lines = (EXAMPLES / "lfm2" / "lfm2.5-8b-a1b-ep2.yaml").read_text().splitlines()
    settings = {line for line in lines if line and not line.startswith("#")}
    published = {line.strip() for line in PUBLISHED.replace("\n", " ").split(",")}
    assert published <= settings
    assert {line.partition(":")[0] for line in settings - published} == {
        "dataset_name",
        "dataset_train_split",
        "output_dir",
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_plan_of_a_recipe_lacks_only_what_is_not_built(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from halo_core import plan, registry

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = recipe(path)
    checked = plan.build(result, registry.load(), nproc=result.config.expert_parallel_size, dry_run=True)
    assert checked.plan.rows
    assert {row.word for row in checked.plan.rows} <= {"Supported", "declared", "not built yet"}
