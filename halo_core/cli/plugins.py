"""`halo plugins`: who is installed, what each brings, and every fault of the broken ones."""

from __future__ import annotations

from pathlib import Path

from halo_core.cli.main import load_registry
from halo_core.plugins import PluginRow


def run(plugin_files: tuple[Path, ...]) -> None:
    """Print one block per plugin; a broken plugin never keeps the others from being shown."""
    rows = load_registry(plugin_files).plugins.rows
    for row in rows:
        print(f"{row.name}  {row.state}  ({row.distribution} {row.version}, {row.target})")
        for line in _details(row):
            print(f"    {line}")
    if not rows:
        print("no plugin is installed: `pip install halo-moe` brings the built-in families")


def _details(row: PluginRow) -> list[str]:
    lines = [f"fault: {fault}" for fault in row.faults]
    for spec in row.declared.get("halo_families", ()):
        lines.append(f"family {spec.name}: {', '.join(a.name for a in spec.architectures)} (contract {spec.contract})")
    for backend in row.declared.get("halo_backends", ()):
        lines.append(f"{backend.kind} {backend.name}: {backend.target}")
    behaviour = [hook for hook in row.hooks if hook not in row.declared]
    if row.state == "loaded" and behaviour:
        lines.append(f"hooks: {', '.join(behaviour)}")
    if row.state == "broken":
        is_variable = row.target.startswith("$")
        lines.append(f"correct {row.target}" if is_variable else f"leave it out with HALO_DISABLE_PLUGINS={row.name}")
    return lines
