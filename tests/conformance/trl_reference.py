"""What TRL's SFTTrainer reports step by step: a script of its own process, by path, that imports nothing of Halo.

Not a test. Its one argument is a JSON file with a list of jobs:

    {"folder": HF folder, "rows": JSONL of {"messages": ...} in the order of training, "out": JSON file to write,
     "scratch": folder, "arguments": {SFTConfig key: value}}

`out` gets {"loss": [...], "grad_norm": [...], "learning_rate": [...]}, one entry per optimizer step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig, SFTTrainer

KEYS = ("loss", "grad_norm", "learning_rate")


def main(jobs_file: Path) -> None:
    """Train every job of the file, in order."""
    datasets.disable_progress_bars()
    for job in json.loads(jobs_file.read_text(encoding="utf-8")):
        Path(job["out"]).write_text(json.dumps(train(job)), encoding="utf-8")
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] in ("halo_core", "halo_families"))
    assert not loaded, f"the reference must not know Halo, but it imported {', '.join(loaded)}"


def train(job: dict[str, Any]) -> dict[str, list[float]]:
    """Return what the trainer logged at every step, unrounded."""
    text = Path(job["rows"]).read_text(encoding="utf-8")
    rows = datasets.Dataset.from_list([json.loads(line) for line in text.splitlines()])
    arguments = SFTConfig(
        output_dir=job["scratch"],
        train_sampling_strategy="sequential",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        packing=False,
        assistant_only_loss=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": torch.float32},
        **job["arguments"],
    )
    trainer = SFTTrainer(model=job["folder"], args=arguments, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {key: [entry[key] for entry in steps] for key in KEYS}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
