"""Trains one small model at small learning rates under three rules of the optimizer, and draws the losses.

    python docs/pictures/small_rates.py measure [--steps N] [--workers N]      writes small-rates.json beside this file

Not for speed. `make docs` draws docs/pictures/small-rates.svg from that file. Model and text are those of
examples/chatterbot.yaml: a mixture of experts of 1.2 million parameters from random weights, and conversations that
nobody here wrote. Every run of a seed begins from the same weights, rounded to bf16, and sees the same rows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import runpy
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).resolve().parent
FIGURES = HERE / "small-rates.json"
RULES = {
    "fp32 masters": {"bf16": True, "optim": "adamw_fp32"},
    "AdamWBF16": {"bf16": True, "optim": "adamw_torch"},
    "bf16, rounded to nearest": {"dtype": "bfloat16", "optim": "adamw_torch"},
}
RATES = (1e-5,)
SEEDS = (0, 1, 2)
STEPS, WINDOW = 2000, 50
"""Steps of a run, and how many of them are one point of a curve: the mean of their losses."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: which rule, at which constant rate, from which seed."""

    rule: str
    rate: float
    seed: int


def config_of(run: Run, folder: Path, steps: int) -> dict[str, Any]:
    """Return the keys of a run whose data and model lie in `folder`."""
    return {
        "family": "lfm2", "model_name_or_path": str(folder / f"model-{run.seed}"),
        "dataset_name": str(folder / "data" / "train.jsonl"), "max_length": 256,
        "per_device_train_batch_size": 4, "gradient_checkpointing": False, "max_steps": steps,
        "learning_rate": run.rate, "lr_scheduler_type": "constant", "seed": run.seed, "save_strategy": "no",
        "logging_steps": steps, "output_dir": str(folder / f"{run.rule}-{run.rate}-{run.seed}".replace(" ", "-")),
        **RULES[run.rule],
    }  # fmt: skip


def measure(steps: int, workers: int) -> None:
    """Do every run, each in a process of its own, and write the means of their losses."""
    runs = [Run(rule=rule, rate=rate, seed=seed) for rate, seed, rule in product(RATES, SEEDS, RULES)]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        runpy.run_path(str(HERE.parents[1] / "examples" / "chatterbot" / "make_data.py"))["write"](folder / "data")
        for seed in SEEDS:
            words = ["init-tiny", "--family", "lfm2", "--out", str(folder / f"model-{seed}"), "--seed", str(seed)]
            subprocess.run([sys.executable, "-m", "halo_core.cli.main", *words], check=True)

        def losses(run: Run) -> list[float]:
            config = config_of(run, folder, steps)
            path = folder / f"{Path(config['output_dir']).name}.json"
            path.write_text(json.dumps(config), encoding="utf-8")
            subprocess.run([sys.executable, "-m", "halo_core.cli.main", "train", str(path)], check=True,
                           env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
            rows = (Path(config["output_dir"]) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            return [json.loads(row)["loss"] for row in rows]

        with ThreadPoolExecutor(workers) as pool:
            found = list(pool.map(losses, runs))
    curves = [
        {**vars(run), "loss": [round(mean(values[at : at + WINDOW]), 5) for at in range(0, steps, WINDOW)]}
        for run, values in zip(runs, found, strict=True)
    ]
    FIGURES.write_text(json.dumps(made(steps) | {"curves": curves}, indent=1) + "\n", encoding="utf-8")


def made(steps: int) -> dict[str, Any]:
    """Return with what, on what and when the runs were made."""
    import torch
    import transformers

    return {"date": date.today().isoformat(), "torch": torch.__version__, "transformers": transformers.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU",
            "steps": steps, "window": WINDOW}


WIDTH, HEIGHT, LEFT, TOP, RIGHT, GAP, FOOT = 1000, 460, 70, 60, 30, 90, 70
PANEL = (WIDTH - LEFT - RIGHT - GAP * (len(RATES) - 1)) / len(RATES)
COLOURS = {"fp32 masters": "#222222", "AdamWBF16": "#2563a8", "bf16, rounded to nearest": "#b4561a"}
INK, QUIET = "#222222", "#888888"


def svg() -> str:
    """Return the picture: a panel for each rate, in it a thin line for each seed of each rule."""
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="14" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for index, rate in enumerate(RATES):
        curves = [curve for curve in figures["curves"] if curve["rate"] == rate]
        lines += panel(round(LEFT + index * (PANEL + GAP)), curves, figures["steps"])
    at = LEFT
    for rule, colour in COLOURS.items():
        lines.append(f'<line x1="{at}" y1="{HEIGHT - 14}" x2="{at + 30}" y2="{HEIGHT - 14}" stroke="{colour}" '
                     f'stroke-width="3"/><text x="{at + 38}" y="{HEIGHT - 9}">{rule}</text>')
        at += 60 + 9 * len(rule)
    return "\n".join([*lines, "</svg>"]) + "\n"


def panel(x: int, curves: list[dict[str, Any]], steps: int) -> list[str]:
    """Return one rate's axes and curves; `x` is the left edge."""
    height = HEIGHT - TOP - FOOT
    every = [loss for curve in curves for loss in curve["loss"]]
    low, high = min(every), max(every)
    ticks = [low + (high - low) * share / 4 for share in range(5)]

    def down(loss: float) -> float:
        return TOP + height * (high - loss) / (high - low)

    lines = [f'<text x="{x}" y="{TOP - 24}">learning_rate {curves[0]["rate"]:g}, training loss by step</text>']
    for tick in ticks:
        y = round(down(tick), 1)
        lines.append(f'<line x1="{x}" y1="{y}" x2="{x + PANEL:.0f}" y2="{y}" stroke="#eeeeee"/>'
                     f'<text x="{x - 8}" y="{y + 5}" text-anchor="end" fill="{QUIET}">{tick:.2f}</text>')
    for share in range(5):
        lines.append(f'<text x="{x + PANEL * share / 4:.0f}" y="{TOP + height + 20}" text-anchor="middle" '
                     f'fill="{QUIET}">{steps * share // 4}</text>')
    for curve in curves:
        count = len(curve["loss"])
        points = " ".join(f"{x + PANEL * (at + 0.5) / count:.1f},{down(loss):.1f}"
                          for at, loss in enumerate(curve["loss"]))
        dash = ' stroke-dasharray="5 4"' if curve["rule"] == "fp32 masters" else ""
        lines.append(f'<polyline fill="none" stroke="{COLOURS[curve["rule"]]}" stroke-width="1.6"{dash} '
                     f'points="{points}"/>')
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure",))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    given = parser.parse_args()
    measure(given.steps, given.workers)
