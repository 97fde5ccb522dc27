"""No family's name stands in the core, and family files stay small: facts, not code."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from halo_core import registry

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "halo_core"
LARGEST_FAMILY_FILE = 12 * 1024  # bytes


def stems() -> set[str]:
    """Return the lines' names without version numbers, from entry points, families, aliases and architectures."""
    names = {entry.name for entry in importlib.metadata.distribution("halo-moe").entry_points if entry.group == "halo"}
    for family in registry.load().families.values():
        if family.name in names:
            names |= set(family.spec.aliases) | {architecture.name for architecture in family.architectures}
    found = set()
    for name in names:
        words = re.findall(r"[a-z]+", name.lower())
        # "moe" and "text" follow a version number; what comes before the first number is the line's name.
        head = re.match(r"[a-z_\-. ]+", name.lower())
        found.add(" ".join(re.findall(r"[a-z]+", head.group()) if head else words))
    return found


def pattern() -> re.Pattern[str]:
    """Return what finds a family's name however it is written: gpt-oss, GptOss, gpt_oss, Qwen3."""
    spellings = [r"[-_. ]?".join(stem.split()) for stem in sorted(stems())]
    return re.compile(rf"(?<![a-z])({'|'.join(spellings)})", re.IGNORECASE)


def named(text: str) -> list[str]:
    # A capital starts a word as well: `LoadQwen`.
    return [found.group() for found in pattern().finditer(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text))]


def test_no_family_is_named_in_the_core() -> None:
    found = {}
    for path in sorted(CORE.rglob("*")):
        if path.is_file() and path.suffix in {".py", ".jinja", ".json", ".md"}:
            names = named(path.name) + named(path.read_text(encoding="utf-8"))
            if names:
                found[str(path.relative_to(ROOT))] = sorted(set(names))
    assert not found


@pytest.mark.parametrize("spelling", ["gpt_oss", "gpt-oss", "GptOssExperts", "Qwen3.5", "my_qwen", "LFM2", "gemma-4"])
def test_every_usual_spelling_is_found(spelling: str) -> None:
    assert named(f"for {spelling} only")


def test_other_words_are_not_taken_for_families() -> None:
    assert named("halfmoon, stigmata, a gemmation of gpt and oss, half models") == ["gemma"]
    assert named("the gpt vocabulary, oss licences, self matters") == []


def test_family_files_are_small() -> None:
    files = [path for path in (ROOT / "halo_families").glob("*.py") if path.name != "__init__.py"]
    assert files
    assert {path.name: path.stat().st_size for path in files if path.stat().st_size >= LARGEST_FAMILY_FILE} == {}
