"""What must not stand in any file of the repository, and what every module must say about itself."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "halo_core"
DOCUMENTED = (
    "verdict.py", "family.py", "hookspecs.py", "errors.py", "plugins.py", "registry.py", "plan.py", "support.py",
    "arithmetic.py", "model_config.py", "hub.py", "__init__.py", "config",
)

# Split in two, so that this file does not name what it looks for.
HOSTS = ("pypi" + ".org", "python" + "hosted.org", "download.py" + "torch.org", "ana" + "conda.org", "--index" + "-url")
MACHINE_PATHS = re.compile(r"(?<![\w.~])/(?:work|root|home/\w+|opt/\w+|Users/\w+)/")


def tracked() -> list[Path]:
    """Return the files of the repository; a checkout without git has none."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def leaks(text: str) -> list[str]:
    """Return the package hosts and machine paths that a text names."""
    return [host for host in HOSTS if host in text] + [found.group() for found in MACHINE_PATHS.finditer(text)]


def undocumented(source: str) -> list[str]:
    """Return the public functions, classes and methods of a source that have no docstring."""
    found = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                overloaded = any("overload" in ast.unparse(decorator) for decorator in child.decorator_list)
                if child.name.startswith("_") or overloaded:
                    continue
                if ast.get_docstring(child) is None:
                    found.append(prefix + child.name)
                if isinstance(child, ast.ClassDef):
                    visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(source), "")
    return found


def test_no_file_names_a_package_host_or_a_path_of_one_machine() -> None:
    files = tracked()
    if not files:
        pytest.skip("not a git checkout")
    found = {}
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if leaks(text):
            found[str(path.relative_to(ROOT))] = leaks(text)
    assert not found


def test_hosts_and_machine_paths_are_found() -> None:
    assert leaks("pip install --index" + "-url https://" + HOSTS[0] + "/simple") == [HOSTS[0], HOSTS[-1]]
    assert leaks("cd /" + "home/ann/models") == ["/" + "home/ann/"]
    assert leaks("see docs/work/x and ./root/y, /path/to/python, homework/") == []


def test_every_module_of_the_core_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in sorted(CORE.rglob("*.py"))
        if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None
    ]
    assert not silent


def test_everything_public_of_the_contract_is_documented() -> None:
    found = {}
    for name in DOCUMENTED:
        part = CORE / name
        for path in sorted(part.rglob("*.py")) if part.is_dir() else [part]:
            names = undocumented(path.read_text(encoding="utf-8"))
            if names:
                found[str(path.relative_to(ROOT))] = names
    assert not found


def test_missing_docstrings_are_found() -> None:
    source = 'class A:\n    "doc"\n    def b(self): ...\n    def _c(self): ...\ndef d():\n    "doc"\ndef e(): ...'
    assert undocumented(source) == ["A.b", "e"]
