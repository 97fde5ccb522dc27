"""Reads a resume point back into a model, an optimizer and the random generators, exactly.

Not for choosing or judging a checkpoint: see `find.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from halo_core.checkpoint import randomness
from halo_core.checkpoint.find import KEY, Checkpoint
from halo_core.checkpoint.save import OPTIMIZER, RANDOM, WEIGHTS, stored_weights
from halo_core.errors import Problem, Refused


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copy the checkpoint's weights and persistent buffers into `model`.

    Raises:
        Refused: a tensor is missing, foreign, or of another shape or dtype; each is named, and nothing was copied.
    """
    targets = stored_weights(model)
    with safe_open(checkpoint.path / WEIGHTS, framework="pt") as file:
        names = set(file.keys())
        problems = [_problem(checkpoint, f"the checkpoint has no {name}") for name in targets if name not in names]
        problems += [_problem(checkpoint, f"the model has no {name}") for name in sorted(names - targets.keys())]
        for name in sorted(names & targets.keys()):
            stored, target = file.get_slice(name), targets[name]
            if list(stored.get_shape()) != list(target.shape):
                shapes = f"{stored.get_shape()} there and {list(target.shape)} here"
                problems.append(_problem(checkpoint, f"{name} is {shapes}"))
        if problems:
            raise Refused(problems)
        with torch.no_grad():
            for name, target in targets.items():
                tensor = file.get_tensor(name)
                if tensor.dtype != target.dtype:
                    raise Refused(_problem(checkpoint, f"{name} is {tensor.dtype} there and {target.dtype} here"))
                target.copy_(tensor)


def load_optimizer(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give `optimizer` the checkpoint's state.

    Raises:
        Refused: the state belongs to another optimizer or to parameters that this one does not update.
    """
    kind = checkpoint.optimizer["class"]
    if kind != type(optimizer).__name__:
        raise Refused(_problem(checkpoint, f"its optimizer is {kind} and this run's is {type(optimizer).__name__}"))
    state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in checkpoint.optimizer["scalars"].items()}
    for key, tensor in _tensors(checkpoint, OPTIMIZER).items():
        what, _, name = key.partition("/")
        state.setdefault(name, {})[what] = tensor
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sorted(state.keys() - set(order))
    if foreign:
        raise Refused([_problem(checkpoint, f"this run's optimizer does not update {name}") for name in foreign])
    optimizer.load_state_dict({
        "state": {index: state[name] for index, name in enumerate(order) if name in state},
        "param_groups": optimizer.state_dict()["param_groups"],
    })


def load_random(checkpoint: Checkpoint) -> None:
    """Put every random generator into the checkpoint's state."""
    randomness.put_back(_tensors(checkpoint, RANDOM), dict(checkpoint.random))


def _tensors(checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    with safe_open(checkpoint.path / name, framework="pt") as file:
        names = file.keys()
        return {key: file.get_tensor(key) for key in names}


def _problem(checkpoint: Checkpoint, why: str) -> Problem:
    return Problem(key=KEY, value=checkpoint.path, why=why,
                   remedy="resume with the model and optimizer of the first part, or start a new run")
