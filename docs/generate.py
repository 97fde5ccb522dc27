"""Writes the pages that are made from the code, and the pieces of other pages that show what the code does.

    python docs/generate.py             writes what is out of date and names it
    python docs/generate.py --check     names it alone, and exits with 1 when there is any

Not for what people write themselves. A piece of a page stands between two comments and is replaced as a whole:

    <!-- command (exit 2): halo train docs/files/three-mistakes.yaml --> ... <!-- end -->

The kinds are `command` (what it prints; `exit N` is the code it has to end with, `until WORD` leaves out the lines
from the first that begins with the word), `file`, `first python block of`, and `table`. Commands run in a folder of
their own that holds this repository's `docs`, `examples` and `plugins`, without a network, with the plugins that come
with Halo and no others. White space at the end of a line and a plan's digest are left out.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from halo_core.bench import page as receipts
from halo_core.bench.receipt import read as read_receipts
from halo_core.config import KEYS, RUN_MECHANISMS, describe
from halo_core.config.read import FOREIGN
from halo_core.support import MECHANISMS

ROOT = Path(__file__).resolve().parents[1]
WHOLE: Mapping[str, Callable[[], str]] = {
    "docs/configuration.md": describe.markdown,
    "docs/pictures/expert-parallelism.svg": lambda: runpy.run_path(
        str(ROOT / "docs" / "pictures" / "expert_parallelism.py")
    )["svg"](),
    "docs/pictures/small-rates.svg": lambda: runpy.run_path(
        str(ROOT / "docs" / "pictures" / "small_rates.py")
    )["svg"](),
    "docs/receipts.md": lambda: receipts.markdown(read_receipts(ROOT / "receipts")),
    "docs/support-matrix.md": lambda: run("halo matrix --markdown")[1],
}
"""Pages that the code writes from the first line to the last."""

LANGUAGES = {".yaml": "yaml", ".jsonl": "json", ".py": "python"}
SEEN = ("docs", "examples", "plugins")
DIGEST = re.compile(r"^(digest: +)[0-9a-f]+$")
"""A plan's digest changes with every field that a plan gains, and tells a reader nothing."""
PIECE = re.compile(
    r"<!-- (?P<kind>[a-z ]+?)(?: \((?P<options>[^)\n]*)\))?: (?P<what>[^\n]+?) -->\n.*?<!-- end -->", re.DOTALL
)


