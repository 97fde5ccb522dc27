"""What a person with a YAML is told: problems, collected, and raised once.

Not for our own bugs: those are assertions and ordinary exceptions (exit code 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

EXIT_MISTAKE = 2
EXIT_BUG = 1
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that stands in the way of a run, told as: key and value, why, way out, who says so.

    `key` is the configuration key (or None when the problem belongs to no single key), `value` what the person
    gave, `line` the 1-based line of the YAML file, `where` any other place (`rows.jsonl:7`, a plugin's name).
    `kind` is "not built" when only a mechanism of this version is missing: a dry-run shows such a row and passes.
    """

    why: str
    remedy: str
    key: str | None = None
    value: object = None
    line: int | None = None
    where: str | None = None
    by: str = "halo_core"
    kind: Literal["mistake", "not built"] = "mistake"

    def text(self) -> str:
        """Return the problem as the lines a person reads."""
        place = f"line {self.line}: " if self.line is not None else ""
        place = f"{self.where}: {place}" if self.where else place
        subject = f"{self.key}: {shown(self.value)}  " if self.key is not None else ""
        said_by = f"  (says {self.by})" if self.by != "halo_core" else ""
        head = f"{place}{subject}".rstrip()
        lines = [head, f"    why: {self.why}{said_by}"] if head else [f"why: {self.why}{said_by}"]
        return "\n".join([*lines, f"    do:  {self.remedy}"])


class Refused(Exception):
    """Raised once with every problem found; a command prints them and exits with code 2, without a traceback.

    everywhere: every process of the run raises this same refusal, so that one of them tells it for all.
    """

    def __init__(self, problems: Problem | Iterable[Problem], *, everywhere: bool = False) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.everywhere = everywhere
        assert self.problems, "a refusal needs at least one problem"
        super().__init__(self.text())

    def text(self) -> str:
        """Return all problems, numbered when there are several."""
        if len(self.problems) == 1:
            return self.problems[0].text()
        return "\n".join(f"{number}. {problem.text()}" for number, problem in enumerate(self.problems, start=1))


def shown(value: object) -> str:
    """Return a value the way it would stand in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {shown(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, whose plural ends in s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
