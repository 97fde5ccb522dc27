"""The guide for plugin authors: its plugin works as printed, and it speaks of every hook there is."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from halo_core import hookspecs
from halo_core import registry as facts

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")
LINES = 40
STEPS = 8
LISTENER = """
from halo_core.hookspecs import hookimpl

@hookimpl
def halo_model_ready(plan, model):
    print("model ready:", plan.family, "on", next(model.parameters()).device)

@hookimpl
def halo_step_ended(step):
    print("step ended:", step.step)
"""

Halo = Callable[..., tuple[int, str, str]]


def block_with(text: str) -> str:
    """Return the one Python block of the guide that holds this text."""
    (found,) = [block for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if text in block]
    return str(found)


def first_block() -> str:
    """Return the complete plugin, as the readme prints it too."""
    return block_with('"""Llama as a family')


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """Write the guide's plugin as a file."""
    file = tmp_path / "llama.py"
    file.write_text(first_block())
    return file


def test_the_plugin_of_the_guide_is_short_and_sound(plugin: Path) -> None:
    assert first_block().count("\n") <= LINES
    registry = facts.load((plugin,))
    assert registry.plugins.rows[-1].faults == ()
    assert [a.name for a in registry.families["llama"].architectures] == ["llama"]


def test_the_plugins_of_the_guide_train_a_tiny_model_and_hear_each_step(
    halo: Halo, plugin: Path, tmp_path: Path
) -> None:
    colours = ("red", "green", "blue", "white")
    rows = [{"text": f"the tile of number {number % 4} is {colours[number % 4]}"} for number in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["model_name_or_path=tiny-dense", "dataset_name=rows.jsonl", "output_dir=out", "save_strategy=no"]
    words += [f"max_steps={STEPS}", "per_device_train_batch_size=8", "learning_rate=3e-3"]
    tracker = tmp_path / "lines.py"
    tracker.write_text(block_with("class Lines"))
    listener = tmp_path / "listener.py"
    listener.write_text(LISTENER)
    words += ["report_to=lines", "--plugin", str(tracker), "--plugin", str(listener)]
    code, out, err = halo("train", "--plugin", plugin, "--family", "llama", *words)
    assert code == 0, err
    assert "model ready: llama on meta" in out
    assert re.findall(r"^step ended: (\d+)$", out, re.MULTILINE) == [str(step) for step in range(1, STEPS + 1)]
    metrics = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in metrics if "loss" in row]
    assert len(losses) == STEPS
    assert losses[-1] < 0.8 * losses[0]
    heard = (tmp_path / "out" / "lines.txt").read_text().splitlines()
    assert [line.split()[0] for line in heard] == [str(step) for step in range(1, STEPS + 1)]
    assert str(losses[-1]) in heard[-1]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


def test_the_guide_names_every_hook_with_its_arguments() -> None:
    hooks = {name: function for name, function in vars(hookspecs).items() if name.startswith("halo_")}
    for name, function in hooks.items():
        assert f"`{name}({', '.join(inspect.signature(function).parameters)})`" in GUIDE, name
    assert set(re.findall(r"`(halo_\w+)\(", GUIDE)) == set(hooks)


@pytest.mark.parametrize("page", ["docs/writing-a-plugin.md", "plugins/halo-mosaic/README.md"])
def test_relative_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    links = [link for link in re.findall(r"\]\(([^)#]+)", file.read_text(encoding="utf-8")) if "://" not in link]
    assert links
    assert all((file.parent / link).exists() for link in links), links
