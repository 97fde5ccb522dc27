"""`python -m halo_core.bench.optimizer`: one optimizer step over billions of parameters, beside torch's and a copy.

Not the training step (`halo bench`). Weights and gradients are random; the tensors are those of decoder layers with
experts, repeated until there are enough parameters, fp32 routers among them. Prints one table, keeps a receipt.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halo_core.bench.receipt import commit, gib, parameters, write
from halo_core.kernels.adamw import choice
from halo_core.kernels.adamw.boxes import boxes_of
from halo_core.kernels.adamw.one_by_one import one_by_one
from halo_core.kernels.adamw.parts import Kernel, Part
from halo_core.kernels.adamw.rates import rates
from halo_core.optim.adamw_bf16 import AdamWBF16, AdamWFP32

KIND, FORMAT = "halo bench optimizer", 1
LAYER: Mapping[str, tuple[int, ...]] = {
    "experts.gate_up_proj": (32, 3584, 2048), "experts.down_proj": (32, 2048, 1792), "router.weight": (32, 2048),
    "q_proj.weight": (2048, 2048), "k_proj.weight": (512, 2048), "v_proj.weight": (512, 2048),
    "o_proj.weight": (2048, 2048), "operator_norm.weight": (2048,), "ffn_norm.weight": (2048,),
}  # fmt: skip
"""One decoder layer: 32 experts of width 1792 over a hidden size of 2048."""
EMBEDDING = (65536, 2048)
IN_FP32 = "router.weight"
SETTINGS: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8}
COPIED = 4 << 30
"""Bytes of the tensor whose copy says what the memory can do."""
PARITY = 1_000_003


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A step's time. seconds: between device events, the median, while the host runs ahead. alone: from an idle device
    to an idle device, with the host's part. least_bytes: what must at least be read and written. peak: bytes held."""

    name: str
    seconds: float
    alone: float
    least_bytes: int
    peak: int
    block: int | None = None
    warps: int | None = None


