"""The reference page of the configuration, made from the keys: `python -m halo_core.config.describe`.

Not for tutorials: those are written by hand. A test keeps `docs/configuration.md` equal to this output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from halo_core.config.facts import KeyFacts
from halo_core.config.keys import KEYS
from halo_core.config.read import FOREIGN
from halo_core.config.renamed import Foreign
from halo_core.config.write import text_of

_HEAD = """# Configuration

One flat YAML file describes a run: `halo train run.yaml`, every line `key: value`. Names and defaults are those of
transformers' TrainingArguments and TRL's SFTConfig, ScriptArguments and ModelConfig where the thing is the same.
This page is generated (`make docs`); edit `halo_core/config/keys.py` instead.

- `halo train run.yaml learning_rate=1e-5 --max-steps=20` replaces keys of the file; in names, `-` and `.` read as `_`.
- `2e-5` is a number. `yes`, `no`, `on`, `off` are taken as booleans, with a note. Where a key takes a word, `no` and
  `none` are words. `null` and `none` clear a key that may be null.
- `012` and `1:30` are refused: YAML readers disagree about them. So are quoted numbers, keys given twice, tabs,
  anchors, tags and a second document. All mistakes are told at once, each with its line.
- Names of transformers, TRL and other tools that are no keys here are listed at the end: taken with a note where they
  mean the same or ask for nothing, refused with the way out otherwise. Nothing is ever ignored.
- *asks for* names the feature that a key switches on; `halo matrix` says where it works, and a feature that this
  version does not have yet is shown by `--dry-run` and refused by a run.
"""

_NAMES = """
## Names from elsewhere

### Other names of the same key

{same}

### Names that ask for nothing here

These change no result, at any value or at the values given; other values are refused.

{settled}

### Names that Halo does not have

{refused}
"""


def markdown() -> str:
    """Return docs/configuration.md."""
    parts = [_HEAD]
    for area in dict.fromkeys(facts.area for facts in KEYS.values()):
        rows = [_row(facts) for facts in KEYS.values() if facts.area == area]
        header = ("key", "type", "default", "unit", "meaning", "read by", "asks for")
        parts.append(f"\n## {area}\n\n{_table(header, rows)}\n")
    names = sorted(FOREIGN.values(), key=lambda foreign: foreign.name)
    same = _grouped((f"`{f.to}`", f.name) for f in names if f.to)
    settled = _grouped(
        (_taken_at(f), f.note, f.remedy, f.name) for f in names if not f.to and (f.harmless is None or f.harmless)
    )
    refused = _grouped((f.why, f.remedy, f.name) for f in names if not f.to and f.harmless == ())
    parts.append(
        _NAMES.format(
            same=_table(("key", "other names"), same),
            settled=_table(("taken at", "because", "otherwise", "names"), settled),
            refused=_table(("why", "instead", "names"), refused),
        )
    )
    return "".join(parts)


def _row(facts: KeyFacts) -> tuple[str, ...]:
    default = "none" if facts.default == () and facts.name == "report_to" else text_of(facts.default)
    meaning = facts.meaning
    if facts.idle_while is not None:
        other, values = facts.idle_while
        meaning += f" (no effect while {other} is {' or '.join(text_of(value) for value in values)})"
    asks = f"`{facts.asks.feature.format('*')}`" if facts.asks is not None else ""
    return f"`{facts.name}`", facts.kind.words, f"`{default}`", facts.unit, meaning, facts.reader, asks


def _taken_at(foreign: Foreign) -> str:
    return "any value" if foreign.harmless is None else ", ".join(f"`{value}`" for value in foreign.harmless)


def _grouped(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return rows with the last cell a name; rows that differ in it alone become one."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for *rest, name in rows:
        groups.setdefault(tuple(rest), []).append(f"`{name}`")
    return [(*rest, ", ".join(names)) for rest, names in groups.items()]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(markdown())
