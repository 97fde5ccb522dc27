"""The page of all receipts, as Markdown: speed and memory, and the losses of one training in several layouts.

Not for making receipts (`receipt.py`). No torch here. Nothing on the page but what a receipt holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from halo_core.bench.receipt import KIND, gib, layout_words
from halo_core.config import RunConfig

Receipts = Mapping[str, Mapping[str, Any]]

SAME_TRAINING = (
    "model", "layers", "seed", "sequence_length", "rows_per_step", "dtype", "optim", "learning_rate",
)  # fmt: skip
"""What receipts share whose losses may be laid side by side: the same steps, in whatever layout and by any kernel."""

SAME_ROWS = ("model", "layers", "seed", "sequence_length", "mean_length", "rows", "dtype", "optim")
"""What receipts of rows of many lengths share that may be laid side by side."""

PADDED = "padded"
LAYOUT_COLUMNS = (
    "receipt", "rows or packs of a batch", "rows are", "attention", "tokens/s", "against padding", "padding",
    "steps x tokens", "peak", "made",
)  # fmt: skip

HEAD = f"""# Receipts

Each receipt is a file in [receipts/](../receipts), written by `{KIND}`: the product's own training step, on a model of
a published shape with random weights, on rows of random tokens. This page is made from those files (`make docs`).

Absolute figures move from machine to machine. Two receipts may be compared as figures only when they come from one
machine on one day; each says where and when.
"""
NONE = "\nThere is no receipt yet.\n"
SPEED = """
## Speed and memory

All rows have the same length. `sent` is what leaves one process in one step by torch's collectives or DeepEP, weights
and gradients included, the mean over processes. `step` is the median of the timed steps. `peak` is the most that one
process held.

"""
LAYOUTS = """
## Rows of many lengths

Receipts of one table trained the same rows, each once, laid out in different ways; most rows are short, a few are long.
`tokens/s` counts real tokens over whole training steps. `padding` is the share of positions that hold no token.
`against padding` compares with the row of the table that is padded, has as many rows or packs in a batch, and computes
attention by the same kernel.

"""
LOSSES = """
## One training in several layouts

