"""Reads a resume point back into a model, an optimizer and the random generators, exactly.

Not for choosing or judging a checkpoint: see `find.py`. Each process reads what overlaps its own part, so a checkpoint
of other sizes of the mesh, or of another number of processes, is read in the same way.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from halo_core import process_group
from halo_core.checkpoint import randomness
from halo_core.checkpoint.find import KEY, Checkpoint
from halo_core.checkpoint.pieces import piece_of, whole
from halo_core.checkpoint.save import OPTIMIZER, RANDOM, WEIGHTS, file_of, stored_weights
from halo_core.checkpoint.stored import Stored, StoredTensors
from halo_core.errors import Problem


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copy the checkpoint's weights and persistent buffers into `model`. A collective.

    Raises:
        Refused: on every process: a tensor is missing, foreign, or of another shape or dtype, or parts of it lie on
            other machines; each is named, and nothing was copied.
    """
    targets = stored_weights(model)
    with StoredTensors(checkpoint.parts(WEIGHTS)) as stored:
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


def load_optimizer(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give `optimizer` the checkpoint's state. A collective.

    Raises:
        Refused: on every process: the state belongs to another optimizer or to parameters that this one does not
            update, or parts of it lie on other machines.
    """
    kind = checkpoint.optimizer["class"]
    if kind != type(optimizer).__name__:
        problem = _problem(checkpoint, f"its optimizer is {kind} and this run's is {type(optimizer).__name__}")
        process_group.collect_problems([problem])
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = {names[parameter]: parameter for group in optimizer.param_groups for parameter in group["params"]}
    state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in checkpoint.optimizer["scalars"].items()}
    with StoredTensors(checkpoint.parts(OPTIMIZER)) as stored:
        owners = {key: key.partition("/")[2] for key in stored.tensors}
        foreign = sorted({*owners.values(), *state} - order.keys())
        absent = [key for key, tensor in stored.tensors.items()
                  if owners[key] in order and not tensor.holds(_wanted(tensor, order[owners[key]]))]
        absent += sorted(set(checkpoint.optimizer.get("tensors", ())) - stored.tensors.keys())
        process_group.collect_problems([
            *(_problem(checkpoint, f"this run's optimizer does not update {name}") for name in foreign),
            *_absent(checkpoint, absent),
        ])
        for key, tensor in stored.tensors.items():
            what, _, name = key.partition("/")
            target = _like(tensor, order[name])
            stored.fill(key, target)
            state.setdefault(name, {})[what] = target
    optimizer.load_state_dict({
        "state": {index: state[name] for index, name in enumerate(order) if name in state},
        "param_groups": optimizer.state_dict()["param_groups"],
    })


def load_random(checkpoint: Checkpoint) -> None:
    """Put every random generator into this process's state of the checkpoint.

    With another number of processes there is no such state: each then begins from the seed, the step and its rank.
    """
    rank, world = process_group.rank(), process_group.world()
    path = checkpoint.path / file_of(RANDOM, rank, checkpoint.world)
    if world != checkpoint.world or path.name not in checkpoint.files:
        text = json.dumps([checkpoint.identity.config.get("seed"), checkpoint.step, rank])
        randomness.seed_from(text)
        return
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        states = {key: file.get_tensor(key) for key in names}
    randomness.put_back(states, dict(checkpoint.random[rank]))


def _like(stored: Stored, parameter: Tensor) -> Tensor:
    """Return memory for this process's part of a stored tensor, laid out as its parameter where it has its shape."""
    if isinstance(parameter, DTensor) and stored.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=stored.dtype, requires_grad=False)
    return torch.empty(stored.shape, dtype=stored.dtype)


def _wanted(stored: Stored, parameter: Tensor) -> Any:
    return piece_of(parameter) if stored.shape == tuple(parameter.shape) else whole(stored.shape)


def _absent(checkpoint: Checkpoint, names: list[str]) -> list[Problem]:
    """Return the problem that this process's parts of `names` are in no file here."""
    if not names:
        return []
    if not checkpoint.elsewhere:
        return [_problem(checkpoint, f"parts of {name} are in none of its files") for name in names]
    return [Problem(
        key=KEY, value=checkpoint.path,
        why=f"this machine's folder lacks parts of {names[0]} and {len(names) - 1} other tensors that this process "
            f"needs: they lie in {', '.join(checkpoint.elsewhere[:3])} of another machine",
        remedy="resume with the sizes of the mesh that the checkpoint was made with, each process on the machine of "
               "its rank, or copy all machines' files into one folder that every machine sees")]


def _problem(checkpoint: Checkpoint, why: str) -> Problem:
    return Problem(key=KEY, value=checkpoint.path, why=why,
                   remedy="resume with the model and optimizer of the first part, or start a new run")
