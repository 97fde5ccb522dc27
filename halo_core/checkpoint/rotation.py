"""Deleting old checkpoints once a newer one is complete.

Not for incomplete folders: those are cleaned when a run starts.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from halo_core.checkpoint import atomic


def rotate(output_dir: Path, *, limit: int | None, keep: Collection[Path]) -> list[Path]:
    """Delete the oldest complete checkpoints beyond `limit` and return them.

    `keep` (the newest, the best) stays even when that leaves more than `limit`. No limit, or 0, deletes nothing.
    """
    if not limit or limit < 0:
        return []
    found = atomic.checkpoints(output_dir)
    kept = {path.resolve() for path in keep}
    old = [path for path in found if path.resolve() not in kept]
    surplus = old[: max(0, len(found) - limit)]
    for path in surplus:
        # Renamed first, so that a kill in between leaves a name that is cleaned and never a half-empty checkpoint.
        leaving = path.rename(path.with_name(path.name + atomic.PARTIAL))
        shutil.rmtree(leaving, ignore_errors=True)  # no reason to end a run: the next start cleans the name
    return surplus
