"""Prepares the rows of a run once, into a folder that `dataset_name` takes; memory does not grow with the rows.

Not for reading such a folder (`prepared.py`).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from halo_core.config import RunConfig
from halo_core.data import prepared, stored
from halo_core.data.account import Account, SplitAccount
from halo_core.data.prepare import Split, opened, prepared_folder, read_split
from halo_core.data.sources import PREPARED
from halo_core.data.waiting import Waiting, silent
from halo_core.data.weights import blocks
from halo_core.errors import Problem, Refused


def prepare_into(out: Path, config: RunConfig, tokenizer: Any, *, waiting: Waiting = silent) -> Account:
    """Write the tokenised rows of a run into the folder `out`, which appears when all of it is there.

    Raises:
        Refused: what is wrong with the data, all at once; `out` exists already, or cannot be written.
    """
    check_folder(out)
    if prepared_folder(config) is not None:
        why = "it is a folder of `halo data prepare` already"
        remedy = "prepare from the rows it was made of"
        raise Refused(Problem(key=prepared.KEY, value=config.dataset_name, why=why, remedy=remedy))
    splits = opened(config, tokenizer)
    problems: list[Problem] = []
    accounts: dict[str, SplitAccount] = {}
    try:
        with stored.published(out.resolve(), replaces=False) as partial:
            for split in splits:
                try:
                    accounts[split.name] = _written(partial / split.name, split, config, tokenizer, waiting)
                except Refused as refused:
                    problems.extend(refused.problems)
            if problems:
                raise Refused(problems)
            limits = {split.name: split.limit for split in splits}
            sources = {split.name: split.sources for split in splits}
            stored.write_json(partial / PREPARED, prepared.description(config, tokenizer, limits, sources))
    except stored.Occupied as fault:
        raise Refused(_occupied(out)) from fault
    except OSError as fault:
        raise Refused(_unwritable(out, fault)) from fault
    return Account(train=accounts["training"], evaluation=accounts.get("evaluation"))


def check_folder(out: Path) -> None:
    """Check that nothing, or an empty folder, lies where a prepared folder is to be; nothing is changed.

    Raises:
        Refused: something else does, or one cannot look there.
    """
    try:
        is_free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    except OSError as fault:
        raise Refused(_unwritable(out, fault)) from fault
    if not is_free:
        raise Refused(_occupied(out))


def _occupied(out: Path) -> Problem:
    why = "something is there already"
    return Problem(key="OUT", value=out, why=why, remedy="name a new folder, or remove this one first")


def _unwritable(out: Path, fault: OSError) -> Problem:
    why = f"the folder cannot be written: {fault}"
    return Problem(key="OUT", value=out, why=why, remedy="name a folder on a disk with room that you may write to")


def _written(folder: Path, split: Split, config: RunConfig, tokenizer: Any, waiting: Waiting) -> SplitAccount:
    """Write one split and return its account."""
    writer = stored.RowsWriter(folder)
    account, which = read_split(split, config, tokenizer, writer, waiting)
    files = writer.close()
    if any(weight != 1.0 for weight in split.weights.values()):
        once = folder.with_name(f"{folder.name}-once")
        folder.rename(once)
        writer = stored.RowsWriter(folder)
        for block in blocks(stored.mapped(once), which):
            writer.extend(block)
        files = writer.close()
        shutil.rmtree(once)
    stored.finish(folder, files, account)
    return account
