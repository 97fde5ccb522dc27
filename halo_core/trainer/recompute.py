"""Activation checkpointing: layers are computed again in backward instead of keeping their activations.

Not for choosing layers: every layer that transformers marks for it is recomputed. A recomputed router must send
tokens to the experts of the first pass even when scores are tied or noisy, so the choice is replayed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel


class _Record(TorchDispatchMode):
    """Keeps the indices of every top-k."""

    def __init__(self, chosen: deque[Tensor]) -> None:
        super().__init__()
        self.chosen = chosen

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            self.chosen.append(result[1].clone())
        return result


class _Replay(TorchDispatchMode):
    """Answers every top-k with the kept indices and the fresh scores at them."""

    def __init__(self, chosen: deque[Tensor]) -> None:
        super().__init__()
        self.chosen = chosen

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is not torch.ops.aten.topk.default:
            return func(*args, **(kwargs or {}))
        indices = self.chosen.popleft()
        dim = args[2] if len(args) > 2 else -1
        return args[0].gather(dim, indices), indices


def replayed_choices() -> tuple[_Record, _Replay]:
    """Return the pair of modes for one layer: first pass, recomputation."""
    chosen: deque[Tensor] = deque()
    return _Record(chosen), _Replay(chosen)


def enable_recompute(model: PreTrainedModel) -> None:
    """Recompute every layer of `model` in backward, without reentrant autograd, with routing replayed.

    Gradients are the same bits as without it.
    """
    model.activation_checkpointing_enable(
        activation_checkpointing_kwargs={"use_reentrant": False, "context_fn": replayed_choices}
    )
