"""Writes a resume point: weights, optimizer state, random state, and what the run is.

Not for exporting a model to others. Nothing is pickled: safetensors and JSON only. With several processes each writes
its own parts into files of its own, and every element is written once per file system.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from halo_core import process_group
from halo_core.checkpoint import agreement, atomic, randomness, tensors
from halo_core.checkpoint.agreement import Sharing
from halo_core.checkpoint.find import FORMAT, OPTIMIZER, RANDOM, STATE, WEIGHTS, file_of
from halo_core.checkpoint.identity import Identity
from halo_core.checkpoint.pieces import Piece, check_whole, local, piece_of, whole, writers

RANDOM_KEY = "random"


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one process writes of some tensors. places: of those that are parts of a whole, its shape and the box."""

    tensors: dict[str, Tensor]
    places: dict[str, tuple[tuple[int, ...], Piece]]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensors, without a file's header."""
        return tensors.num_bytes(self.tensors)


@dataclass(frozen=True, kw_only=True)
class Capture:
    """All that this process writes of one step, with everything settled that the processes have to settle before.

    sharing: the processes that write the folder together. random: this process's random generators. state: the text of
    state.json. The tensors of the parts may be the run's own, which the next step changes.
    """

    folder: Path
    sharing: Sharing
    weights: Part
    moments: Part
    random: dict[str, Tensor]
    state: bytes

    @property
    def num_bytes(self) -> int:
        """Return the bytes of this process's tensors."""
        return self.weights.num_bytes + self.moments.num_bytes + tensors.num_bytes(self.random)


def save(
    output_dir: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Mapping[str, Any],
    identity: Identity,
) -> Path:
    """Write `output_dir/checkpoint-<step>` and return it; it is there completely or not at all. A collective.

    progress: what the loop wants back on resume, in values that JSON knows; the same on every process.

    Where machines do not share `output_dir`, each has a folder of its own processes' files: complete by itself, and
    whole only together with the others.

    Raises:
        SaveFailed: on every process, when one had too little space or the file system refused; earlier checkpoints
            are untouched.
    """
    return write(capture(output_dir, step=step, model=model, optimizer=optimizer, progress=progress,
                         identity=identity))


def capture(
    output_dir: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Mapping[str, Any],
    identity: Identity,
) -> Capture:
    """Return what this process is to write. A collective; arguments and what it raises as for `save`.

    Nothing is copied: the tensors are those of the run until `write` has ended.
    """
    sharing = agreement.sharing(output_dir)
    weights = own_part(stored_weights(model), sharing.ranks)
    every_moment, scalars = optimizer_state(model, optimizer)
    moments = own_part(every_moment, sharing.ranks)
    random_tensors, random_rest = randomness.captured()
    state = {
        "format": FORMAT,
        "step": step,
        "world": process_group.world(),
        "progress": dict(progress),
        "optimizer": {"class": type(optimizer).__name__, "parameters": sorted(updated(model, optimizer)),
                      "scalars": scalars, "tensors": list(every_moment)},
        "random": agreement.gathered(random_rest),
        "identity": vars(identity),
    }
    rank = process_group.rank()
    return Capture(
        folder=output_dir / f"checkpoint-{step}", sharing=sharing, weights=weights, moments=moments,
        # With the rank in it: a reader that takes all files together would find one name in several of them.
        random={f"{RANDOM_KEY}/{rank}/{name}": tensor for name, tensor in random_tensors.items()},
        state=json.dumps(state, indent=1).encode(),
    )  # fmt: skip


def write(captured: Capture, group: Any = None) -> Path:
    """Write a captured checkpoint and return its folder. A collective of `group`: see `process_group.side_group`.

    Raises:
        SaveFailed: as `save`.
    """
    among = replace(captured.sharing, group=group)
    with atomic.publishing(captured.folder, needed=captured.num_bytes, writers=among) as writer:
        writer.file(own_file(WEIGHTS), tensors.chunks(captured.weights.tensors, captured.weights.places))
        writer.file(own_file(OPTIMIZER), tensors.chunks(captured.moments.tensors, captured.moments.places))
        writer.file(own_file(RANDOM), tensors.chunks(captured.random))
        if among.leads:
            writer.file(STATE, [captured.state])
    return captured.folder


def updated(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the parameters that `optimizer` updates, in its order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def own_part(every: Mapping[str, Tensor], among: tuple[int, ...]) -> Part:
    """Return what this process writes so that the processes `among` write every box that they hold once.

    every: name -> tensor, the same names on every process. A collective.

    Raises:
        RuntimeError: the boxes of all processes do not make up a tensor.
    """
    rank = process_group.rank()
    held = agreement.gathered({name: piece_of(tensor) for name, tensor in every.items()})
    check_whole({name: tensor.shape for name, tensor in every.items()}, writers(held, range(len(held))))
    mine = {name: piece for (name, piece), owner in writers(held, among).items() if owner == rank}
    # An empty tensor has no box that anyone writes; it is kept as one that is whole.
    if rank == among[0]:
        mine |= {name: whole(tensor.shape) for name, tensor in every.items() if tensor.numel() == 0}
    return Part(
        tensors={name: local(tensor) for name, tensor in every.items() if name in mine},
        places={name: (tuple(every[name].shape), piece) for name, piece in mine.items()
                if piece != whole(every[name].shape)},
    )


def own_file(name: str) -> str:
    """Return this process's file for `name`: the name itself where there is one process."""
    return file_of(name, process_group.rank(), process_group.world())


def stored_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by their state-dict name, a tied tensor once."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # weights that an evaluation left gathered are not what the optimizer knows
    parameters = dict(model.named_parameters())
    every_name = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in every_name}
    return {**parameters, **buffers}


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return the optimizer's tensors as `<kind>/<parameter name>`, and its plain values per parameter name."""
    moments: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                moments[f"{kind}/{name}"] = value
            else:
                scalars.setdefault(name, {})[kind] = value
    # Sorted: a restored optimizer lists its state in another order, and equal states are to be equal files.
    return dict(sorted(moments.items())), scalars
