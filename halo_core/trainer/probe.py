"""Tries out, before training, that no token sees a later one and no document another, by the run's own forward.

Not for the proofs of the test kit. What a release of transformers, torch or a kernel says of itself is not asked: a few
short rows go through this very model, whole or cut over processes, and a leak refuses the run.

A leak is looked for layer by layer. Each layer is given, for the tokens that must not change, exactly what it was given
before, so that what changes in its output comes from this layer alone and rounding does not add up over layers, nor
does a token that lies between two experts go to another one. N real tokens, in the order of their documents, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from halo_core import process_group
from halo_core.attention import socket as attention
from halo_core.config import RunConfig
from halo_core.data.batch import Batch
from halo_core.data.collate import collate
from halo_core.data.rows import Row
from halo_core.data.units import Pack
from halo_core.errors import Problem
from halo_core.models import mixers, sockets
from halo_core.registry import Architecture
from halo_core.sharding.sharded import Sharded

LENGTHS = (90, 70, 6)
"""Tokens of three documents. Kernels go through a sequence in blocks of 32 to 128 tokens, and what one block hands to
the next is told by documents that do not fit into one; unequal, so that rows of them are padded."""

ROUNDINGS = 8.0
"""How far, in units in the last place of the dtype and as a share of an output's length, a layer's output may move that
should not move at all: its experts may be summed in another order."""

MIXED = 0.5
"""The same of what mixes tokens. Attention, convolutions and scans compute the same bits again, with whatever a mask
hides multiplied by zero; less than this is below the rounding of what they give back."""

EXACT = 1e-5
"""The least share that counts as moved, where the dtype is finer than that."""

ALONE = 0.125
"""How far, as a share of its length, the output of a layer that mixes tokens may differ between a document alone and
packed: other shapes are other kernels, in bf16, or in the TF32 that convolutions on GPUs use. A document that does not
see itself, or starts at the wrong place, is off by more."""


@dataclass(frozen=True, kw_only=True)
class Leak:
    """Where something reached a token that should not: the module's path and class, and what it was, in words."""

    path: str
    module: str
    what: str

    @property
    def words(self) -> str:
        """Return one sentence for the person who started the run."""
        return f"{self.what}, first in {self.path} ({self.module})"


LATER = "a token changes when a later one does"
OTHER = "a document changes when another one in its row does"
NOT_ALONE = "a document among others is not what it is alone"

ELSEWHERE = "a layer of another process"
"""The path of a leak that was seen by other processes only: they name it, and all refuse alike."""

Forward = Callable[[Any, Any], Any]
"""(model, batch) -> last hidden states [B, S, H]."""


def check(
    model: PreTrainedModel,
    architecture: Architecture,
    forward: Forward,
    config: RunConfig,
    *,
    attention_name: str,
    device: torch.device,
    sharded: Sharded | None = None,
) -> None:
    """Refuse the run if its model lets tokens see what they must not; a collective of all processes.

    forward: the run's. attention_name: the implementation in use. sharded: the model cut over processes.
    The model is left as it was: mode, counters of its sockets, cut parameters, random states.

    Raises:
        Refused: naming the first layer that leaks, or the kind of layer that cannot be kept apart.
    """
    packs = config.packing or bool(config.eval_packing)
    problems: list[Problem] = []
    with _as_it_was(model, sharded):
        try:
            leak = find_leak(model, architecture, forward, device=device, packs=packs, flattens=config.padding_free)
        except NotImplementedError as fault:  # a kind of layer, or of attention, that nothing keeps apart
            problems.append(_not_apart(str(fault), config))
        else:
            if leak is not None and leak.path != ELSEWHERE:
                problems.append(_problem(leak, config, attention_name))
    process_group.collect_problems(problems)


@torch.no_grad()
def find_leak(
    model: PreTrainedModel,
    architecture: Architecture,
    forward: Forward,
    *,
    device: torch.device,
    packs: bool = False,
    flattens: bool = False,
) -> Leak | None:
    """Return the first leak, or None; all processes or none return one, since their forwards communicate.

    A model whose layers give what is no number has no leak to be seen: its first step stops, and names the weight.

    packs: whether rows hold several documents. flattens: whether a batch is one row of them. Rows of one document are
    tried always, with and without padding.
    """
    first, second, third = _documents(model.config.vocab_size)
    for rows in ([first], [second, first]):  # without padding and with it
        if leak := _sees_later(_Trial(model, architecture, forward, device), rows, LENGTHS[1] - 4):
            return leak
    forms: list[Callable[[Sequence[Row]], Batch]] = []
    if packs:
        forms.append(lambda rows: collate([Pack(rows=tuple(rows[:2])), Pack(rows=tuple(rows[2:]))], 0))
    if flattens:
        forms.append(lambda rows: collate(rows, 0, flatten=True))
    for form in forms:
        trial = _Trial(model, architecture, forward, device, form)
        if leak := _sees_others(trial, [first, second, third]):
            return leak
    return None


