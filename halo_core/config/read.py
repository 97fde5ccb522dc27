"""From a YAML file, Python values and words of the command line to one `RunConfig`, with every problem at once.

Not for deciding what a run does: `plan.py`. Nothing is ever ignored: each name given is a key, is taken with a note,
or is a problem. A value that fails keeps its default, so that later checks go on.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from halo_core.config import other_names, trainer_names, yaml_text
from halo_core.config.checks import contradictions, remarks
from halo_core.config.containers import Many, Optional
from halo_core.config.keys import KEYS, RunConfig
from halo_core.config.nodes import Entry, Items, Scalar, from_python
from halo_core.config.renamed import Foreign, table
from halo_core.config.values import Kind, Unfit, Word, near, shown
from halo_core.errors import Problem

COMMAND_LINE = "command line"
_SECRET = re.compile(r"(hub|hf|auth|access|api|secret).*(token|key)$|password")
"""Names whose values do not belong in what a run prints, which logs keep."""
FOREIGN: Mapping[str, Foreign] = table(
    *(
        names.values()
        for module in (trainer_names, other_names)
        for names in (module.RENAMED, module.SETTLED, module.REFUSED)
    )
)
"""Every name from elsewhere."""


@dataclass(frozen=True, kw_only=True)
class ConfigRead:
    """A configuration as read.

    config: every key with its value; those of `problems` have their defaults. problems: everything wrong, by source
    and line. notes: what the person should know. given: keys that were given, under Halo's names.
    places: key -> (file or "command line", 1-based line), each None where there is none.
    """

    config: RunConfig
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    given: frozenset[str]
    places: Mapping[str, tuple[str | None, int | None]]


@dataclass
class _Taken:
    """What reading has found so far. `chosen`: key -> (entry, the kind its former name had)."""

    chosen: dict[str, tuple[Entry, Kind | None]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read(
    path: Path | None,
    overrides: Sequence[str] = (),
    given: Mapping[str, object] | None = None,
    *,
    more_words: Mapping[str, Sequence[str]] | None = None,
) -> ConfigRead:
    """Return the configuration of a run with everything that is wrong with it.

    path: the YAML file, or None. overrides: words `key=value` or `--key=value`; each replaces the file's key.
    given: values from Python, which replace the file's and are replaced by the overrides. more_words: key -> further
    legal words, such as trackers and optimizers that plugins bring.
    """
    taken = _Taken()
    for entries in (_from_file(path, taken), _from_mapping(given or {}, taken), _from_words(overrides, taken)):
        taken.chosen.update(_keys_of(entries, taken))
    _list_of_datasets(taken)
    values = _values(taken, more_words or {})
    config = RunConfig(**values)
    names = frozenset(taken.chosen)
    places = {key: (entry.where, entry.line) for key, (entry, _) in taken.chosen.items()}
    failed = {problem.key for problem in taken.problems}
    for problem in contradictions(config, names):
        if problem.key not in failed:
            taken.problems.append(_placed(problem, taken))
    for key, text in remarks(config, names):
        taken.notes.append(f"{_place(taken.chosen[key][0]) if key in taken.chosen else ''}{key}: {text}")
    return ConfigRead(
        config=config,
        problems=tuple(taken.problems),
        notes=tuple(dict.fromkeys(taken.notes)),
        given=names,
        places=MappingProxyType(places),
    )


def _from_file(path: Path | None, taken: _Taken) -> list[Entry]:
    if path is None:
        return []
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        taken.problems.append(
            Problem(where=str(path), why=f"the file cannot be read: {reason}", remedy="give the path of a .yaml file")
        )
        return []
    entries, problems = yaml_text.entries(data, where=str(path))
    taken.problems += problems
    return entries


def _from_mapping(given: Mapping[str, object], taken: _Taken) -> list[Entry]:
    entries = []
    for name, value in given.items():
        try:
            entries.append(Entry(name=str(name), node=from_python(value), where=None))
        except TypeError as error:
            taken.problems.append(
                Problem(
                    key=str(name),
                    value=str(value)[:80],
                    why=str(error),
                    remedy="give text, a number, a boolean, a list or a mapping",
                )
            )
    return entries


def _from_words(words: Iterable[str], taken: _Taken) -> list[Entry]:
    entries = []
    for word in words:
        name, equals, text = word.partition("=")
        name = name.strip().lstrip("-").replace("-", "_").replace(".", "_")
        if not equals or not name:
            taken.problems.append(
                Problem(
                    key=word,
                    value="",
                    where=COMMAND_LINE,
                    why="it is no setting",
                    remedy="write key=value or --key=value, in one word",
                )
            )
            continue
        try:
            entries.append(Entry(name=name, node=yaml_text.value(text), where=COMMAND_LINE))
        except ValueError as error:
            taken.problems.append(
                Problem(
                    key=name,
                    value=text,
                    where=COMMAND_LINE,
                    why=f"the value cannot be read: {error}",
                    remedy="write lists as [a, b] and mappings as {name: value}, quoted for the shell",
                )
            )
    return entries


def _keys_of(entries: Iterable[Entry], taken: _Taken) -> dict[str, tuple[Entry, Kind | None]]:
    """Return key -> entry for one source, foreign names resolved; what is given twice keeps the first."""
    found: dict[str, tuple[Entry, Kind | None]] = {}
    names: dict[str, Entry] = {}
    for entry in entries:
        if entry.name in names:
            first = names[entry.name].line
            _refuse(taken, entry, f"the key is given twice{f' (first on line {first})' if first else ''}", "keep one")
            continue
        names[entry.name] = entry
        kind = None
        key = entry.name
        if key not in KEYS:
            foreign = FOREIGN.get(key)
            if foreign is None or foreign.to is None:
                _settle(entry, foreign, taken)
                continue
            key, kind = foreign.to, foreign.kind
            if not foreign.silent:
                taken.notes.append(f"{_place(entry)}{entry.name} {foreign.note}")
        if key in found:
            other = found[key][0]
            _refuse(
                taken,
                entry,
                f"{other.name} is given as well{f' (line {other.line})' if other.line else ''}, and it is the same key",
                f"keep {key}",
            )
            continue
        found[key] = (entry, kind)
    return found


def _settle(entry: Entry, foreign: Foreign | None, taken: _Taken) -> None:
    """Take or refuse a name that stands for no key."""
    if foreign is None:
        _refuse(taken, entry, *_unknown(entry))
    elif foreign.takes(entry.node):
        taken.notes.append(
            f"{_place(entry)}{entry.name}: {shown(entry.node)}: {foreign.note or 'asks for nothing here'}"
        )
    else:
        _refuse(taken, entry, foreign.why, foreign.remedy)


def _unknown(entry: Entry) -> tuple[str, str]:
    """Return (why, remedy) for a name that nobody knows."""
    if entry.name == "<<":
        return "a flat file merges nothing", "write the keys themselves"
    if not isinstance(entry.node, Scalar) and not isinstance(entry.node, Items):
        inside = [name.text for name, _ in entry.node.pairs if name.text in KEYS]
        if inside:
            return "there are no sections: keys stand at the top level", f"move {', '.join(inside)} to the left edge"
    folded = entry.name.lower().replace("-", "_").replace(".", "_").replace(" ", "_")
    exact = folded if folded in KEYS else FOREIGN[folded].to if folded in FOREIGN else None
    hint = (
        f"; did you mean {exact}?" if exact else near(folded, (*KEYS, *(name for name, f in FOREIGN.items() if f.to)))
    )
    return f"unknown key{hint}", "correct or remove it; docs/configuration.md has every key"


def _list_of_datasets(taken: _Taken) -> None:
    """Read a list under dataset_name as `datasets`."""
    entry, kind = taken.chosen.get("dataset_name", (None, None))
    if entry is not None and isinstance(entry.node, Items) and "datasets" not in taken.chosen:
        del taken.chosen["dataset_name"]
        taken.chosen["datasets"] = (entry, kind)


def _values(taken: _Taken, more_words: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, (entry, former) in taken.chosen.items():
        notes: list[str] = []
        try:
            if former is not None:
                former.read(entry.node, notes)
            notes.clear()
            values[key] = _with_words(KEYS[key].kind, more_words.get(key, ())).read(entry.node, notes)
        except Unfit as unfit:
            if any(entry.line is not None and (p.where, p.line) == (entry.where, entry.line) for p in taken.problems):
                continue  # the line itself could not be read as it stands
            line = unfit.line if entry.line is not None and unfit.line is not None else entry.line
            taken.problems.append(
                Problem(
                    key=entry.name,
                    value=shown(entry.node),
                    where=entry.where,
                    line=line,
                    why=unfit.why,
                    remedy=unfit.remedy,
                )
            )
        taken.notes += [f"{_place(entry)}{entry.name}: {note}" for note in notes]
    taken.problems.sort(key=lambda problem: (problem.where == COMMAND_LINE, problem.line or 0))
    return values


def _with_words(kind: Kind, words: Sequence[str]) -> Kind:
    """Return a kind that takes these words as well."""
    if not words:
        return kind
    if isinstance(kind, Word):
        return dataclasses.replace(kind, choices=tuple(dict.fromkeys((*kind.choices, *words))))
    if isinstance(kind, (Many, Optional)):
        return dataclasses.replace(kind, kind=_with_words(kind.kind, words))
    return kind


def _refuse(taken: _Taken, entry: Entry, why: str, remedy: str) -> None:
    value = "(not shown)" if _SECRET.search(entry.name.lower()) else shown(entry.node)
    taken.problems.append(
        Problem(key=entry.name, value=value, line=entry.line, where=entry.where, why=why, remedy=remedy)
    )


def _placed(problem: Problem, taken: _Taken) -> Problem:
    if problem.key not in taken.chosen:
        return problem
    entry = taken.chosen[problem.key][0]
    return dataclasses.replace(problem, line=entry.line, where=entry.where)


def _place(entry: Entry) -> str:
    if entry.line is not None:
        return f"{entry.where}: line {entry.line}: " if entry.where else f"line {entry.line}: "
    return f"{entry.where}: " if entry.where else ""
