"""The table of kernels that `kernels: {name: value}` may switch, and the check of such a mapping.

Not for the kernels themselves: each lives in its own package beside its reference. No torch here, so that a plan
can be checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from halo_core.errors import Problem

AUTO = "auto"
"""Lets the kernel's own rule choose; the default of every kernel."""

KERNELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "experts": (AUTO, "grouped", "reference"),
        "head": (AUTO, "reference"),
    }
)
"""Kernel name -> the values a person may give. `reference` is the specification, in plain torch, of every kernel."""


def problems(asked: Mapping[str, object] | None) -> tuple[Problem, ...]:
    """Return what is wrong with the configuration's `kernels` mapping: unknown kernels and unknown values."""
    found: list[Problem] = []
    for name, value in (asked or {}).items():
        if name not in KERNELS:
            found.append(
                Problem(
                    key=f"kernels.{name}",
                    value=value,
                    why="no kernel has this name",
                    remedy=f"kernels that can be switched: {', '.join(sorted(KERNELS))}",
                )
            )
        elif value not in KERNELS[name]:
            found.append(
                Problem(
                    key=f"kernels.{name}",
                    value=value,
                    why=f"the kernel {name} has no such form",
                    remedy=f"one of: {', '.join(KERNELS[name])}",
                )
            )
    return tuple(found)
