"""The configuration of a run: every key with its default, read from YAML, Python and the command line.

Not for deciding what a run does (`halo_core.plan`). No torch is imported here.
"""

from __future__ import annotations

from halo_core.config.facts import Asks, KeyFacts
from halo_core.config.keys import KEYS, RunConfig, active_features
from halo_core.config.mechanisms import RUN_MECHANISMS
from halo_core.config.read import ConfigRead, read
from halo_core.config.write import to_yaml

__all__ = [
    "Asks",
    "ConfigRead",
    "KEYS",
    "KeyFacts",
    "RUN_MECHANISMS",
    "RunConfig",
    "active_features",
    "read",
    "to_yaml",
]
