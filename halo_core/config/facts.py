"""What is known about a configuration key, and how a field of the configuration carries it.

Not for the keys themselves: `keys.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halo_core.config.values import Kind

_METADATA = "key"


@dataclass(frozen=True, kw_only=True)
class Asks:
    """Which feature a key asks for. At the values `inert` it asks for nothing.

    feature: its name, `{}` standing for the value. also: value -> what stands for it in the name, where that is not
    the value itself; the entry of `...` stands for every other value.
    """

    feature: str
    inert: tuple[object, ...]
    also: Mapping[object, str] = dataclasses.field(default_factory=dict)

    def by(self, value: object) -> str | None:
        """Return the feature that this value asks for, or None."""
        if value in self.inert:
            return None
        return self.feature.format(self.also.get(value, self.also.get(..., value)))


@dataclass(frozen=True, kw_only=True)
class KeyFacts:
    """A key for people and for the plan.

    kind: what values it takes. default: its value when nothing is given. meaning: one line. unit: of a number.
    reader: the part of Halo that reads it. area: the section of the documentation.
    asks: the feature it asks for, if any. idle_while: (another key, values of that key under which this one has no
    effect).
    """

    name: str
    kind: Kind
    default: Any
    meaning: str
    reader: str
    area: str
    unit: str = ""
    asks: Asks | None = None
    idle_while: tuple[str, tuple[object, ...]] | None = None


def key(
    default: Any,
    kind: Kind,
    meaning: str,
    *,
    reader: str,
    area: str,
    unit: str = "",
    asks: Asks | None = None,
    idle_while: tuple[str, tuple[object, ...]] | None = None,
) -> Any:
    """Return a dataclass field with this default and these facts."""
    facts = {
        "kind": kind,
        "default": default,
        "meaning": meaning,
        "reader": reader,
        "area": area,
        "unit": unit,
        "asks": asks,
        "idle_while": idle_while,
    }
    return dataclasses.field(default=default, metadata={_METADATA: facts})


def facts_of(config_class: type) -> dict[str, KeyFacts]:
    """Return name -> facts for the fields of a configuration class, in order."""
    return {
        field.name: KeyFacts(name=field.name, **field.metadata[_METADATA]) for field in dataclasses.fields(config_class)
    }