Receipts of one table did the same steps: the same model, weights, rows, optimizer and rate, on the same kind of device.
They differ in how many processes shared the work, in what way, and by which kernels. `difference` is the largest of any
step, against the first row.
"""


def markdown(receipts: Receipts) -> str:
    """Return the whole page. receipts: name of the file without its ending -> what it holds."""
    if not receipts:
        return HEAD + NONE
    uniform = {name: receipt for name, receipt in receipts.items() if "mean_length" not in receipt["fixture"]}
    varied = {name: receipt for name, receipt in receipts.items() if name not in uniform}
    parts = [HEAD]
    parts += [SPEED, _speed(uniform)] if uniform else []
    parts += [LAYOUTS, "\n".join(_layouts(varied))] if varied else []
    return "".join([*parts, *_losses(uniform)])


def _speed(receipts: Receipts) -> str:
    rows = []
    for name, receipt in receipts.items():
        fixture, result, plan = receipt["fixture"], receipt["result"], receipt["plan"]
        world = receipt["layout"]["processes"]
        rows.append((
            f"[{name}](../receipts/{name}.json)",
            f"{fixture['model']}, {fixture['layers']} layers",
            f"{fixture['sequence_length']} x {result['tokens_per_step'] // fixture['sequence_length'] // world}",
            layout_words(receipt["layout"]),
            how(receipt),
            f"{fixture['dtype']}, {fixture['optim']}",
            f"{plan['attention']}, {plan['kernels']['experts']}",
            f"{result['tokens_per_second_per_process']:,.0f}",
            f"{result['step_seconds']:.3f} s",
            gib(result["peak_bytes"]),
            gib(sum(entry["sent"] for entry in result["wire"].values())),
            receipt["environment"]["device"],
            _made(receipt),
        ))  # fmt: skip
    columns = (
        "receipt", "model", "tokens x rows of a process", "processes", "tokens travel by", "weights, optimizer",
        "attention, experts", "tokens/s of a process", "step", "peak", "sent", "device", "made",
    )  # fmt: skip
    return table(columns, rows)


def _layouts(receipts: Receipts) -> Iterable[str]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, receipt in receipts.items():
        key = (*(receipt["fixture"][word] for word in SAME_ROWS), receipt["environment"]["device"])
        groups.setdefault(key, []).append(name)
    for names in groups.values():
        alike = {name: (_batch(receipts[name]), _attention(receipts[name])) for name in names}
        names.sort(key=lambda name: (*alike[name], laid_out(receipts[name]), name))
        padded = {alike[name]: _per_second(receipts[name]) for name in names if laid_out(receipts[name]) == PADDED}
        rows = []
        for name in names:
            receipt, result = receipts[name], receipts[name]["result"]
            of_padding = padded.get(alike[name])
            rows.append((
                f"[{name}](../receipts/{name}.json)", str(_batch(receipt)), laid_out(receipt), _attention(receipt),
                f"{_per_second(receipt):,.0f}",
                f"{_per_second(receipt) / of_padding:.2f} x" if of_padding is not None else "-",
                f"{1 - result['tokens'] / result['positions']:.1%}",
                f"{len(result['timed_step_seconds'])} x {result['tokens_per_step']:,}", gib(result["peak_bytes"]),
                _made(receipt),
            ))  # fmt: skip
        fixture, device = receipts[names[0]]["fixture"], receipts[names[0]]["environment"]["device"]
        yield (
            f"{fixture['model']}, {fixture['layers']} layers, {fixture['rows']} rows of about "
            f"{fixture['mean_length']} tokens, at most {fixture['sequence_length']}, {fixture['dtype']}, "
            f"{fixture['optim']}, on {device}:\n\n"
        ) + table(LAYOUT_COLUMNS, rows)


def laid_out(receipt: Mapping[str, Any]) -> str:
    """Return in what way rows of many lengths were put into batches."""
    config = receipt["config"]
    packed, flat = (bool(config.get(key)) for key in ("packing", "padding_free"))
    return {(0, 0): PADDED, (1, 0): "packed", (0, 1): "padding-free", (1, 1): "packed, padding-free"}[packed, flat]


def _batch(receipt: Mapping[str, Any]) -> int:
    return int(receipt["config"].get("per_device_train_batch_size", RunConfig().per_device_train_batch_size))


def _attention(receipt: Mapping[str, Any]) -> str:
    return str(receipt["plan"]["attention"])


def _per_second(receipt: Mapping[str, Any]) -> float:
    return float(receipt["result"]["tokens_per_second_per_process"])


def _losses(receipts: Receipts) -> Iterable[str]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, receipt in receipts.items():
        key = (*(receipt["fixture"][word] for word in SAME_TRAINING), receipt["environment"]["device"])
        groups.setdefault(key, []).append(name)
    shared = [names for names in groups.values() if len(names) > 1]
    if shared:
        yield LOSSES
    for names in shared:
        # The layout nearest to one process comes first: what the others are measured against.
        names.sort(key=lambda name: (receipts[name]["layout"]["ep"], receipts[name]["layout"]["processes"], name))
        first = receipts[names[0]]["result"]["losses"]
        fixture = receipts[names[0]]["fixture"]
        rows = []
        for name in names:
            losses = receipts[name]["result"]["losses"]
            steps = min(len(losses), len(first))
            difference = max(abs(one - other) for one, other in zip(losses, first, strict=False))
            rows.append((
                name, layout_words(receipts[name]["layout"]), how(receipts[name]), str(steps), f"{losses[0]:.6f}",
                f"{losses[steps - 1]:.6f}", f"{difference:.6f}",
            ))  # fmt: skip
        yield (
            f"\n{fixture['model']}, {fixture['layers']} layers, {fixture['rows_per_step']} rows of "
            f"{fixture['sequence_length']} tokens a step, {fixture['dtype']}, {fixture['optim']}:\n\n"
        )
        columns = (
            "receipt", "processes", "tokens travel by", "steps", "first loss", "last loss", "difference",
        )  # fmt: skip
        yield table(columns, rows)


def how(receipt: Mapping[str, Any]) -> str:
    """Return what tokens travel by to their experts."""
    return receipt["plan"].get("dispatcher") or "-"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _made(receipt: Mapping[str, Any]) -> str:
    versions = receipt["environment"]
    commit, _, changed = str(versions["commit"] or "unknown").partition("-")
    commit = f"{commit[:10]} with changes" if changed else commit[:10]
    return f"{receipt['date'][:10]}, torch {versions['torch']}, transformers {versions['transformers']}, at {commit}"
