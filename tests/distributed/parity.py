"""One process on a joined batch, and several on their shares of it: the same steps, told in the same words.

Not for what counts as equal: see `test_parity.py`.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from halo_core.arithmetic import Degrees
from halo_core.data.collate import collate
from halo_core.data.order import split
from halo_core.data.rows import Row
from halo_core.expert_parallel.all_to_all import AllToAll
from halo_core.expert_parallel.experts import ParallelExperts
from halo_core.kernels.experts import choice
from halo_core.kernels.experts.weights import ExpertsKernel
from halo_core.methods.sft import Sft
from halo_core.models import sockets
from halo_core.models.build import build_meta
from halo_core.models.hidden import Head, last_hidden
from halo_core.models.load import load_weights
from halo_core.registry import Architecture
from halo_core.sharding.shard import shard
from halo_core.sharding.sharded import Sharded
from halo_core.topology import AXES, Topology, build_meshes
from halo_core.trainer.recompute import enable_recompute
from halo_core.trainer.step import run_step

CPU = torch.device("cpu")
SFT = Sft(collate_rows=collate)
STEPS = 4
EXPERTS = 8
FORCED = (1, 6)
"""Experts of different processes at two and at four; with four, two processes get no row at all."""

CLIPPED_STEP, SHARE_LEFT = 2, 0.5
"""One step is clipped, to half the norm before: at all of them a constant factor in each gradient would not be seen."""

PERTURB, MMAP_THRESHOLD, TRIM_THRESHOLD = -6, -3, -1
"""Source: glibc's malloc.h."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How several processes run: mesh sizes, and what can be switched. per_device: rows of a micro-batch."""

    sizes: Mapping[str, int]
    zero3: bool = False
    recomputed: bool = False
    forced: bool = False
    starved: bool = False
    accumulation: int = 2
    deferred: bool = False
    kept: bool = False
    per_device: int = 1

    @property
    def degrees(self) -> Degrees:
        return Degrees(**{axis: self.sizes.get(axis, 1) for axis in AXES})

    def __str__(self) -> str:
        words = [f"{axis}{size}" for axis, size in self.sizes.items()]
        switches = ("zero3", "recomputed", "forced", "starved", "deferred", "kept")
        words += [name for name in switches if getattr(self, name)]
        return "-".join(words) + f"-x{self.accumulation}"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What one process computes. outputs: step -> experts path -> row id -> [S, H]. rate: of plain SGD."""

    rate: float
    losses: list[float]
    norms: list[float]
    tokens: list[int]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    outputs: dict[str, dict[int, Tensor]]


def rows_of(setting: Setting, step: int, vocabulary: int) -> list[Row]:
    """Return the rows of one step's whole window, uneven, two spans supervised.

    starved: the last process gets a row of two tokens without any target, then none, since the window is short.
    """
    world = setting.degrees.data_ranks
    count = world * setting.per_device * setting.accumulation
    generator = torch.Generator().manual_seed(step)
    rows = []
    for number in range(count):
        length = int(torch.randint(5, 24, (), generator=generator))
        tokens = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
        supervised = [place % 3 != 1 for place in range(length)]
        rows.append(Row(row_id=100 * step + number, input_ids=tokens, supervised=supervised))
    if setting.starved:
        last = world * setting.per_device - 1
        rows[last] = Row(row_id=rows[last].row_id, input_ids=[3, 4], supervised=[False, False])
        if setting.accumulation > 1:
            rows = rows[: count - setting.per_device]
    return rows


def one_process(
    architecture: Architecture, folder: Path, setting: Setting, rate: float | None = None
) -> Expected:
    """Train on each window as one batch. rate: None for one that lowers the loss by a fifth of its slope."""
    model = _build(architecture, folder, choice.kernel("grouped", may_skip=False))
    load_weights(model, folder, architecture)
    if rate is None:
        rate = 0.2 / one_process(architecture, folder, setting, 1e-12).norms[0] ** 2
    return _steps(model, architecture, setting, rate, None, lambda window: [window])


def starting_weights(architecture: Architecture, folder: Path) -> dict[str, Tensor]:
    """Return the weights and buffers that every run begins with."""
    model = _build(architecture, folder, choice.kernel("grouped", may_skip=False))
    load_weights(model, folder, architecture)
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def several_processes(
    architecture: Architecture, folder: Path, setting: Setting, rate: float,
    kernel: Any = ParallelExperts, alter: Any = None,
) -> Expected:
    """Train on this process's share of each window; weights and gradients come back whole.

    kernel, alter: replace a part by a wrong one, to see that it is noticed.
    """  # fmt: skip
    poison()
    topology = Topology(degrees=setting.degrees, rank=dist.get_rank())
    meshes = build_meshes(topology, "cpu")
    experts = choice.kernel("grouped", may_skip=True)
    if topology.size("ep") > 1:
        dispatcher = AllToAll(
            group=meshes.ep.get_group(), num_experts=EXPERTS, recomputation="keep" if setting.kept else "resend"
        )
        experts = kernel(dispatcher=dispatcher, compute=experts)
    model = _build(architecture, folder, experts)
    sharded = shard(
        model, architecture, topology, meshes, experts=dict(sockets.experts_modules(model, architecture)),
        reshard_after_forward=setting.zero3, reshard_after_backward=not setting.deferred,
        defer_grad_sync=setting.deferred,
    )  # fmt: skip
    load_weights(model, folder, architecture)
    if alter is not None:
        alter(model)
    return _steps(
        model, architecture, setting, rate, sharded,
        lambda window: split(window, setting.per_device, topology.data_ranks, topology.data_rank),
    )  # fmt: skip


def poison() -> None:
    """Let this process's allocations begin with bytes that read as enormous numbers, never as zeros.

    Raises:
        RuntimeError: when they do not.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(PERTURB, 1)
    for threshold in (MMAP_THRESHOLD, TRIM_THRESHOLD):  # memory is used again, and not given back and asked for
        libc.mallopt(threshold, 1 << 30)
    for size in (1 << 8, 1 << 20):
        if not bool((torch.empty(size) < -1e38).all()):
            raise RuntimeError("memory could not be poisoned")


