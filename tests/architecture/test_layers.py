"""The core's layers, read from the source: who imports whom. Not for what a process then loads (`test_no_torch.py`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "halo_core"
FAMILIES = ROOT / "halo_families"

LAYERS = (
    {"verdict", "family", "hookspecs", "errors"},
    {"plugins", "registry", "config", "plan", "support", "arithmetic", "model_config", "hub", "ranks"},
    {"kernels", "runtime", "topology", "process_group"},
    {"data", "methods", "optim", "expert_parallel", "context_parallel", "attention", "balancing", "sharding"},
    {"models", "checkpoint", "trainer", "bench"},
    # "__init__" is the Python API: it sits on top of everything, and nothing below may use it.
    {"cli", "testing", "__init__", "__main__"},
)
SIBLINGS_APART = 3
LAYERS_WITHOUT_TORCH = (0, 1)
HEAVY = {"torch", "transformers", "safetensors", "datasets", "accelerate"}
WHAT_FAMILIES_USE = {"verdict", "family", "hookspecs", "errors"}
# Hooks receive objects of higher layers, so their signatures name those types, under `if TYPE_CHECKING:`.
NAMES_TYPES_FROM_ABOVE = {"hookspecs"}


def layer_of(part: str) -> int:
    for number, parts in enumerate(LAYERS):
        if part in parts:
            return number
    raise AssertionError(f"halo_core/{part} has no layer: give it one in {Path(__file__).name} and CONTRIBUTING.md")


def imported(source: str) -> Iterator[str]:
    """Yield the dotted names that a source imports, at any depth; `from a import b` yields a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which layer is meant"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def without_type_imports(source: str) -> str:
    """Return a source without the bodies of `if TYPE_CHECKING:`."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = [ast.Pass()]
    return ast.unparse(tree)


def core_parts(source: str) -> set[str]:
    """Return the parts of the core (first name below halo_core) that a source imports."""
    parts = set()
    for name in imported(source):
        first, *rest = name.split(".")
        if first == "halo_core":
            is_part = bool(rest) and ((CORE / rest[0]).is_dir() or (CORE / f"{rest[0]}.py").is_file())
            parts.add(rest[0] if is_part else "__init__")
    return parts


def faults(part: str, source: str) -> list[str]:
    """Return what a source of this part imports against the layers."""
    own = layer_of(part)
    source = without_type_imports(source) if part in NAMES_TYPES_FROM_ABOVE else source
    found = []
    for other in sorted(core_parts(source) - {part}):
        if layer_of(other) > own:
            found.append(f"layer {own} ({part}) imports layer {layer_of(other)} ({other})")
        elif layer_of(other) == own == SIBLINGS_APART:
            found.append(f"the mechanism {part} imports its sibling {other}")
    heavy = {name.split(".")[0] for name in imported(source)} & HEAVY
    if own in LAYERS_WITHOUT_TORCH and heavy:
        found.append(f"layer {own} ({part}) imports {', '.join(sorted(heavy))}")
    return found


def core_files() -> list[tuple[str, Path]]:
    """Return (part, file) of every module of the core. A script that lies among package data is no module."""
    files = []
    for path in sorted(CORE.rglob("*.py")):
        if all((folder / "__init__.py").exists() for folder in path.parents if folder.is_relative_to(CORE)):
            files.append((path.relative_to(CORE).parts[0].removesuffix(".py"), path))
    return files


def test_every_import_points_to_its_own_or_a_lower_layer() -> None:
    found = {
        str(path.relative_to(ROOT)): problems
        for part, path in core_files()
        if (problems := faults(part, path.read_text(encoding="utf-8")))
    }
    assert not found
    assert len(core_files()) > 20


def test_families_use_the_contract_alone() -> None:
    for path in FAMILIES.glob("*.py"):
        source = without_type_imports(path.read_text(encoding="utf-8"))
        assert core_parts(source) <= WHAT_FAMILIES_USE, path.name
        assert not {name.split(".")[0] for name in imported(source)} & HEAVY, path.name


@pytest.mark.parametrize(
    ("part", "source", "said"),
    [
        ("plan", "from halo_core.models.build import build_meta", "imports layer 4 (models)"),
        ("errors", "def late():\n    from halo_core import registry", "imports layer 1 (registry)"),
        ("data", "import halo_core.optim.build", "sibling optim"),
        ("support", "import torch.nn as nn", "imports torch"),
        ("trainer", "from halo_core import train", "imports layer 5 (__init__)"),
        ("family", "if TYPE_CHECKING:\n    from halo_core.plan import RunPlan", "imports layer 1 (plan)"),
    ],
)
def test_a_wrong_import_is_found(part: str, source: str, said: str) -> None:
    assert any(said in fault for fault in faults(part, source))


def test_a_right_import_is_not_reported() -> None:
    assert faults("trainer", "import torch\nfrom halo_core import errors\nimport halo_core.data.batch") == []
    assert faults("hookspecs", "if TYPE_CHECKING:\n    from halo_core.plan import RunPlan") == []


def test_a_part_without_a_layer_is_an_error() -> None:
    with pytest.raises(AssertionError, match="has no layer"):
        faults("mystery", "")
