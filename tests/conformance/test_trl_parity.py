"""Halo's training beside TRL's SFTTrainer: the same rows in the same order give the same losses, step by step.

TRL runs in a process of its own that imports nothing of Halo (`trl_reference.py`), once for all architectures.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from safetensors.torch import load_file, save_file

import halo_core
from halo_core import registry
from halo_core.data.order import StepOrder
from halo_core.models.tiny import write_tiny

REGISTRY = registry.load()
ARCHITECTURES = {architecture.name: architecture for architecture in REGISTRY.architectures()}
SCRIPT = Path(__file__).with_name("trl_reference.py")
LOSS = 1e-4
"""Largest difference of a step's loss, over all steps. At most 2e-6 was seen: both sides are fp32, and sum in other
orders."""
SHARE = 1e-3
"""Largest difference of a step's gradient norm and learning rate, as a share of TRL's."""

TRL_ONLY = {"router_aux_loss_coef": 0.0}
"""TRL adds the auxiliary loss of routers by default, to models that compute one."""

WORDS = ("red", "blue", "green", "one", "two", "three", "four", "cat", "dog", "bird", "tree", "house", "old", "new")
SEED = 11


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One training, in keys that both sides read. num_rows: of the data, less than the steps take where epochs pass."""

    architecture: str
    num_rows: int = 60
    per_device: int = 2
    accumulation: int = 1
    steps: int = 50

    @property
    def name(self) -> str:
        """Return what the test is called."""
        return self.architecture if self.accumulation == 1 else f"{self.architecture}-accumulated"

    @property
    def keys(self) -> dict[str, Any]:
        """Return the configuration that Halo and TRL share.

        The rate keeps last-bit differences small: at 5e-4 one of them turns a router's near tie into another choice of
        expert at step 12, after which two exact runs part.
        """
        return {
            "max_length": 128, "per_device_train_batch_size": self.per_device,
            "gradient_accumulation_steps": self.accumulation, "max_steps": self.steps, "learning_rate": 3e-4,
            "lr_scheduler_type": "cosine", "warmup_steps": 5, "weight_decay": 0.01, "optim": "adamw_torch",
            "max_grad_norm": 1.0, "seed": SEED,
        }

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the data: dialogues of one or two turns and of very different lengths."""
        generator = random.Random(SEED)
        rows = []
        for _ in range(self.num_rows):
            messages = []
            for _ in range(generator.choice((1, 1, 2))):
                words = generator.choices(WORDS, k=generator.randint(1, 14))
                messages.append({"role": "user", "content": f"Say it backwards: {' '.join(words)}"})
                messages.append({"role": "assistant", "content": " ".join(reversed(words))})
            rows.append({"messages": messages})
        return rows

    @property
    def rows_in_order(self) -> list[dict[str, Any]]:
        """Return the rows of every step in Halo's order, over all epochs, as TRL is to take them from first to last."""
        order = StepOrder(num_rows=self.num_rows, per_device=self.per_device, data_ranks=1,
                          accumulation=self.accumulation, seed=SEED)
        rows = self.rows
        return [rows[index] for step in range(1, self.steps + 1) for index in order.window(step)]


# The second kind ends on a window of two micro-batches in place of three.
SETUPS = [
    *(Setup(architecture=name) for name in ARCHITECTURES),
    *(Setup(architecture=name, num_rows=20, per_device=1, accumulation=3, steps=7) for name in ("lfm2_moe", "gemma4")),
]


@pytest.fixture(scope="session")
def sources(session_folder: Path) -> Path:
    """Return a folder with every architecture's tiny model."""
    folder = session_folder / "parity"
    with FileLock(session_folder / "parity-sources.lock"):
        if not folder.exists():
            for name, architecture in ARCHITECTURES.items():
                write_tiny(architecture, folder / name)
                if architecture.family == "gemma4":
                    calm_attention(folder / name / "model.safetensors")
    return folder


def calm_attention(file: Path) -> None:
    """Scale the queries of a model that leaves the scaling of attention scores to its trained norms.

    At random weights its softmax is all but one-hot, and training is so unstable that the last bit of a sum is a
    difference of 0.1 in the loss forty steps later.
    """
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("q_norm.weight"):
            tensors[name] = tensor * len(tensor) ** -0.5
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="session")
def trl(session_folder: Path, sources: Path) -> Mapping[str, Any]:
    """Return what TRL reports per setup; the first worker to ask runs it."""
    outs = {setup.name: sources / f"trl-{setup.name}.json" for setup in SETUPS}
    with FileLock(session_folder / "parity-trl.lock"):
        if not all(out.exists() for out in outs.values()):
            _run_trl(sources, outs)
    return {name: json.loads(out.read_text()) for name, out in outs.items()}


def _run_trl(sources: Path, outs: Mapping[str, Path]) -> None:
    jobs = []
    for setup in SETUPS:
        rows = sources / f"trl-{setup.name}.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in setup.rows_in_order))
        jobs.append({"folder": str(sources / setup.architecture), "rows": str(rows), "out": str(outs[setup.name]),
                     "scratch": str(sources / "scratch"), "arguments": {**setup.keys, **TRL_ONLY}})
    (sources / "trl-jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run([sys.executable, "-P", str(SCRIPT), str(sources / "trl-jobs.json")], text=True,
                          capture_output=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-6000:]


def trained(setup: Setup, sources: Path, output_dir: Path, **changed: Any) -> list[dict[str, float]]:
    """Return the rows of metrics.jsonl of Halo's training."""
    halo_core.train(
        {
            "model_name_or_path": str(sources / setup.architecture), "output_dir": str(output_dir),
            "gradient_checkpointing": False, "save_strategy": "no", "report_to": "none", **setup.keys, **changed,
        },
        setup.rows,
    )
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def assert_follows(found: list[dict[str, float]], expected: Mapping[str, list[float]], steps: int) -> None:
    """Compare loss, gradient norm and learning rate of every step."""
    assert [len(found), *(len(values) for values in expected.values())] == [steps] * 4
    gaps = [abs(row["loss"] - loss) for row, loss in zip(found, expected["loss"], strict=True)]
    assert max(gaps) <= LOSS, f"step {gaps.index(max(gaps)) + 1}: losses differ by {max(gaps):.1e}"
    for key in ("grad_norm", "learning_rate"):
        assert [row[key] for row in found] == pytest.approx(expected[key], rel=SHARE), key


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_every_step_follows_trl(
    setup: Setup, sources: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    found = trained(setup, sources, tmp_path)
    assert_follows(found, request.getfixturevalue("trl")[setup.name], setup.steps)


@pytest.mark.parametrize(
    "changed",
    [{"seed": SEED + 1}, {"learning_rate": 3.1e-4}, {"max_grad_norm": 0.0}, {"assistant_only_loss": False}],
    ids=lambda changed: next(iter(changed)),
)
def test_another_order_rate_clip_or_mask_is_seen(
    changed: dict[str, Any], sources: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    setup = next(setup for setup in SETUPS if setup.name == "lfm2_moe-accumulated")
    found = trained(setup, sources, tmp_path, **changed)
    expected = request.getfixturevalue("trl")[setup.name]
    # The rate is compared as well; here the losses alone must tell.
    gaps = [abs(row["loss"] - loss) for row, loss in zip(found, expected["loss"], strict=True)]
    assert max(gaps) > 3 * LOSS
    with pytest.raises(AssertionError, match="losses differ"):
        assert_follows(found, expected, setup.steps)
