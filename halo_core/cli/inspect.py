"""`halo run inspect`: what a checkpoint holds, whether it is whole, and whether a run can go on from it here.

Not for deciding: what forbids a resume is asked of those who forbid it in `halo train`, and told in their words. No
torch is imported, so the rows, which only a tokenizer makes, are not compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from halo_core import config as configuration
from halo_core import plan as planning
from halo_core.checkpoint import contents as reading
from halo_core.checkpoint import find
from halo_core.checkpoint.contents import Contents, Held
from halo_core.checkpoint.identity import DATA, DEGREES, Identity, plain, plan_of
from halo_core.cli.main import load_registry
from halo_core.errors import EXIT_MISTAKE, Problem, Refused, shown
from halo_core.trainer import policy, preflight, run_folder, trackers

VERSIONS = ("halo-moe", "torch", "transformers", "device")
SHOWN = 5
"""Faults in the line that says a checkpoint is not whole; all are told below it."""
ROWS_LATER = "the rows are compared token by token when the run starts"


def run(
    folder: Path,
    *,
    config: Path | None,
    overrides: tuple[str, ...],
    nproc: int,
    family: str | None,
    quick: bool,
    as_json: bool,
    plugin_files: tuple[Path, ...],
) -> None:
    """Print what the checkpoint is; exit code 2 when it is not whole, or when the run of `config` cannot go on.

    Raises:
        Refused: with what is wrong, unless `as_json` has printed it.
    """
    found = reading.contents(reading.newest(folder.expanduser()), every_byte=not quick)
    problems: list[Problem] = []
    notes: tuple[str, ...] = ()
    if config is not None or overrides:
        try:
            notes = resumed(found, config, overrides, nproc=nproc, family=family, plugin_files=plugin_files)
        except Refused as refusal:
            problems = list(refusal.problems)
    elif found.faults:
        problems = find.unusable(str(folder), found.path, found.faults)
    if as_json:
        told = {**found.as_dict(), "problems": [_plain(problem) for problem in problems], "notes": list(notes)}
        if config is not None or overrides:
            told["can_resume"] = not problems
        print(json.dumps(plain(told), indent=1))
        if problems:
            raise typer.Exit(EXIT_MISTAKE)
        return
    for name, text in lines(found):
        print(f"{name:<11}{text}".rstrip())
    if problems:
        raise Refused(problems)
    if config is not None or overrides:
        print(f"{'here':<11}the run can go on from it; {ROWS_LATER}")
        for note in notes:
            print(f"{'':<11}note: {note}")


def resumed(
    found: Contents, config: Path | None, overrides: tuple[str, ...], *, nproc: int, family: str | None,
    plugin_files: tuple[Path, ...],
) -> tuple[str, ...]:  # fmt: skip
    """Return what a person should know when the run of `config` goes on from this checkpoint with `nproc` processes.

    Raises:
        Refused: with everything that `halo train` would refuse it for, but for what the rows and the model say.
    """
    registry = load_registry(plugin_files)
    words = (*overrides, f"{find.KEY}={json.dumps(str(found.path))}")
    read = configuration.read(config, words, more_words=registry.words())
    settings = read.config
    problems = [*policy.check(settings), *trackers.check(settings.report_to, preflight.tracker_targets(registry))]
    checkpoint = None
    try:
        checkpoint = find.find(str(found.path), found.path.parent, faults_of=lambda path: dict(found.faults),
                               warm=settings.allow_warm_restart)
    except Refused as refusal:
        problems += refusal.problems
    output_dir = Path(str(settings.output_dir)).expanduser()
    if "%" not in str(settings.output_dir):  # with codes of the date it is a new folder each time
        problems += run_folder.problems(output_dir, resumed_from=found.path)
    checked = planning.build(read, registry, nproc=nproc, family=family, also=problems)
    assert checkpoint is not None, "a problem otherwise"
    saved = checkpoint.identity
    device = str(saved.environment.get("device"))  # told without torch by nothing here
    environment = run_folder.environment(device=device, plugins=dict(checked.plan.plugins))
    now = Identity(config=plain(vars(checked.config)), plan=plan_of(checked.plan), data=saved.data,
                   environment=plain(environment))
    notes = list(find.check(checkpoint, now))
    notes += [f"{key} was {shown(saved.config[key])} and is {shown(now.config[key])}: {ROWS_LATER}"
              for key in sorted(DATA & saved.config.keys() & now.config.keys())
              if saved.config[key] != now.config[key]]
    if checkpoint.elsewhere:
        notes.append(f"parts of it lie on other machines ({', '.join(checkpoint.elsewhere[:3])}, ...): with another "
                     "layout all machines' files have to be copied into one folder first")
    return tuple(notes)


def lines(found: Contents) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of what a person reads."""
    yield "checkpoint", str(found.path)
    if found.checkpoint is not None:
        yield from _of_the_run(found)
    for name, held in found.held.items():
        if held.files:
            yield name, _held(held)
    for name in found.foreign:
        yield "beside", f"{name} is no part of it"
    if found.faults:
        yield "not whole", "; ".join(list(found.faults.values())[:SHOWN])
    else:
        yield "whole", ("every byte is the one that was written" if found.is_read
                        else "by names and sizes; without --quick every byte is compared")


def _of_the_run(found: Contents) -> Iterator[tuple[str, str]]:
    checkpoint = found.checkpoint
    assert checkpoint is not None
    identity, progress = checkpoint.identity, checkpoint.progress
    config, plan, environment = identity.config, identity.plan, identity.environment
    epoch = progress.get("epoch")
    yield "step", f"{checkpoint.step}" + (f", epoch {epoch:.2f}" if isinstance(epoch, float) else "")
    if found.written is not None:
        yield "written", f"{found.written:%Y-%m-%d %H:%M:%S %z}, by {_processes(checkpoint.world, plan.get(DEGREES))}"
    yield "model", f"{config.get('model_name_or_path')} ({plan.get('architecture')}, family {plan.get('family')})"
    yield "plan", ", ".join(f"{key} {plan[key]}" for key in ("attention", "experts_kernel") if key in plan)
    state = checkpoint.optimizer
    yield "optim", f"{state['class']} of {len(state['parameters'])} parameters ({config.get('optim')})"
    yield "rows", (f"{identity.data.get('count')}, of which a step takes {config.get('per_device_train_batch_size')} x "
                   f"{config.get('gradient_accumulation_steps')} on each process with rows of its own")
    best = progress.get("best")
    if best:
        yield "best", f"{best['value']:.6g} at step {best['step']}"
    yield "versions", ", ".join(f"{name} {environment[name]}" for name in VERSIONS if environment.get(name))
    yield "plugins", ", ".join(f"{name} {version}" for name, version in (environment.get("plugins") or {}).items())
    if checkpoint.elsewhere:
        yield "elsewhere", f"{len(checkpoint.elsewhere)} files lie on other machines: {checkpoint.elsewhere[0]}, ..."


def _processes(world: int, degrees: Mapping[str, Any] | None) -> str:
    sizes = [f"{axis} {size}" for axis, size in (degrees or {}).items() if int(size) > 1]
    return "one process" if world == 1 else f"{world} processes ({' x '.join(sizes) or 'no mesh told'})"


def _held(held: Held) -> str:
    return f"{held.tensors} tensors, {held.num_bytes:,} bytes in {held.files} file{'s' if held.files > 1 else ''}"


def _plain(problem: Problem) -> dict[str, Any]:
    value = None if problem.key is None else shown(problem.value)
    return {"key": problem.key, "value": value, "where": problem.where, "why": problem.why, "do": problem.remedy}
