"""Reads a resume point back into a model, an optimizer and the random generators, exactly.

Not for choosing or judging a checkpoint: see `find.py`. Each process reads what overlaps its own part, so a checkpoint
of other sizes of the mesh, or of another number of processes, is read in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from halo_core import process_group
from halo_core.checkpoint import agreement, randomness
from halo_core.checkpoint.find import KEY, OPTIMIZER, RANDOM, WARM, WEIGHTS, Checkpoint, file_of
from halo_core.checkpoint.pieces import piece_of, whole
from halo_core.checkpoint.save import RANDOM_KEY, stored_weights, updated
from halo_core.checkpoint.stored import Stored, StoredTensors
from halo_core.errors import Problem

STEP = "step"
"""What torch's optimizers call a parameter's count of steps; no box of a parameter even where that has no dim."""
SHOWN = 10
"""Names told in a note before the rest is counted."""


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copy the checkpoint's weights and persistent buffers into `model`. A collective.

    Raises:
        Refused: on every process: a tensor is missing, foreign, or of another shape or dtype, or parts of it lie on
            other machines; each is named, and nothing was copied.
    """
    targets = stored_weights(model)
    with _opened(checkpoint, WEIGHTS) as stored:
        problems = [_problem(checkpoint, f"the checkpoint has no {name}") for name in targets
                    if name not in stored.tensors and not checkpoint.elsewhere]
        problems += [_problem(checkpoint, f"the model has no {name}")
                     for name in sorted(stored.tensors.keys() - targets.keys())]
        absent = [name for name in targets if name not in stored.tensors and checkpoint.elsewhere]
        for name in sorted(stored.tensors.keys() & targets.keys()):
            found, target = stored.tensors[name], targets[name]
            if found.shape != tuple(target.shape):
                shapes = f"{list(found.shape)} there and {list(target.shape)} here"
                problems.append(_problem(checkpoint, f"{name} is {shapes}"))
            elif found.dtype != target.dtype:
                problems.append(_problem(checkpoint, f"{name} is {found.dtype} there and {target.dtype} here"))
            elif not found.holds(piece_of(target)):
                absent.append(name)
        process_group.collect_problems([*problems, *_absent(checkpoint, absent)])
        for name, target in targets.items():
            stored.fill(name, target)


def load_optimizer(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, *, warm: bool = False
) -> tuple[str, ...]:
    """Give `optimizer` the checkpoint's state and return what a person should know. A collective.

    warm: state that is missing, foreign or of another optimizer is left out and named. A parameter whose state is not
    there in full on every process gets none at all, so that its moments and its count of steps begin anew together.

    Raises:
        Refused: on every process, without `warm`: the state belongs to another optimizer, or to other parameters than
            this one updates, or parts of it are missing or lie on other machines.
    """
    parameters = dict(model.named_parameters())
    order = {name: parameters[name] for name in updated(model, optimizer)}
    kind, here = checkpoint.optimizer["class"], type(optimizer).__name__
    if kind != here:
        if not warm:
            process_group.collect_problems([_problem(checkpoint, f"its optimizer is {kind} and this run's is {here}",
                                                     WARM)])
        return (f"the state of {kind} is dropped, since this run's optimizer is {here}: the moments of all "
                f"{len(order)} parameters begin at zero",)
    with _opened(checkpoint, OPTIMIZER) as stored:
        owners = {key: key.partition("/")[2] for key in {*stored.tensors, *checkpoint.optimizer["tensors"]}}
        foreign = sorted({*owners.values(), *checkpoint.optimizer["scalars"]} - order.keys())
        unknown = [name for name in order if name not in set(checkpoint.optimizer["parameters"])]
        absent = sorted(key for key, owner in owners.items() if owner in order
                        and not _is_here(stored.tensors.get(key), order[owner], key))
        if not warm:
            process_group.collect_problems([
                *(_problem(checkpoint, f"this run's optimizer does not update {name}", WARM) for name in foreign),
                *(_problem(checkpoint, f"its optimizer did not update {name}", WARM) for name in unknown),
                *_absent(checkpoint, absent, WARM),
            ])
        everywhere = agreement.gathered({owners[key] for key in absent})
        without = set().union(*everywhere)
        state = {name: dict(values) for name, values in checkpoint.optimizer["scalars"].items()}
        for key, tensor in stored.tensors.items():
            what, _, name = key.partition("/")
            if name in order and name not in without:
                target = _memory(what, tensor, order[name])
                stored.fill(key, target)
                state.setdefault(name, {})[what] = target
    kept = {name: state[name] for name in order if name in state and name not in without}
    _give(optimizer, order, kept)
    begun = [name for name in order if name in without or name in set(unknown)]
    notes = [f"{fault}: allow_warm_restart goes on without it" for fault in checkpoint.lacking]
    if foreign:
        notes.append(f"the optimizer's state of {_listed(foreign)} is dropped: this run does not update them")
    if begun:
        notes.append(f"the moments of {len(begun)} of {len(order)} parameters begin at zero: {_listed(begun)}")
    return tuple(notes)


