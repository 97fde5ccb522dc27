"""Names that come from elsewhere: renamed keys, keys that ask for nothing here, and keys that Halo does not have.

Not for Halo's own keys (`keys.py`). A name that means the same is taken with a note; one that asks for something
Halo does not do is refused with the way out; none ends in a bare "unknown key". The long tables stand in
`trainer_names.py` (transformers and TRL) and `other_names.py` (other tools and methods); lists of names are texts
with spaces between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from halo_core.config.nodes import Items, Node, Pairs, Scalar, written
from halo_core.config.values import SWITCH_WORDS, Kind, is_null

_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """What becomes of one name that is no key of Halo.

    to: the key with the same meaning; the value goes there (checked by `kind` first, where the old name took less).
    harmless: values that ask for nothing Halo does not do anyway, as plain lower-case text; None: every value.
    note: what the person is told when the name is taken ("" for "asks for nothing here"). silent: no need to tell.
    why, remedy: the refusal of all other values.
    """

    name: str
    note: str = ""
    to: str | None = None
    kind: Kind | None = None
    silent: bool = False
    harmless: tuple[str, ...] | None = ()
    why: str = ""
    remedy: str = ""

    def takes(self, node: Node) -> bool:
        """Return whether a value asks for nothing; null never asks for anything."""
        return self.harmless is None or normal(node) in ("null", *self.harmless)


def normal(node: Node) -> str:
    """Return a value in one spelling: null, true, false, numbers without trailing zeros, lower-case text."""
    if isinstance(node, Items) and not node.items:
        return "[]"
    if isinstance(node, Pairs):
        return "{" + ", ".join(sorted(f"{name.text}: {normal(item)}" for name, item in node.pairs)) + "}"
    if not isinstance(node, Scalar):
        return written(node).lower()
    if is_null(node) or not node.text:
        return "null"
    text = node.text.lower()
    if not node.quoted and text in SWITCH_WORDS:
        return "true" if SWITCH_WORDS[text] else "false"
    return f"{float(text):g}" if _NUMBER.fullmatch(text) and len(text) < 40 else text


def same(to: str, names: str, *, kind: Kind | None = None, silent: bool = False) -> Iterable[Foreign]:
    """Yield names that mean the key `to`; `silent` ones are short forms of our own and need no note."""
    for name in names.split():
        yield Foreign(name=name, to=to, kind=kind, silent=silent, note=f"is called {to} here")


def moot(note: str, names: str) -> Iterable[Foreign]:
    """Yield names whose every value is harmless: it changes no result, and `note` says what Halo does."""
    for name in names.split():
        yield Foreign(name=name, harmless=None, note=note)


def only(harmless: str, note: str, why: str, remedy: str, names: str) -> Iterable[Foreign]:
    """Yield names that are taken at some values (`harmless`, separated by spaces) and refused at all others."""
    for name in names.split():
        yield Foreign(name=name, harmless=tuple(harmless.split()), note=note, why=why, remedy=remedy)


def gone(why: str, remedy: str, names: str) -> Iterable[Foreign]:
    """Yield names that are refused at every value but null."""
    for name in names.split():
        yield Foreign(name=name, why=why, remedy=remedy)


def table(*groups: Iterable[Foreign]) -> Mapping[str, Foreign]:
    """Return name -> Foreign; a name that stands in two groups is a mistake of ours."""
    found: dict[str, Foreign] = {}
    for group in groups:
        for foreign in group:
            assert foreign.name not in found, f"{foreign.name} stands in two groups"
            found[foreign.name] = foreign
    return found
