"""Keeps the tokenised rows of ordinary runs on disk, named by everything they follow from, so that a second start is
quick.

Not for folders that a person names (`prepared.py`). An entry may be removed at any time; what is not whole is made
anew.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halo_core.config import RunConfig
from halo_core.data import made_from, stored
from halo_core.data.account import SplitAccount
from halo_core.data.rows import Rows
from halo_core.data.sources import Source

SMALLEST = 2000
"""Rows read below which nothing is kept: they are prepared anew in about a second."""


def folder() -> Path:
    """Return where entries lie: `data` in $HALO_CACHE, else in ~/.cache/halo ($XDG_CACHE_HOME/halo).

    Raises:
        OSError: that is in a home folder, and this process has none.
    """
    named = os.environ.get("HALO_CACHE")
    base = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "halo"
    try:
        return base.expanduser() / "data"
    except RuntimeError as fault:
        raise OSError("there is no home folder; set HALO_CACHE or HOME") from fault


def name_of(
    split: str, config: RunConfig, tokenizer: Any, sources: Sequence[Source], limit: int | None
) -> str | None:
    """Return the name of the entry for these rows, or None where a source cannot tell its contents.

    It follows from the contents of the data files, their names and the split's (an account tells them), tokenizer,
    chat template, settings and versions.
    """
    files = [[source.key, source.name, source.weight, source.digest()] for source in sources]
    if any(digest is None for *_, digest in files):
        return None
    text = made_from.plain({"split": split, "files": files, **made_from.everything(config, tokenizer, limit)})
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def find(name: str) -> tuple[Rows, SplitAccount] | None:
    """Return the rows of an entry, mapped into memory, or None where there is none that is whole."""
    try:
        return stored.read_rows(folder() / name)
    except (stored.Damaged, OSError):
        return None


def keep(name: str, rows: Rows, account: SplitAccount) -> str:
    """Keep rows under a name; return why they could not be kept, or nothing.

    Several processes may keep the same rows at once: each writes aside, the first to finish stays. A whole entry is
    left alone; only one that is damaged is replaced.
    """
    if account.rows_read < SMALLEST or find(name) is not None:
        return ""
    try:
        entry = folder() / name
        with stored.published(entry, replaces=entry.exists()) as partial:
            stored.write_rows(partial, rows, account)
    except stored.Occupied:
        return ""
    except OSError as fault:
        return f"the tokenised rows are not kept for the next start: {fault}"
    return ""