def pages() -> list[str]:
    """Return the pages that hold anything of the code, as paths below the root."""
    there = {"README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))}
    return sorted(page for page in there | set(WHOLE) if page in WHOLE or PIECE.search(read(page)))


def read(page: str) -> str:
    """Return a page as it lies there; nothing for one that does not exist yet."""
    path = ROOT / page
    return path.read_text(encoding="utf-8") if path.exists() else ""


def fresh(page: str) -> str:
    """Return a page as it should be now."""
    return WHOLE[page]() if page in WHOLE else renewed(read(page))


def renewed(text: str) -> str:
    """Return a page's text with every piece made anew."""
    return PIECE.sub(_piece, text)


def _piece(found: re.Match[str]) -> str:
    opening = found[0].partition("\n")[0]
    made = KINDS[found["kind"]](found["what"], _options(found["options"] or ""))
    return f"{opening}\n{made}\n<!-- end -->"


def _options(text: str) -> dict[str, str]:
    pairs = (option.strip().partition(" ") for option in text.split(",") if option.strip())
    return {name: value for name, _, value in pairs}


def command(line: str, options: Mapping[str, str]) -> str:
    """Return a command with everything it prints, and its exit code where the page asks for it."""
    code, said = run(line)
    expected = int(options.get("exit", "0"))
    if code != expected:
        raise RuntimeError(f"`{line}` ended with {code} instead of {expected}:\n{said}")
    lines = [f"$ {line}", *said.rstrip().splitlines()]
    if "until" in options:
        ends = [number for number, text in enumerate(lines) if text.startswith(options["until"])]
        if not ends:
            raise RuntimeError(f"`{line}` prints no line that begins with {options['until']!r}:\n{said}")
        lines = [*lines[: ends[0]], "[...]"]
    if "exit" in options:
        lines += ["$ echo $?", str(code)]
    return fenced("console", "\n".join(DIGEST.sub(r"\1[...]", text.rstrip()) for text in lines))


@lru_cache
def run(line: str) -> tuple[int, str]:
    """Return the exit code and the output, both streams as one, of a `halo` command."""
    name, *words = shlex.split(line)
    if name != "halo":
        raise ValueError(f"only halo's own commands are run, not {name}")
    entries = importlib.metadata.distribution("halo-moe").entry_points
    with tempfile.TemporaryDirectory() as folder:
        for seen in SEEN:
            (Path(folder) / seen).symlink_to(ROOT / seen)
        settings = {
            "HALO_PLUGINS": ",".join(sorted(entry.name for entry in entries if entry.group == "halo")),
            "HF_HOME": f"{folder}/hub",  # what this machine has downloaded changes what a plan says
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "NO_COLOR": "1",
            "TERM": "dumb",
            "COLUMNS": "120",
        }
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HALO_", "FORCE_COLOR"))}
        done = subprocess.run(
            [sys.executable, "-c", "from halo_core.cli.main import main; main()", *words],
            cwd=folder, env=kept | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
    return done.returncode, done.stdout


def file(name: str, options: Mapping[str, str]) -> str:
    """Return a file of the repository as a block."""
    return fenced(LANGUAGES[Path(name).suffix], read(name).rstrip())


def first_python_block(page: str, options: Mapping[str, str]) -> str:
    """Return the first block of Python in another page."""
    found = re.search(r"```python\n(.*?)\n```", read(page), re.DOTALL)
    if found is None:
        raise ValueError(f"{page} has no block of Python")
    return fenced("python", found[1])


def fenced(language: str, text: str) -> str:
    """Return text as a block of Markdown."""
    if "```" in text:
        raise ValueError("a block cannot hold the end of a block")
    return f"```{language}\n{text}\n```"


def table(name: str, options: Mapping[str, str]) -> str:
    """Return one of the tables below."""
    return TABLES[name]()


def names_of_trl() -> str:
    """Return what becomes of every name that a YAML for TRL's supervised fine-tuning can have."""
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig

    groups: dict[str, list[str]] = {
        "the same key": [],
        "another name of a key, taken with a note": [],
        "changes nothing here, taken with a note": [],
        "taken with a note at values that ask for nothing, refused at others": [],
        "refused, with what to write instead": [],
    }
    key, renamed_key, moot, settled, refused = groups.values()
    fields = [field.name for kind in (ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig)
              for field in dataclasses.fields(kind)]  # fmt: skip
    for name in sorted(set(fields)):
        if name in KEYS:
            key.append(name)
            continue
        foreign = FOREIGN[name]
        if foreign.to:
            renamed_key.append(name)
        elif foreign.harmless is None:
            moot.append(name)
        else:
            (settled if foreign.harmless else refused).append(name)
    lines = ["| what becomes of it | names |", "| --- | --- |"]
    for told, names in groups.items():
        lines.append(f"| {told} ({len(names)}) | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines)


def not_built() -> str:
    """Return what a key can ask for and this version does not have."""
    missing = [mechanism for mechanism in (*MECHANISMS, *RUN_MECHANISMS) if not mechanism.built]
    lines = ["| feature | what it would be |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| `{mechanism.feature}` | {mechanism.what} |" for mechanism in missing)])


def bytes_of_exchanges() -> str:
    """Return what one layer's forward pass costs on the wire, for the exchange of tokens and for two others."""
    from halo_core import registry
    from halo_core.bench import tables

    return tables.layer_bytes(registry.load(), "openai/gpt-oss-20b", degrees=(2, 4, 8), tokens=4096)


def memory_by_degree() -> str:
    """Return what each of eight processes holds at several degrees of expert parallelism."""
    from halo_core import registry
    from halo_core.bench import tables

    found = registry.load()
    published = (model for family in found.families.values() for model in family.spec.published)
    ours = sorted(model.hub_id for model in published if model.config.startswith("halo_families:"))
    return tables.memory(found, ours, world=8, degrees=(1, 2, 4, 8))


KINDS: Mapping[str, Callable[[str, Mapping[str, str]], str]] = {
    "command": command,
    "file": file,
    "first python block of": first_python_block,
    "table": table,
}
def optimizer_steps() -> str:
    """Return the receipts of single optimizer steps: time, bandwidth, and what AdamWBF16 takes of each."""
    lines = ["| parameters | optimizer | a step | bandwidth | of a copy's | AdamWBF16 takes | made |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    for file in sorted((ROOT / "receipts" / "optimizer").glob("*.json")):
        made = json.loads(file.read_text(encoding="utf-8"))
        with_what = made["environment"]
        where = f"{with_what['device']}, torch {with_what['torch']}, triton {with_what['triton']}, {made['date'][:10]}"
        copied, steps = made["result"]["copy_bytes_per_second"], made["result"]["steps"]
        for step in steps:
            moved = step["least_bytes"] / step["seconds"]
            lines.append(
                f"| {made['fixture']['parameters'] / 1e9:.2f} billion | {step['name']} "
                f"| {step['seconds'] * 1e3:.2f} ms | {moved / 1e12:.2f} TB/s | {moved / copied:.0%} "
                f"| {steps[0]['seconds'] / step['seconds']:.2f} of it | {where} |"
            )
    return "\n".join(lines) + "\n"


TABLES: Mapping[str, Callable[[], str]] = {
    "names of TRL": names_of_trl,
    "not built": not_built,
    "bytes of exchanges": bytes_of_exchanges,
    "memory by degree": memory_by_degree,
    "optimizer steps": optimizer_steps,
}


def main(words: list[str]) -> int:
    """Write or check every page and return the exit code."""
    stale = []
    for page in pages():
        now = fresh(page)
        if now != read(page):
            stale.append(page)
            if "--check" not in words:
                (ROOT / page).write_text(now, encoding="utf-8")
    for page in stale:
        print(f"{page}: {'out of date; run `make docs`' if '--check' in words else 'written'}")
    return 1 if stale and "--check" in words else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
