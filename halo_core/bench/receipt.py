"""The receipt of a measurement: one JSON file that says what ran, on what, with which result.

Not for measuring (`measure.py`). No torch here: a page is made from receipts alone (`page.py`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halo_core.checkpoint.identity import plain
from halo_core.config import RunConfig
from halo_core.config.precision import rule_of
from halo_core.model_config import TINY
from halo_core.registry import size, text_config
from halo_core.trainer import run_folder

if TYPE_CHECKING:
    from halo_core.bench.measure import Measured
    from halo_core.plan import Checked
    from halo_core.runtime import ResolvedPlan

COMMIT_VARIABLE = "HALO_COMMIT"
FORMAT = 1
KIND = "halo bench"

PLACES = ("output_dir", "run_name", "dataset_name", "datasets", "eval_dataset")
"""Keys that say where something lies, which is nobody else's business and changes nothing measured here."""


def build(
    checked: Checked, resolved: ResolvedPlan, measured: Measured, *, warmup: int, mean_length: int | None = None
) -> dict[str, Any]:
    """Return the receipt as JSON values. warmup: how many of the steps were not timed.

    mean_length: asked of rows of many lengths, in tokens; None for rows of one length.
    """
    plan, config = checked.plan, checked.config
    names = checked.architecture.spec.names.num_layers
    environment = run_folder.environment(device=resolved.device_name, plugins=dict(plan.plugins))
    degrees = dataclasses.asdict(plan.degrees)
    return {
        "kind": KIND,
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "fixture": {
            "model": _model_name(plan.model_name_or_path, plan.architecture),
            "architecture": plan.architecture,
            "layers": size(names, text_config(checked.architecture.spec, checked.model_config)),
            "guessed": list(checked.guessed),
            "parameters": measured.parameters,
            "sequence_length": config.max_length,
            "rows_per_step": plan.rows_per_step,
            "seed": config.seed,
            "dtype": resolved.as_dict()["dtype"],
            # Both names of torch's AdamW are another optimizer then, and its figures no others'.
            "optim": "adamw_bf16" if rule_of(config.optim, config.bf16) == "stochastic" else config.optim,
            "learning_rate": config.learning_rate,
            **({} if mean_length is None else {"mean_length": mean_length, "rows": measured.rows}),
        },
        "layout": {"processes": plan.degrees.world, **degrees},
        "config": plain(_changed(config)),
        "plan": {
            "digest": plan.digest(),
            "features": list(plan.features),
            "attention": resolved.attention,
            "kernels": resolved.as_dict()["kernels"],
            "dispatcher": measured.dispatcher,
        },
        "environment": {
            **{name: value for name, value in environment.items() if name != "platform"},
            "commit": commit(Path(__file__).parent),
        },
        "result": {
            "tokens_per_second_per_process": measured.tokens_per_second / plan.degrees.world,
            "step_seconds": measured.seconds,
            "timed_step_seconds": list(measured.step_seconds),
            "warmup_steps": warmup,
            "tokens_per_step": measured.tokens_per_step,
            **({} if mean_length is None else {
                "step_tokens": list(measured.step_tokens), "tokens": sum(measured.step_tokens),
                "positions": measured.positions, "seconds": sum(measured.step_seconds),
            }),
            "peak_bytes": measured.peak_bytes,
            "peak_of": "GPU memory" if resolved.device.type == "cuda" else "host memory of the process",
            "wire": {kind: dataclasses.asdict(traffic) for kind, traffic in measured.wire.items()},
            "losses": list(measured.losses),
            "grad_norms": list(measured.grad_norms),
        },
    }


