"""A configuration as YAML that reads back to the same values.

Not for keeping comments or the order of a person's file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from halo_core.config.keys import KEYS, RunConfig
from halo_core.config.values import NULL_WORDS, SWITCH_WORDS, TRUE_WORDS

_SAFE = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")


def to_yaml(config: RunConfig, *, only: frozenset[str] | None = None) -> str:
    """Return the configuration as YAML, one key a line; `only` keeps these keys, None keeps all."""
    return "".join(f"{name}: {text_of(getattr(config, name))}\n" for name in KEYS if only is None or name in only)


def text_of(value: object) -> str:
    """Return a value as it can stand after a key."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{text_of(str(name))}: {text_of(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(text_of(item) for item in value) + "]"
    text = str(value)
    words = {*TRUE_WORDS, *SWITCH_WORDS, *NULL_WORDS}
    return text if _SAFE.fullmatch(text) and text.lower() not in words else _quoted(text)


def _quoted(text: str) -> str:
    """Return text in double quotes; letters beyond the basic plane are written out, as YAML has no surrogate pairs."""
    letters = (letter if ord(letter) > 0xFFFF else json.dumps(letter)[1:-1] for letter in text)
    return f'"{"".join(letters)}"'
