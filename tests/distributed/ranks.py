"""The kit's harness of forked ranks, under the name that these tests use."""

from __future__ import annotations

from halo_core.testing.ranks import TIMEOUT, RankFailed, run

__all__ = ["TIMEOUT", "RankFailed", "run"]
