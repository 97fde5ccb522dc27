"""What becomes of every parameter in training: role, decay, rule, and bytes of weight, gradient and optimizer state.

Not for doing it (`build.py`). Read off a model on any device, so that a plan can be shown before there are weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias

import torch
from torch import nn

from halo_core.config.precision import TORCH_ADAMW, Rule, rule_of
from halo_core.optim.roles import DECAYED, Role, roles

Step: TypeAlias = Literal["torch", "bf16 stochastic", "exact fp32", "fp32 master"]
"""How one parameter is stepped. `torch`: by torch's optimizer, in the parameter's own dtype. `bf16 stochastic`: bf16
moments, weight and second moment rounded by chance. `exact fp32`: fp32 weight and moments. `fp32 master`: a bf16 weight
that is the nearest to an fp32 one."""

_NUMBER = re.compile(r"\d+")
_WIDE = torch.float32.itemsize


class PrecisionSettings(Protocol):
    """The configuration keys read here."""

    @property
    def optim(self) -> str: ...
    @property
    def bf16(self) -> bool: ...
    @property
    def gradient_accumulation_steps(self) -> int: ...
    @property
    def grad_accumulation_dtype(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One trainable parameter, or several that have everything but their names in common.

    name: its name in the model; numbers in names of several are `*`. elements: of the whole tensors, over all
    processes. The rest is bytes an element: `gradient` of the gradients of one backward pass where they stay until the
    step, `sums` of fp32 sums over micro-batches, `state` of the optimizer.
    """

    name: str
    role: Role
    step: Step
    dtype: torch.dtype
    tensors: int
    elements: int
    gradient: int
    sums: int
    state: int

    @property
    def is_decayed(self) -> bool:
        """Return whether weight decay pulls at it."""
        return self.role in DECAYED

    @property
    def bytes_each(self) -> int:
        """Return all bytes an element takes."""
        return self.dtype.itemsize + self.gradient + self.sums + self.state


def trained(model: nn.Module, config: PrecisionSettings) -> list[Trained]:
    """Return every trainable parameter, in the order of the model."""
    role, rule = roles(model), rule_of(config.optim, config.bf16)
    sums_wide = config.gradient_accumulation_steps > 1 and config.grad_accumulation_dtype == "float32"
    found = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_summed = sums_wide and parameter.dtype.itemsize < _WIDE
        found.append(
            Trained(
                name=name,
                role=role[name],
                step=_step(rule, parameter.dtype),
                dtype=parameter.dtype,
                tensors=1,
                elements=parameter.numel(),
                # torch's own optimizer reads gradients in the parameter's dtype, which stand beside the sums then.
                gradient=0 if is_summed and rule != "torch" else parameter.dtype.itemsize,
                sums=_WIDE if is_summed else 0,
                state=_state(rule, config.optim, parameter.dtype),
            )
        )
    return found


def by_pattern(rows: Iterable[Trained]) -> list[Trained]:
    """Return one row per name with its numbers as `*`."""
    return _joined((replace(row, name=_NUMBER.sub("*", row.name)) for row in rows), lambda row: row.name)


def by_group(rows: Iterable[Trained]) -> list[Trained]:
    """Return one row per role and way of being stepped; `name` says nothing there."""
    return _joined((replace(row, name="") for row in rows), lambda row: "")


def log_lines(rows: Iterable[Trained]) -> list[str]:
    """Return a line per group: decayed or plain, its rule, how many tensors and elements, bytes of its state.

    Bytes are of the whole tensors; each of several processes holds its share.
    """
    groups: dict[tuple[bool, Step, torch.dtype], list[Trained]] = {}
    for row in rows:
        groups.setdefault((row.is_decayed, row.step, row.dtype), []).append(row)
    lines = []
    for (is_decayed, step, dtype), members in groups.items():
        tensors, elements = sum(row.tensors for row in members), sum(row.elements for row in members)
        state = sum(row.elements * row.state for row in members)
        lines.append(
            f"optimizer: {'decayed' if is_decayed else 'plain'}, {_words(step, dtype)}: {tensors:,} tensors, "
            f"{elements:,} elements, {state:,} bytes of state"
        )
    return lines


def _words(step: Step, dtype: torch.dtype) -> str:
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}.get(dtype, str(dtype).removeprefix("torch."))
    return {
        "torch": f"{name} by torch's own rule{'' if dtype.itemsize >= _WIDE else ', rounded to nearest'}",
        "bf16 stochastic": "bf16 weights and moments with stochastic rounding",
        "exact fp32": "fp32 weights and moments, exact",
        "fp32 master": "bf16 weights beside fp32 masters and moments",
    }[step]


def _step(rule: Rule, dtype: torch.dtype) -> Step:
    if rule == "torch":
        return "torch"
    if dtype.itemsize >= _WIDE:
        return "exact fp32"
    return "bf16 stochastic" if rule == "stochastic" else "fp32 master"


def _state(rule: Rule, optim: str, dtype: torch.dtype) -> int:
    """Return bytes an element of the optimizer's state. Source: torch.optim.SGD, AdamW; `adamw_bf16.py`."""
    if rule == "torch":
        return 2 * dtype.itemsize if optim in TORCH_ADAMW else 0
    if rule == "stochastic":
        return 2 * dtype.itemsize
    return 2 * _WIDE + (_WIDE if dtype.itemsize < _WIDE else 0)


def _joined(rows: Iterable[Trained], key: Callable[[Trained], str]) -> list[Trained]:
    """Return the rows with those of one key put together that are equal but for tensors and elements."""
    found: dict[tuple[object, ...], Trained] = {}
    for row in rows:
        place = (key(row), row.role, row.step, row.dtype, row.gradient, row.sums, row.state)
        if place in found:
            before = found[place]
            row = replace(before, tensors=before.tensors + row.tensors, elements=before.elements + row.elements)
        found[place] = row
    return list(found.values())
