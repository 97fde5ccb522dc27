"""The state of every random generator a run draws from, and putting it back.

Not for the order of rows: that is a pure function of the seed and the step.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators, on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_from(text: str) -> None:
    """Seed every generator from a text: equal texts give equal numbers, other texts unrelated ones."""
    seed_all(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little"))


def captured() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the states as tensors, and the rest as values that JSON knows."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
    if torch.cuda.is_available():
        tensors |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    rest = {"python": [version, list(words), gauss], "numpy": [kind, position, has_gauss, cached]}
    return tensors, rest


def put_back(tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
    """Set every generator to a captured state. States of devices that are not here are left alone."""
    version, words, gauss = rest["python"]
    random.setstate((version, tuple(words), gauss))
    kind, position, has_gauss, cached = rest["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"].cpu())
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            state = tensors.get(f"cuda.{index}")
            if state is not None:
                torch.cuda.set_rng_state(state.cpu(), index)
