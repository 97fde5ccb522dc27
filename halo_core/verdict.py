"""The three answers to "does this work here": Supported, Experimental, Unsupported.

Not for deciding: how answers of several authors combine is `support.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Proof = Literal["cpu", "gpu"]


@dataclass(frozen=True, kw_only=True)
class Supported:
    """It works, and `proof` says on which kind of device that has to be shown.

    `cpu`: the conformance kit shows it on every test run, no further evidence is kept.
    `gpu`: only a run on a GPU shows it; until the evidence holds such a run the cell reads `declared`.
    """

    proof: Proof


@dataclass(frozen=True, kw_only=True)
class Experimental:
    """It may work; a run needs `allow_experimental: [feature]`. `note` says what is not settled."""

    note: str


@dataclass(frozen=True, kw_only=True)
class Unsupported:
    """It cannot work: `reason` is the mechanism, `instead` the way out.

    `because` names the module classes that stand in the way; each must occur in the architecture's tiny model.
    """

    reason: str
    instead: str
    because: tuple[str, ...] = ()


Verdict: TypeAlias = Supported | Experimental | Unsupported