def text(receipt: Mapping[str, Any]) -> str:
    """Return a receipt's result as the lines a person reads."""
    fixture, layout, result = receipt["fixture"], receipt["layout"], receipt["result"]
    sent = {kind: entry["sent"] for kind, entry in result["wire"].items()}
    by_kind = ", ".join(f"{kind} {gib(number)}" for kind, number in sent.items())
    losses, timed = result["losses"], len(result["timed_step_seconds"])
    speed = f"{result['tokens_per_second_per_process']:,.0f} tokens/s of each process"
    if "positions" in result:
        speed += (
            f": {result['tokens']:,} real tokens of {fixture['rows']} rows in {result['seconds']:.2f} s, "
            f"{1 - result['tokens'] / result['positions']:.1%} of {result['positions']:,} positions are padding"
        )
    lines = {
        "model": f"{fixture['model']}, {fixture['layers']} layers, {parameters(fixture['parameters'])}, "
                 f"{fixture['dtype']}",
        "processes": f"{layout_words(layout)}, {receipt['environment']['device']}"
                     + (f", tokens travel by {receipt['plan']['dispatcher']}" if receipt["plan"]["dispatcher"] else ""),
        "step": f"{result['step_seconds']:.4f} s, median of {timed} after {result['warmup_steps']}; "
                f"{result['tokens_per_step']:,} tokens",
        "speed": speed,
        "peak": f"{gib(result['peak_bytes'])} of {result['peak_of']}",
        "wire": f"{gib(sum(sent.values()))} leave a process per step" + (f": {by_kind}" if by_kind else ""),
        "loss": f"{losses[0]:.6f} first, {losses[-1]:.6f} after {len(losses)} steps",
    }  # fmt: skip
    return "\n".join(f"{name + ':':<11}{value}" for name, value in lines.items())


def layout_words(layout: Mapping[str, int]) -> str:
    """Return the axes of a layout that have more than one process, or the word for one process alone."""
    axes = [f"{axis} {size}" for axis, size in layout.items() if axis != "processes" and size > 1]
    return f"{layout['processes']} ({' x '.join(axes)})" if axes else "1"


def parameters(number: int) -> str:
    """Return a number of parameters for people."""
    return f"{number / 1e9:.2f} billion parameters" if number >= 1e8 else f"{number / 1e6:.2f} million parameters"


def gib(number: int) -> str:
    """Return a number of bytes for people: GiB, or MiB below a tenth of one."""
    return f"{number / 2**30:,.2f} GiB" if number >= 2**30 / 10 else f"{number / 2**20:,.3f} MiB"


def commit(checkout: Path) -> str | None:
    """Return the commit that a checkout is at, with `-dirty` where its files differ from it.

    Of a copy without its history HALO_COMMIT tells it; None where nothing does.
    """
    try:
        found = subprocess.run(
            ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True, text=True, check=False, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return os.environ.get(COMMIT_VARIABLE)
    return found.stdout.strip() if found.returncode == 0 else os.environ.get(COMMIT_VARIABLE)


def write(receipt: Mapping[str, Any], file: Path) -> None:
    """Write a receipt; a file that is there is replaced whole."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(receipt, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Return name -> receipt of every receipt in a folder, in the order of names.

    Raises:
        ValueError: a JSON file there is no receipt, or is one of another format.
    """
    found = {}
    for file in sorted(folder.glob("*.json")):
        receipt = json.loads(file.read_text(encoding="utf-8"))
        if (receipt.get("kind"), receipt.get("format")) != (KIND, FORMAT):
            raise ValueError(f"{file.name} is not a receipt of `{KIND}` in format {FORMAT}")
        found[file.stem] = receipt
    return found


def _changed(config: RunConfig) -> dict[str, Any]:
    """Return the keys whose value is not the default."""
    default = RunConfig()
    return {
        name: value for name, value in vars(config).items()
        if name not in PLACES and name != "model_name_or_path" and value != getattr(default, name)
    }


def _model_name(name: str, architecture: str) -> str:
    """Return a model's hub id, the last part of its folder's path, or which tiny model it is."""
    if name in TINY:
        return f"{name} {architecture}"
    return name if name.count("/") == 1 and not name.startswith((".", "/", "~")) else Path(name).name
