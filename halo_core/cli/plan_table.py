"""A plan as tables for people: what a dry-run prints.

Not for deciding anything. Sizes come from a model built on the meta device, which imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from halo_core.plan import Checked, RunPlan
from halo_core.registry import size, text_config

if TYPE_CHECKING:
    from halo_core.models.sizes import Sizes
    from halo_core.optim.groups import Trained


def feature_table(plan: RunPlan) -> Table:
    """Return the run's features: verdict, which key asked, and who decides."""
    table = Table(title=f"{plan.architecture} (family {plan.family})", title_justify="left", box=None, pad_edge=False)
    for name in ("feature", "verdict", "says", "asked by"):
        table.add_column(name, no_wrap=True)
    for row in plan.rows:
        table.add_row(row.feature, row.word, row.by, f"{row.key}: {row.value}" if row.key else "every run")
    return table


def reasons(plan: RunPlan) -> list[str]:
    """Return one line per feature that is not simply Supported: why, and the way out."""
    lines = []
    for row in plan.rows:
        if row.word != "Supported":
            until = f"; until then: {row.instead}" if row.word == "not built yet" and row.instead else ""
            lines.append(f"{row.feature}: {row.reason}{until}")
    return lines


def size_table(checked: Checked, sizes: Sizes) -> Table:
    """Return parameters, and bytes of weights, gradients and optimizer state over all processes and on each of them."""
    table = Table(title="sizes, over all processes", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("each")
    for name, value, each in _size_rows(checked, sizes):
        table.add_row(name, value, each)
    return table


def parameter_table(rows: Iterable[Trained], title: str) -> Table:
    """Return what becomes of parameters: role, decay, how they are stepped, and bytes an element of what is kept."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    listed = list(rows)
    is_named = any(row.name for row in listed)
    for name in ("role", "decay", "step", "dtype"):
        table.add_column(name, no_wrap=True)
    for name in ("tensors", "elements", "weight", "gradient", "fp32 sum", "state"):
        table.add_column(name, justify="right", no_wrap=True)
    if is_named:
        table.add_column("parameter", no_wrap=True)
    for row in listed:
        held = [str(number) for number in (row.dtype.itemsize, row.gradient, row.sums, row.state)]
        table.add_row(
            row.role, "yes" if row.is_decayed else "no", row.step, str(row.dtype).removeprefix("torch."),
            f"{row.tensors:,}", f"{row.elements:,}", *held, *([row.name] if is_named else []),
        )  # fmt: skip
    return table


def print_parameters(checked: Checked) -> None:
    """Print every parameter with its role, how it is stepped and what it takes; numbers in names are `*`."""
    from halo_core.models.sizes import model_of_plan
    from halo_core.optim.groups import by_pattern, trained

    rows = by_pattern(trained(model_of_plan(checked), checked.config))
    print()
    _console().print(parameter_table(rows, "parameters by name; bytes an element"))


def print_plan(checked: Checked) -> None:
    """Print the whole plan: features, kernels, sizes, roles of parameters, tokens per step, notes."""
    from halo_core.models.sizes import model_of_plan, sizes_of_plan
    from halo_core.optim.groups import by_group, trained

    model = model_of_plan(checked)
    console = _console()
    plan = checked.plan
    degrees = plan.degrees
    console.print(feature_table(plan))
    for line in reasons(plan):
        print(f"  {line}")
    print()
    console.print(size_table(checked, sizes_of_plan(checked, model)))
    print()
    rows = by_group(trained(model, checked.config))
    console.print(parameter_table(rows, "parameters by role; bytes an element"))
    print()
    print(f"model:     {plan.model_name_or_path}, config.json from {plan.model_origin}")
    if checked.guessed:
        print(f"           guessed, not published: {', '.join(checked.guessed)}")
    print(
        f"processes: {degrees.world} = replicate {degrees.replicate} x shard {degrees.shard} x cp {degrees.cp} "
        f"x ep {degrees.ep} x etp {degrees.etp}"
    )
    print(f"kernels:   attention {plan.attention}, experts {plan.experts_kernel}, head {plan.head_kernel}")
    if degrees.ep > 1:
        print(f"exchange:  {exchange_line(checked)}")
    print(f"plugins:   {', '.join(f'{name} {version}' for name, version in plan.plugins)}")
    print(f"digest:    {plan.digest()}")
    for note in plan.notes:
        print(f"note:      {note}")
    if plan.not_built:
        print(f"not built yet, so this run would be refused: {', '.join(row.feature for row in plan.not_built)}")
    else:
        print("ready: this run can start")


def _console() -> Console:
    # A pipe or a file has no width of its own; a wrapped table helps nobody there.
    return Console() if sys.stdout.isatty() else Console(width=200)


def exchange_line(checked: Checked) -> str:
    """Return what expert parallelism sends at most, and what recomputing layers adds to it."""
    plan, config = checked.plan, checked.config
    names, inner = checked.architecture.spec.names, text_config(checked.architecture.spec, checked.model_config)
    chosen, hidden = size(names.experts_per_token, inner), size(names.hidden_size, inner)
    if chosen is None or hidden is None or config.max_length is None:
        return f"ep_dispatcher {config.ep_dispatcher}"
    tokens = config.per_device_train_batch_size * config.max_length
    # A token travels once to each other process that holds one of its experts.
    sent = tokens * min(chosen, plan.degrees.ep - 1) * hidden * (4 if config.dtype == "float32" else 2)
    again = ", sent again when a layer is recomputed (nothing is held)" if config.gradient_checkpointing else ""
    return (
        f"ep_dispatcher {config.ep_dispatcher}; of each micro-batch a process sends at most {gib(sent)} of tokens per "
        f"MoE layer, and gets as much back{again}"
    )


def _size_rows(checked: Checked, sizes: Sizes) -> Iterable[tuple[str, str, str]]:
    """Yield (what, over all processes, on each of them); nothing for the last where one process has it all."""
    degrees = checked.plan.degrees
    # Every tensor is cut over the processes of one replica, experts along other axes than the rest.
    parts = degrees.world // degrees.replicate

    def held(name: str, number: int) -> tuple[str, str, str]:
        each = f"{gib(number // parts)} on each of {degrees.world} processes" if parts > 1 else ""
        if parts > 1 and name.startswith("gradients") and checked.config.fsdp_defer_grad_sync:
            each += ", in whole tensors until a step's last micro-batch"
        return name, gib(number * degrees.replicate), each

    yield "parameters", f"{sizes.parameters:,}", ""
    yield held("weights", sizes.weight_bytes)
    if sizes.gradient_bytes:
        yield held("gradients", sizes.gradient_bytes)
    if sizes.sum_bytes:
        yield held("gradients, summed in fp32", sizes.sum_bytes)
    yield held("optimizer state", sizes.optimizer_bytes)
    yield "rows per step", f"{checked.plan.rows_per_step:,}", ""
    if checked.plan.tokens_per_step is not None:
        yield "tokens per step, at most", f"{checked.plan.tokens_per_step:,}", ""


def gib(number: int) -> str:
    """Return a number of bytes for people: GiB, or MiB below one GiB."""
    return f"{number / 2**30:,.2f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"