def load_random(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Put every random generator into this process's state of the checkpoint, and return notes. A collective.

    With another number of processes there is no such state: each then begins from the seed, the step and its rank. So
    does a process whose state lies on another machine, which a note says, or is gone without.
    """
    rank, world = process_group.rank(), process_group.world()
    path = checkpoint.path / file_of(RANDOM, rank, checkpoint.world)
    is_whole = world == checkpoint.world and path.name in checkpoint.files
    away = agreement.gathered(world == checkpoint.world and path.name in checkpoint.elsewhere)
    if is_whole:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            states = {key.removeprefix(f"{RANDOM_KEY}/{rank}/"): file.get_tensor(key) for key in names}
        randomness.put_back(states, dict(checkpoint.random[rank]))
    else:
        randomness.seed_from(json.dumps([checkpoint.identity.config.get("seed"), checkpoint.step, rank]))
    return tuple(f"the random generators of rank {other} begin anew: {file_of(RANDOM, other, checkpoint.world)} is not "
                 "on its machine" for other, is_away in enumerate(away) if is_away)


@contextmanager
def _opened(checkpoint: Checkpoint, name: str) -> Iterator[StoredTensors]:
    """Open the files here that hold parts of `name`; a collective.

    Raises:
        Refused: on every process: they are not of one save.
    """
    with process_group.together():
        stored = StoredTensors(checkpoint.parts(name))
    with stored:
        yield stored


def _give(
    optimizer: torch.optim.Optimizer, order: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Give every parameter of `order` its state."""
    optimizer.load_state_dict({
        "state": {index: dict(state[name]) for index, name in enumerate(order) if name in state},
        "param_groups": optimizer.state_dict()["param_groups"],
    })


def _memory(what: str, stored: Stored, parameter: Tensor) -> Tensor:
    """Return memory for this process's part of a stored tensor, laid out as its parameter where it has its shape."""
    if what == STEP:
        return torch.empty(stored.shape, dtype=stored.dtype)
    if stored.shape != tuple(parameter.shape):
        return torch.empty(stored.shape, dtype=stored.dtype, device=parameter.device)
    return torch.empty_like(parameter, dtype=stored.dtype, requires_grad=False,
                            memory_format=torch.contiguous_format)


def _is_here(stored: Stored | None, parameter: Tensor, key: str) -> bool:
    """Return whether this process's part of an optimizer's tensor is in the files here."""
    if stored is None:
        return False
    is_cut = stored.shape == tuple(parameter.shape) and not key.startswith(f"{STEP}/")
    return stored.holds(piece_of(parameter) if is_cut else whole(stored.shape))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} others"


def _absent(checkpoint: Checkpoint, names: list[str], also: str = "") -> list[Problem]:
    """Return the problem that this process's parts of `names` are in no file here. also: another way out."""
    if not names:
        return []
    if not checkpoint.elsewhere:
        return [_problem(checkpoint, f"parts of {name} are in none of its files", also) for name in names]
    return [Problem(
        key=KEY, value=checkpoint.path,
        why=f"this machine's folder lacks parts of {names[0]} and {len(names) - 1} other tensors that this process "
            f"needs: they lie in {', '.join(checkpoint.elsewhere[:3])} of another machine",
        remedy="resume with the sizes of the mesh that the checkpoint was made with, each process on the machine of "
               "its rank, or copy all machines' files into one folder that every machine sees")]


def _problem(checkpoint: Checkpoint, why: str, also: str = "") -> Problem:
    remedy = "resume with the model and optimizer of the first part, or start a new run"
    return Problem(key=KEY, value=checkpoint.path, why=why, remedy=f"{remedy}, or {also}" if also else remedy)
