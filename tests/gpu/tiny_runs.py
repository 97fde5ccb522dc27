"""What tests on GPUs train: a few short rows, by the whole product, in one process. No test in here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import halo_core

BF16_TOLERANCE = 0.15
"""Between losses: bf16 products in other orders, and noise on other gradients, through a few steps."""
ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"count to {number % 7 + 1}"},
            {"role": "assistant", "content": " ".join(str(n + 1) for n in range(number % 7 + 1))},
        ]
    }
    for number in range(32)
]


def losses(model: Path, out: Path, **settings: Any) -> list[float]:
    """Train eight steps from the folder `model` and return the loss of each."""
    needed = {"model_name_or_path": str(model), "output_dir": str(out), "max_steps": 8, "save_strategy": "no"}
    result = halo_core.train({**needed, **settings}, rows=ROWS)
    return [json.loads(line)["loss"] for line in (result.output_dir / "metrics.jsonl").read_text().splitlines()]