class ForcedGate(TorchFunctionMode):
    """Answers every top-k over the experts by the same ones, with the scores they have."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, Tensor.topk) or args[0].shape[-1] != EXPERTS:
            return func(*args, **(kwargs or {}))
        ids = torch.tensor(FORCED).expand(*args[0].shape[:-1], -1)
        return torch.return_types.topk((args[0].gather(-1, ids), ids))


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor's value over all processes, a copy."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _build(architecture: Architecture, folder: Path, experts: ExpertsKernel) -> Any:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return build_meta(architecture, config, dtype=torch.float32, attention="eager", experts=experts)


def _steps(
    model: Any, architecture: Architecture, setting: Setting, rate: float, sharded: Sharded | None, parts: Any
) -> Expected:  # fmt: skip
    config = model.config
    if setting.recomputed and sharded is not None:
        enable_recompute(model, routes=architecture.spec.is_moe)
    optimizer = _Recording(model, rate)
    head = Head(model, architecture)
    outcomes: list[Any] = []
    outputs: dict[str, dict[int, Tensor]] = {}
    with ForcedGate() if setting.forced else nullcontext():
        for step in range(STEPS):
            batches = [SFT.collate(part, 1) for part in parts(rows_of(setting, step, config.vocab_size))]
            limit = SHARE_LEFT * outcomes[-1].grad_norm if step == CLIPPED_STEP else None
            with _recorded_outputs(model, architecture, batches, outputs) if step == 0 else nullcontext():
                outcomes.append(run_step(
                    model=model, model_hidden=last_hidden, head=head, method=SFT, batches=batches,
                    optimizer=optimizer, max_grad_norm=limit, device=CPU, sharded=sharded,
                ))  # fmt: skip
    return Expected(
        rate=rate,
        losses=[outcome.loss for outcome in outcomes],
        norms=[outcome.grad_norm for outcome in outcomes],
        tokens=[outcome.tokens for outcome in outcomes],
        gradients=optimizer.first,
        weights={name: whole(tensor) for name, tensor in model.state_dict().items()},
        outputs=outputs,
    )


class _Recording(torch.optim.SGD):
    """Plain SGD that keeps its first gradients, whole."""

    def __init__(self, model: Any, rate: float) -> None:
        super().__init__(model.parameters(), lr=rate)
        self.named = dict(model.named_parameters())
        self.first: dict[str, Tensor] = {}

    def step(self, closure: Any = None) -> None:
        if not self.first:
            self.first = {name: whole(p.grad) for name, p in self.named.items() if p.grad is not None}
        super().step(closure)


@contextmanager
def _recorded_outputs(
    model: Any, architecture: Architecture, batches: Sequence[Any], outputs: dict[str, dict[int, Tensor]]
) -> Iterator[None]:
    """Keep what each layer's experts gave for every real token of every row, from the first pass alone."""
    modules = list(sockets.experts_modules(model, architecture))
    calls = dict.fromkeys((path for path, _ in modules), 0)

    def recorder(path: str) -> Any:
        def record(module: Any, given: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:  # recomputed in backward
                return
            batch = batches[calls[path]]
            calls[path] += 1
            hidden = (output[0] if isinstance(output, tuple) else output).detach()
            hidden = hidden.reshape(*batch.input_ids.shape, -1)
            for place, row_id in enumerate(batch.row_ids):
                real = int((batch.segment_ids[place] > 0).sum())
                outputs.setdefault(path, {})[row_id] = hidden[place, :real].clone()

        return record

    handles = [module.register_forward_hook(recorder(path)) for path, module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
