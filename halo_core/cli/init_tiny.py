"""`halo init-tiny`: a small complete Hugging Face folder of any family, without a network."""

from __future__ import annotations

from pathlib import Path

from halo_core.cli.main import load_registry
from halo_core.errors import Problem, Refused

LARGEST_SEED = 2**32 - 1


def run(*, family: str, dense: bool, out: Path, seed: int, plugin_files: tuple[Path, ...]) -> None:
    """Write the folder and say what to do with it.

    Raises:
        Refused: the family is unknown or has no such architecture, the folder is not empty or cannot be made, or the
            seed is out of range.
    """
    registry = load_registry(plugin_files)
    found = registry.family(family)
    if found is None:
        raise Refused(
            Problem(
                key="--family",
                value=family,
                why=f"no installed plugin has this family{registry.near_family(family)}",
                remedy=f"one of: {', '.join(registry.families)}",
            )
        )
    chosen = found.tiny(dense=dense)
    if chosen is None:
        raise Refused(
            Problem(
                key="--dense",
                value=True,
                why=f"family {found.name} has no dense architecture",
                remedy="leave --dense out",
                by=found.plugin,
            )
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refused(
            Problem(key="--out", value=out, why="it exists and is not an empty folder", remedy="give a new folder")
        )
    if not 0 <= seed <= LARGEST_SEED:
        raise Refused(
            Problem(
                key="--seed", value=seed, why="it is out of range", remedy=f"give a whole number, 0 to {LARGEST_SEED}"
            )
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        why = f"the folder cannot be made ({fault.strerror})"
        raise Refused(
            Problem(key="--out", value=out, why=why, remedy="name a folder where files can be written")
        ) from fault
    from halo_core.models.tiny import write_tiny

    write_tiny(chosen, out, seed=seed)
    print(f"wrote {chosen.name} to {out}; try: halo sample {out} 'hello', or model_name_or_path: {out}")
