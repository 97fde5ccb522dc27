"""Activation checkpointing: layers are computed again in backward instead of keeping their activations.

Not for choosing layers: every layer that transformers marks for it is recomputed. A recomputed router must send
tokens to the experts of the first pass even when scores are tied or noisy, so the choice is replayed; and with it what
dispatches between processes found out about their rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from halo_core.expert_parallel.dispatcher import Ticket
from halo_core.expert_parallel.recall import FirstPass, SecondPass

_TOP_K = (torch.topk, torch.Tensor.topk)


class _Choices(TorchFunctionMode):
    """Answers every top-k by its indices and the scores at them: kept ones when there are some, else fresh ones.

    Both passes gather, so that they save the same tensors for backward. A mode over torch's functions, not over its
    operators: that one would call Python for every kernel of the layer, which here doubled the cost of recomputing.
    """

    def __init__(self, chosen: deque[Tensor], *, replays: bool) -> None:
        super().__init__()
        self.chosen = chosen
        self.replays = replays

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in _TOP_K:
            return func(*args, **kwargs)
        if self.replays:
            indices = self.chosen.popleft()
        else:
            with torch.no_grad():
                indices = func(*args, **kwargs).indices
            self.chosen.append(indices)
        scores, dim = _scores_and_dim(*args, **kwargs)
        return torch.return_types.topk((scores.gather(dim, indices), indices))


def _scores_and_dim(input: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> tuple[Tensor, int]:
    """Return what of top-k's arguments, by torch's own names, a gather needs."""
    return input, dim


class _Together:
    """Two contexts as one that can be entered again."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self.contexts = contexts
        self.entered: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        for context in self.contexts:
            stack.enter_context(context)
        self.entered.append(stack)

    def __exit__(self, *fault: Any) -> None:
        self.entered.pop().__exit__(*fault)


def replayed_choices() -> tuple[_Together, _Together]:
    """Return the pair of contexts for one layer: first pass, recomputation."""
    chosen: deque[Tensor] = deque()
    tickets: deque[Ticket] = deque()
    return (
        _Together(_Choices(chosen, replays=False), FirstPass(tickets)),
        _Together(_Choices(chosen, replays=True), SecondPass(tickets)),
    )


def enable_recompute(model: PreTrainedModel, *, routes: bool) -> None:
    """Recompute every layer of `model` in backward, without reentrant autograd.

    routes: whether layers route tokens to experts, by a top-k to be replayed.

    Gradients are the same bits as without it.
    """
    settings: dict[str, Any] = {"use_reentrant": False}
    if routes:
        settings["context_fn"] = replayed_choices
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
