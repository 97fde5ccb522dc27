"""The kinds of single values a key can have: what text means for each, what is refused, and with which words.

Not for lists, mappings and null (`containers.py`), nor for keys: which key has which kind stands in `keys.py`. Plain
and quoted text differ: a quoted number is text. Where two YAML readers would disagree about a plain text (`012`,
`1:30`), it is refused instead of guessed.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from halo_core.config.nodes import Items, Node, Pairs, Scalar, written

TRUE_WORDS = {"true": True, "false": False}
SWITCH_WORDS = {"yes": True, "no": False, "on": True, "off": False}
NULL_WORDS = ("", "~", "null", "none")

_WHOLE = re.compile(r"[-+]?(0|[1-9](_?[0-9])*)")
_REAL = re.compile(r"[-+]?((0|[1-9](_?[0-9])*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_LONGEST_NUMBER = 40


class Unfit(Exception):
    """A value that a key cannot have: why, what to write instead, and the line if it lies inside a longer value."""

    def __init__(self, why: str, remedy: str, line: int | None = None) -> None:
        super().__init__(why)
        self.why, self.remedy, self.line = why, remedy, line


class Kind(Protocol):
    """What values a key takes."""

    @property
    def words(self) -> str:
        """Return the kind in words, for documentation and remedies."""

    def read(self, node: Node, notes: list[str]) -> Any:
        """Return the value of a node; what the person should know goes to `notes`.

        Raises:
            Unfit: the node is no value of this kind.
        """


def near(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the known words that look like this one, or nothing."""
    found = difflib.get_close_matches(word.lower(), list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def is_null(node: Node) -> bool:
    """Return whether a node is plain `null`, `none`, `~` or nothing at all."""
    return isinstance(node, Scalar) and not node.quoted and node.text.lower() in NULL_WORDS


@dataclass(frozen=True, kw_only=True)
class Flag:
    """true or false; `yes`, `no`, `on`, `off` are taken with a note."""

    words: str = "boolean"

    def read(self, node: Node, notes: list[str]) -> bool:
        """Return the boolean. Raises Unfit for anything else."""
        found = switch(node, notes)
        if found is None:
            raise Unfit(f"it is no boolean{_but_quoted(node)}", "write true or false", node.line)
        return found


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A whole number from `low` to `high`, or one of `also`."""

    low: int
    high: int | None = None
    also: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        """Return the kind in words."""
        limit = f"{self.low} or more" if self.high is None else f"{self.low} to {self.high}"
        return f"whole number, {limit}" + "".join(f", or {value}" for value in self.also)

    def read(self, node: Node, notes: list[str]) -> int:
        """Return the number. Raises Unfit for other text and outside the range."""
        text = _number_text(node, self.words)
        if not _WHOLE.fullmatch(text):
            number = _real(text)
            shorter = number is not None and math.isfinite(number) and number.is_integer()
            remedy = f"write {int(number)}" if shorter and number is not None else f"give a {self.words}"
            raise Unfit("it takes a whole number", remedy, node.line)
        value = int(text.replace("_", ""))
        if value not in self.also and (value < self.low or (self.high is not None and value > self.high)):
            raise Unfit("it is out of range", f"give a {self.words}", node.line)
        return value


@dataclass(frozen=True, kw_only=True)
class Real:
    """A number from `low` to `high`; `above` and `below` are limits that are themselves excluded."""

    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None

    @property
    def words(self) -> str:
        """Return the kind in words."""
        limits = [
            f"{self.low:g} or more" if self.low is not None else "",
            f"above {self.above:g}" if self.above is not None else "",
            f"at most {self.high:g}" if self.high is not None else "",
            f"below {self.below:g}" if self.below is not None else "",
        ]
        return ", ".join(["number", *filter(None, limits)])

    def read(self, node: Node, notes: list[str]) -> float:
        """Return the number. Raises Unfit for other text, infinity and outside the range."""
        value = _real(_number_text(node, self.words))
        if value is None:
            raise Unfit("it takes a number", f"give a {self.words}", node.line)
        if not math.isfinite(value):
            raise Unfit("it takes a finite number", f"give a {self.words}", node.line)
        if (
            (self.low is not None and value < self.low)
            or (self.above is not None and value <= self.above)
            or (self.high is not None and value > self.high)
            or (self.below is not None and value >= self.below)
        ):
            raise Unfit("it is out of range", f"give a {self.words}", node.line)
        return value


@dataclass(frozen=True, kw_only=True)
class CountOrRatio:
    """A whole number of steps, or a share of all steps below 1. `positive` excludes 0."""

    positive: bool = False

    @property
    def words(self) -> str:
        """Return the kind in words."""
        return (
            f"whole number, {int(self.positive)} or more, or a ratio {'between 0 and' if self.positive else 'below'} 1"
        )

    def read(self, node: Node, notes: list[str]) -> int | float:
        """Return an int for a count, a float for a ratio. Raises Unfit for 1.5 and negative numbers."""
        try:
            value = Real(above=0.0).read(node, notes) if self.positive else Real(low=0.0).read(node, notes)
        except Unfit as unfit:
            raise Unfit(unfit.why, f"give a {self.words}", unfit.line) from None
        if 0.0 < value < 1.0:
            return value
        if not value.is_integer():
            raise Unfit("from 1 on it counts steps, and half a step does not exist", f"give a {self.words}", node.line)
        return int(value)


@dataclass(frozen=True, kw_only=True)
class Text:
    """Text, kept as it is written."""

    words: str = "text"

    def read(self, node: Node, notes: list[str]) -> str:
        """Return the text. Raises Unfit where it is empty or YAML readers would not agree that it is text."""
        if not isinstance(node, Scalar):
            raise Unfit(f"it takes one text, not a {shape(node)}", "write one value", node.line)
        if is_null(node) or not node.text:
            raise Unfit("it needs a value", "write one, or remove the line", node.line)
        if not node.quoted:
            _refuse_ambiguous(node)
            if node.text.lower() in (*TRUE_WORDS, *SWITCH_WORDS):
                raise Unfit(
                    "it takes text, and this word is a boolean", f'write "{node.text}" if the text is meant', node.line
                )
        if "\0" in node.text or any("\ud800" <= letter <= "\udfff" for letter in node.text):
            raise Unfit("it holds a character that no name can have", "remove the character", node.line)
        return node.text


@dataclass(frozen=True, kw_only=True)
class Word:
    """One of a few words, which stay words whatever YAML thinks of them: `no` and `none` are no booleans here.

    aliases: other spellings with the same meaning, taken with a note. refused: known words that Halo does not have,
    with (why, remedy). pattern: other texts that are legal as well, told in `pattern_words`.
    """

    choices: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    pattern: str | None = None
    pattern_words: str = ""

    @property
    def words(self) -> str:
        """Return the kind in words."""
        return " | ".join([*self.choices, *filter(None, [self.pattern_words])])

    def read(self, node: Node, notes: list[str]) -> str:
        """Return the word. Raises Unfit with near matches and the legal words."""
        legal = f"one of: {', '.join([*self.choices, *filter(None, [self.pattern_words])])}"
        if not isinstance(node, Scalar):
            raise Unfit(f"it takes one word, not a {shape(node)}", legal, node.line)
        text = node.text if node.text in self.choices else node.text.lower()
        if text in self.choices:
            return text
        if text in self.aliases:
            notes.append(f"{node.text} reads as {self.aliases[text]}")
            return self.aliases[text]
        if text in self.refused:
            why, remedy = self.refused[text]
            raise Unfit(why, remedy, node.line)
        if self.pattern is not None and re.fullmatch(self.pattern, node.text):
            return node.text
        if not text or is_null(node):
            raise Unfit("it needs a value", legal, node.line)
        if text in TRUE_WORDS:
            raise Unfit("it takes a word, not a boolean", legal, node.line)
        raise Unfit(f"it does not know this word{near(text, (*self.choices, *self.aliases))}", legal, node.line)


def plain(node: Node, notes: list[str]) -> Any:
    """Return what a node means where the key asks for no kind: null, boolean, number, text, or these in lists.

    Raises:
        Unfit: text that YAML readers would not agree about.
    """
    if isinstance(node, Items):
        return [plain(item, notes) for item in node.items]
    if isinstance(node, Pairs):
        return {name.text: plain(item, notes) for name, item in node.pairs}
    if node.quoted:
        return node.text
    if is_null(node):
        return None
    found = switch(node, notes)
    if found is not None:
        return found
    _refuse_ambiguous(node)
    if _WHOLE.fullmatch(node.text) and len(node.text) <= _LONGEST_NUMBER:
        return int(node.text.replace("_", ""))
    number = _real(node.text)
    return node.text if number is None else number


def shown(node: Node) -> str:
    """Return a value as it is quoted in a problem, cut where it is long."""
    text = written(node).replace("\n", " ")
    return text if len(text) <= 80 else text[:77] + "..."


def switch(node: Node, notes: list[str]) -> bool | None:
    """Return the boolean that a plain scalar means (noting `yes`, `no`, `on`, `off`), or None."""
    if not isinstance(node, Scalar) or node.quoted:
        return None
    text = node.text.lower()
    if text in SWITCH_WORDS:
        notes.append(f"{node.text} reads as {str(SWITCH_WORDS[text]).lower()}")
        return SWITCH_WORDS[text]
    return TRUE_WORDS.get(text)


def _number_text(node: Node, words: str) -> str:
    """Return the text of a plain scalar that may be a number."""
    if not isinstance(node, Scalar):
        raise Unfit(f"it takes one number, not a {shape(node)}", f"give a {words}", node.line)
    if node.quoted:
        raise Unfit("it takes a number, and quotation marks make it text", "write it without quotes", node.line)
    if is_null(node):
        raise Unfit("it needs a value", f"give a {words}", node.line)
    _refuse_ambiguous(node)
    if len(node.text) > _LONGEST_NUMBER:
        raise Unfit("it has too many digits", f"give a {words}", node.line)
    return node.text


def _real(text: str) -> float | None:
    if text.lower().lstrip("+-") in (".inf", ".nan"):
        return math.inf
    if len(text) > _LONGEST_NUMBER or not _REAL.fullmatch(text):
        return None
    return float(text.replace("_", ""))


def _refuse_ambiguous(node: Scalar) -> None:
    """Raise Unfit for plain text that means different things to different YAML readers."""
    if _LEADING_ZERO.fullmatch(node.text):
        bare = node.text.lstrip("+-").lstrip("0") or "0"
        raise Unfit(
            "a number with a leading zero is octal to some YAML readers",
            f'write {bare}, or "{node.text}" for text',
            node.line,
        )
    if _SEXAGESIMAL.fullmatch(node.text):
        raise Unfit(
            "digits with a colon are a number to the base of 60 to some YAML readers",
            f'write the number itself, or "{node.text}" for text',
            node.line,
        )


def _but_quoted(node: Node) -> str:
    if isinstance(node, Scalar) and node.quoted and node.text.lower() in (*TRUE_WORDS, *SWITCH_WORDS):
        return ", and quotation marks make it text"
    return ""


def shape(node: Node) -> str:
    """Return what a node is, in words."""
    if isinstance(node, Scalar):
        return "single value"
    return "list" if isinstance(node, Items) else "mapping"