def shapes(total: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of whole layers until there are `total` elements; fewer get one tensor of that size."""
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": EMBEDDING}
    held = torch.Size(EMBEDDING).numel()
    for layer in itertools.count():
        if held >= total:
            break
        for name, shape in LAYER.items():
            found[f"layers.{layer}.{name}"] = shape
            held += torch.Size(shape).numel()
    return found if total >= torch.Size(EMBEDDING).numel() else {"weight": (total,), f"one.{IN_FP32}": (16,)}


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the receipt where one is asked for."""
    read = argparse.ArgumentParser(prog=f"python -m {__spec__.name}" if __spec__ else None, description=main.__doc__)
    read.add_argument("--parameters", type=float, default=4e9, help="at least so many, in whole layers")
    read.add_argument("--steps", type=int, default=20, help="steps that are timed, after a fifth as many")
    read.add_argument("--block", type=int, default=None, help="elements of a program of the fused kernel")
    read.add_argument("--warps", type=int, default=None, help="warps of a program of the fused kernel")
    read.add_argument("--sweep", action="store_true", help="try several blocks and warps, and use the fastest")
    read.add_argument("--out", type=Path, default=None, metavar="FILE.json", help="write the receipt there")
    options = read.parse_args(words)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    made = measure(device, int(options.parameters), options.steps, options.block, options.warps, options.sweep)
    print(text(made))
    if options.out is not None:
        write(made, options.out)
        print(f"receipt: {options.out}")


def measure(
    device: torch.device, total: int, steps: int, block: int | None, warps: int | None, sweep: bool
) -> dict[str, Any]:
    """Return the receipt as JSON values."""
    wanted = shapes(total)
    elements = sum(torch.Size(shape).numel() for shape in wanted.values())
    copied = copy_bandwidth(device)
    tried: list[Timed] = []
    if choice.fused_obstacle(device) is None:
        if sweep:
            tried = list(swept(device, wanted, max(5, steps // 2)))
            best = min(tried, key=lambda timed: timed.seconds)
            block, warps = best.block, best.warps
        own = configured(block, warps)
    else:
        own = lambda: one_by_one  # noqa: E731
    rows = [
        timed("AdamWBF16", device, wanted, steps, lambda groups: AdamWBF16(groups, **SETTINGS, seed=0, kernel=own())),
        timed("AdamWFP32", device, wanted, steps, lambda groups: AdamWFP32(groups, **SETTINGS, seed=0, kernel=own())),
        timed("torch AdamW(fused), bf16 state", device, wanted, steps, torchs),
        timed("torch AdamW(fused), fp32 state", device, wanted, steps, torchs, weights=torch.float32),
    ]
    rows[:2] = [replace(row, block=block, warps=warps) for row in rows[:2]]
    return {
        "kind": KIND, "format": FORMAT, "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "fixture": {"parameters": elements, "tensors": len(wanted), "timed_steps": steps},
        "environment": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": torch.__version__, "triton": triton_version(), "commit": commit(Path(__file__).parent),
        },
        "result": {
            "copy_bytes_per_second": copied, "steps": [asdict(row) for row in rows],
            "sweep": [asdict(row) for row in tried], "parity": parity(device, own()),
        },
    }  # fmt: skip


def configured(block: int | None, warps: int | None) -> Callable[[], Kernel]:
    """Return what makes the fused kernel with this block and these warps, None for its own."""
    from halo_core.kernels.adamw import fused

    return lambda: fused.Fused(block=block or fused.BLOCK, warps=warps or fused.WARPS)


def swept(device: torch.device, wanted: Mapping[str, tuple[int, ...]], steps: int) -> Iterator[Timed]:
    """Yield AdamWBF16's time for several blocks and warps."""
    for block, warps in ((512, 2), (512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8), (4096, 16)):
        own = configured(block, warps)
        found = timed("AdamWBF16", device, wanted, steps, lambda groups, own=own: AdamWBF16(
            groups, **SETTINGS, seed=0, kernel=own()))  # fmt: skip
        yield replace(found, block=block, warps=warps)


def torchs(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return torch's own optimizer."""
    return torch.optim.AdamW(groups, **SETTINGS, fused=True)


def timed(
    name: str,
    device: torch.device,
    wanted: Mapping[str, tuple[int, ...]],
    steps: int,
    build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    weights: torch.dtype = torch.bfloat16,
) -> Timed:
    """Return the time of a step; everything is made for it and let go of again."""
    generator = torch.Generator(device).manual_seed(0)
    named = []
    for number, (key, shape) in enumerate(wanted.items()):
        dtype = torch.float32 if key.endswith(IN_FP32) else weights
        parameter = torch.nn.Parameter(torch.randn(shape, dtype=dtype, device=device, generator=generator))
        parameter.grad = torch.randn(shape, dtype=dtype, device=device, generator=generator)
        named.append((key, parameter, 0.01 if number % 2 else 0.0))
    groups = [
        {"params": [(key, parameter) for key, parameter, own in named if own == decay], "weight_decay": decay}
        for decay in dict.fromkeys(decay for *_, decay in named)
    ]
    optimizer = build(groups)
    for _ in range(max(2, steps // 5)):
        optimizer.step()
    _wait(device)
    seconds = statistics.median(_between(device, optimizer.step, steps))
    alone = statistics.median(_alone(device, optimizer.step) for _ in range(steps))
    # Memory that a step must touch once: the gradient is read, all else is read and written.
    least = 0
    for _, parameter, _ in named:
        held = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor) and value.dim()]
        least += parameter.grad.nbytes + sum(2 * value.nbytes for value in held)
        least += (1 if "master" in optimizer.state[parameter] else 2) * parameter.nbytes
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    del optimizer, named, groups, parameter, held
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return Timed(name=name, seconds=seconds, alone=alone, least_bytes=least, peak=peak)


def copy_bandwidth(device: torch.device, repeats: int = 20) -> float:
    """Return bytes read and written per second by a copy within the device, the median."""
    size = COPIED if device.type == "cuda" else 1 << 24
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    target.copy_(source)
    return 2 * size / statistics.median(_between(device, lambda: target.copy_(source), repeats))


def parity(device: torch.device, kernel: Kernel) -> dict[str, int]:
    """Return how many of a million elements differ from the reference on the host after three steps, by tensor."""
    generator = torch.Generator().manual_seed(1)
    tensors = {key: torch.randn(PARITY, generator=generator).bfloat16() for key in ("weight", "first", "gradient")}
    tensors["second"] = torch.randn(PARITY, generator=generator).square().bfloat16()
    own = {key: value.clone() for key, value in tensors.items()}
    theirs = {key: value.to(device) for key, value in tensors.items()}
    scale = torch.tensor(0.731)
    for step in (1, 2, 3):
        numbers = rates(step=step, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
        places: dict[str, Any] = {"key": 0x9E3779B97F4A7C15, "step": step, "boxes": boxes_of(tensors["weight"])}
        one_by_one([Part(**own, master=None, rates=numbers, **places)], scale)
        kernel([Part(**theirs, master=None, rates=numbers, **places)], scale.to(device))
    return {"elements": PARITY, **{
        key: int((own[key].view(torch.int16) != theirs[key].cpu().view(torch.int16)).sum())
        for key in ("weight", "first", "second")
    }}  # fmt: skip


def text(made: Mapping[str, Any]) -> str:
    """Return the table that a person reads."""
    result, fixture, environment = made["result"], made["fixture"], made["environment"]
    copied = result["copy_bytes_per_second"]
    ours = result["steps"][0]["seconds"]
    head = ["optimizer", "step", "from idle to idle", "bytes", "bandwidth", "of the copy", "AdamWBF16 takes", "peak"]
    table = [head]
    for row in result["steps"]:
        rate = row["least_bytes"] / row["seconds"]
        table.append([
            row["name"], f"{row['seconds'] * 1e3:.2f} ms", f"{row['alone'] * 1e3:.2f} ms", gib(row["least_bytes"]),
            f"{rate / 1e12:.2f} TB/s", f"{rate / copied:.1%}", f"{ours / row['seconds']:.2f} of it", gib(row["peak"]),
        ])  # fmt: skip
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    tried = [
        f"block {row['block']}, {row['warps']} warps: {row['seconds'] * 1e3:.2f} ms, "
        f"{row['least_bytes'] / row['seconds'] / copied:.1%} of the copy"
        for row in result["sweep"]
    ]
    differ = result["parity"]
    return "\n".join([
        f"{parameters(fixture['parameters'])} in {fixture['tensors']} tensors, {environment['device']}, torch "
        f"{environment['torch']}, triton {environment['triton']}; a copy moves {copied / 1e12:.2f} TB/s",
        *tried, *lines,
        f"of {differ['elements']:,} elements against the reference on the host, after three steps, differ: "
        f"weight {differ['weight']}, first moment {differ['first']}, second moment {differ['second']}",
    ])  # fmt: skip


def triton_version() -> str | None:
    """Return the version of Triton, if it is there."""
    if choice.fused_obstacle(torch.device("cuda")) is not None:
        return None
    import triton

    return str(triton.__version__)


def _between(device: torch.device, run: Callable[[], Any], repeats: int) -> list[float]:
    """Return the seconds of each run, by events on the device, which the host does not wait for in between."""
    if device.type != "cuda":
        return [_alone(device, run) for _ in range(repeats)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    _wait(device)
    return [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(events)]


def _alone(device: torch.device, run: Callable[[], Any]) -> float:
    _wait(device)
    begin = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