@dataclass(eq=False)
class _Trial:
    """Passes of the same documents through a model, with what its layers were given and gave back."""

    model: PreTrainedModel
    architecture: Architecture
    forward: Forward
    device: torch.device
    form: Callable[[Sequence[Row]], Batch] = lambda rows: collate(rows, 0)
    given: dict[str, Tensor] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)

    def watched(self) -> dict[str, nn.Module]:
        """Return the modules that mix tokens, and the decoder layers around them, by path."""
        kind = self.architecture.spec.decoder_layer
        found = dict(attention.attention_modules(self.model, kind))
        bound = mixers.of(self.model)
        found |= {} if bound is None else {path: self.model.get_submodule(path) for path in bound.by_path}
        return found | self.layers()

    def layers(self) -> dict[str, nn.Module]:
        """Return the decoder layers by path."""
        kind = self.architecture.spec.decoder_layer
        return {path: module for path, module in self.model.named_modules() if type(module).__name__ == kind}

    def run(self, rows: Sequence[Row], same: Tensor | None = None, form: Any = None) -> dict[str, Tensor]:
        """Return what each watched module gives back for every real token, [N, ...] fp32 at least, in order of calls.

        same: [N] bool, the tokens for which every layer is given what it was given in the first pass, which has none.
        """
        batch = (form or self.form)(rows).to(self.device)
        real = (batch.segment_ids != 0).flatten().nonzero().squeeze(-1)
        found: dict[str, Tensor] = {}
        layers = self.layers()

        def before(path: str) -> Any:
            def hook(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
                hidden = arguments[0] if arguments else named["hidden_states"]
                flat = hidden.flatten(0, 1)
                if same is None:
                    self.given[path] = flat[real]
                    return None
                kept = flat.index_copy(0, real[same], self.given[path][same]).view_as(hidden)
                return ((kept, *arguments[1:]), named) if arguments else (arguments, {**named, "hidden_states": kept})

            return hook

        def after(path: str) -> Any:
            def hook(module: nn.Module, _: Any, output: Any) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                found[path] = hidden.flatten(0, 1)[real].flatten(1)
                self.classes[path] = type(module).__name__

            return hook

        handles = [m.register_forward_pre_hook(before(path), with_kwargs=True) for path, m in layers.items()]
        handles += [m.register_forward_hook(after(path)) for path, m in self.watched().items()]
        try:
            self.forward(self.model, batch)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def first_moved(
        self, found: dict[str, Tensor], expected: dict[str, Tensor], among: Tensor, allowed: float | None = None
    ) -> str | None:
        """Return the path of the first output that differs for one of the tokens `among` [N] bool."""
        bounds, shares, layers = [], [], self.layers()
        for path, wanted in expected.items():
            units = ROUNDINGS if path in layers else MIXED
            bounds.append(max(EXACT, units * torch.finfo(wanted.dtype).eps) if allowed is None else allowed)
            wide, other = wanted[among].double(), found[path][among].double()
            shares.append(((other - wide).norm(dim=1) / wide.norm(dim=1).clamp(min=1e-300)).max())
        moved = [not share <= bound for share, bound in zip(torch.stack(shares).tolist(), bounds, strict=True)]
        return next((path for path, is_moved in zip(expected, moved, strict=True) if is_moved), None)

    def is_broken(self, expected: dict[str, Tensor]) -> bool:
        """Return whether some layer gave what is no number, in any process; a collective."""
        finite = torch.stack([torch.isfinite(tensor).all() for tensor in expected.values()])
        return process_group.any_rank(not bool(finite.all()))

    def leak(self, path: str | None, what: str) -> Leak | None:
        """Return what was found at `path`, None where no process found anything; a collective."""
        if not process_group.any_rank(path is not None):
            return None
        return Leak(path=path or ELSEWHERE, module=self.classes[path] if path else "", what=what)


def _sees_later(trial: _Trial, rows: list[Row], changed: int) -> Leak | None:
    """Change token `changed` of the first row: nothing before it may move, nor anything of the others."""
    expected = trial.run(rows)
    if trial.is_broken(expected):
        return None
    same = torch.ones(sum(len(row.input_ids) for row in rows), dtype=torch.bool, device=trial.device)
    same[changed : len(rows[0].input_ids)] = False
    found = trial.run([_other(rows[0], changed, changed + 1, trial.model.config.vocab_size), *rows[1:]], same)
    if leak := trial.leak(trial.first_moved(found, expected, same), LATER):
        return leak
    if process_group.any_rank(trial.first_moved(found, expected, ~same) is None):
        raise RuntimeError("the probe sees no token of its own: a changed one changes nothing in any layer")
    return None


def _sees_others(trial: _Trial, rows: list[Row]) -> Leak | None:
    """Change the first of several documents, then a token within it; and compare each document with itself alone."""
    first = len(rows[0].input_ids)
    expected = trial.run(rows)
    if trial.is_broken(expected):
        return None
    same = torch.arange(sum(len(row.input_ids) for row in rows), device=trial.device) >= first
    found = trial.run([_other(rows[0], 0, first, trial.model.config.vocab_size), *rows[1:]], same)
    if leak := trial.leak(trial.first_moved(found, expected, same), OTHER):
        return leak
    changed = first + len(rows[1].input_ids) - 4
    everything = torch.ones_like(same)
    same = everything.clone()
    same[changed : first + len(rows[1].input_ids)] = False
    later = _other(rows[1], changed - first, changed - first + 1, trial.model.config.vocab_size)
    found = trial.run([rows[0], later, *rows[2:]], same)
    if leak := trial.leak(trial.first_moved(found, expected, same), LATER):
        return leak
    found = trial.run(rows, everything, form=lambda alone: collate(alone, 0))
    mixing = {path: tensor for path, tensor in expected.items() if path not in trial.layers()}
    return trial.leak(trial.first_moved(found, mixing, everything, allowed=ALONE), NOT_ALONE)


def _documents(vocabulary: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    return [
        Row(row_id=number, input_ids=torch.randint(vocabulary, (length,), generator=generator).tolist(),
            supervised=[False] * length)
        for number, length in enumerate(LENGTHS)
    ]  # fmt: skip


def _other(row: Row, begin: int, end: int, vocabulary: int) -> Row:
    """Return the row with other tokens from `begin` to `end`."""
    ids = list(row.input_ids)
    ids[begin:end] = [(token + 1 + vocabulary // 3) % vocabulary for token in ids[begin:end]]
    return Row(row_id=row.row_id, input_ids=ids, supervised=row.supervised)


@contextmanager
def _as_it_was(model: PreTrainedModel, sharded: Sharded | None) -> Iterator[None]:
    """Let the block run the model for evaluation and leave no trace of it."""
    was_training = model.training
    doors: list[Any] = list(sockets.of(model).by_path.values()) if hasattr(model, sockets.ATTACHED) else []
    attended = attention.of(model)
    doors += [] if attended is None else list(attended.by_path.values())
    calls = [door.calls for door in doors]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        model.eval()  # dropout is no leak
        with torch.random.fork_rng(devices):
            yield
    finally:
        model.train(was_training)
        for door, count in zip(doors, calls, strict=True):
            door.calls = count
        if sharded is not None:
            sharded.settle()


def _problem(leak: Leak, config: RunConfig, attention_name: str) -> Problem:
    if leak.what == LATER:
        return Problem(
            key="attn_implementation", value=attention_name, why=f"tried out before training, {leak.words}",
            remedy="attn_implementation: eager; where that leaks as well, install the releases of torch and "
            "transformers that this version is tested with",
        )  # fmt: skip
    return _not_apart(f"tried out before training, {leak.words}", config)


def _not_apart(why: str, config: RunConfig) -> Problem:
    if not (config.packing or config.padding_free or config.eval_packing):
        return Problem(
            key="attn_implementation", value=config.attn_implementation, why=why,
            remedy="attn_implementation: eager, or sdpa where the model has it",
        )  # fmt: skip
    key = "packing" if config.packing else "padding_free" if config.padding_free else "eval_packing"
    return Problem(
        key=key, value=True, why=why,
        remedy=f"{key}: false trains and evaluates one document per row; or install the releases of torch and "
        "transformers that this version is tested with",
    )  # fmt: skip
