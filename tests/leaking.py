"""Ways in which a model could let documents leak into each other, for tests that must notice them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_core.kernels.delta_rule.chunked import delta_rule
from halo_core.kernels.documents import Documents, find
from halo_core.kernels.short_conv.reference import short_conv
from halo_core.models import masks, mixers

seen_positions = masks.seen_positions


def as_one(documents: Documents) -> Documents:
    """Return one document per row."""
    return find(torch.ones_like(documents.numbers))


def a_token_late(documents: Documents) -> Documents:
    """Return documents that begin one token late each."""
    numbers = documents.numbers.clone()
    numbers[:, 1:] = documents.numbers[:, :-1]
    return find(numbers + 1)


def with_documents(kernel: Callable[..., Tensor], others: Callable[[Documents], Documents]) -> Callable[..., Tensor]:
    """Return the kernel, told of other documents than there are."""
    return lambda *given: kernel(*given[:-1], others(given[-1]))


def no_documents(numbers: Tensor, window: int | None = None) -> Tensor:
    """Let every position see all before it, which is what a mask of ones says."""
    return seen_positions(torch.zeros_like(numbers), window)


def no_order(numbers: Tensor, window: int | None = None) -> Tensor:
    """Let every position see its whole document."""
    return numbers.unsqueeze(2) == numbers.unsqueeze(1)


def nothing_but_itself(numbers: Tensor, window: int | None = None) -> Tensor:
    """Let every position see itself alone."""
    return torch.eye(numbers.shape[1], dtype=torch.bool, device=numbers.device).expand(numbers.shape[0], -1, -1)


MASKS = {"no documents": no_documents, "no order": no_order, "nothing but itself": nothing_but_itself}
KERNELS: dict[str, dict[str, Any]] = {
    "convolution over borders": {"short_conv": with_documents(short_conv, as_one)},
    "convolution with late borders": {"short_conv": with_documents(short_conv, a_token_late)},
    "state over borders": {"delta_rule": with_documents(delta_rule, as_one)},
    "state with late borders": {"delta_rule": with_documents(delta_rule, a_token_late)},
}
LEAKS = [
    *((name, "no documents") for name in ("gpt_oss", "qwen3_moe", "gemma4", "lfm2_moe", "qwen3_5")),
    ("qwen3", "no order"),
    ("gemma4_moe", "nothing but itself"),
    *((name, way) for name in ("lfm2", "lfm2_moe", "qwen3_5", "qwen3_5_moe") for way in KERNELS if "conv" in way),
    *((name, way) for name in ("qwen3_5", "qwen3_5_moe") for way in KERNELS if "state" in way),
]
"""(architecture, way of leaking) that the tests try."""


def breaks(way: str, model: Any, architecture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `model` leak in that way; masks leak in every model until the test ends."""
    if way in MASKS:
        monkeypatch.setattr(masks, "seen_positions", MASKS[way])
        return
    mixers.detach(model)
    mixers.attach(model, architecture, {**mixers.KERNELS, **KERNELS[way]})
