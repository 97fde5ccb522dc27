"""Several processes compute what one does: loss, norm, every gradient, expert outputs, weights after four steps."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from halo_core import registry
from halo_core.models.tiny import write_tiny
from halo_core.testing.cases import shake
from halo_core.testing.compare import differences
from tests.distributed import parity, ranks
from tests.distributed.parity import Expected, Setting

ARCHITECTURES = {a.name: a for a in registry.load().architectures()}
MOE = sorted(name for name, architecture in ARCHITECTURES.items() if architecture.spec.is_moe)
TOLERANCE = 1e-5
"""Absolute, fp32: two orders of the same sums."""

EP2, EP4, BOTH = {"ep": 2}, {"ep": 4}, {"shard": 2, "ep": 2}
S = Setting
