"""What must work without torch is imported in a fresh process, which then looks at its modules."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest

WITHOUT_TORCH = [
    "halo_core",
    "halo_core.verdict",
    "halo_core.errors",
    "halo_core.family",
    "halo_core.hookspecs",
    "halo_core.plugins",
    "halo_core.registry",
    "halo_core.config",
    "halo_core.plan",
    "halo_core.support",
    "halo_core.cli.main",
]
HEAVY = ["torch", "transformers", "datasets", "accelerate"]


def heavy_after(statements: list[str]) -> list[str]:
    """Return which heavy packages a fresh interpreter has loaded after these statements."""
    last = f"import json, sys; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    run = subprocess.run(
        [sys.executable, "-c", "\n".join([*statements, last])], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_contract_registry_config_and_plan_load_no_torch() -> None:
    assert heavy_after([f"import {name}" for name in WITHOUT_TORCH]) == []


def test_built_in_families_and_their_registry_load_no_torch() -> None:
    distribution = importlib.metadata.distribution("halo-moe")
    families = [entry.value for entry in distribution.entry_points if entry.group == "halo"]
    assert families
    joined = ["from halo_core import registry", "assert registry.load().families"]
    assert heavy_after([f"import {name}" for name in families] + joined) == []


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_the_look_at_modules_sees_a_heavy_package(package: str) -> None:
    pretended = f"import sys, types; sys.modules[{package!r}] = types.ModuleType({package!r})"
    assert heavy_after([pretended]) == [package]
