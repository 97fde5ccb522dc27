"""A folder of rows prepared once: what it says it was made from, and whether a run may use it.

Not for making one (`offline.py`) nor for the cache of ordinary runs (`cache.py`). Layout: `training/` and, where
evaluation rows were prepared, `evaluation/`, each as `stored.py` writes them, and `prepared.json`, written last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halo_core.config import RunConfig
from halo_core.data import made_from, stored
from halo_core.data.account import SplitAccount
from halo_core.data.packing import splits
from halo_core.data.rows import Rows
from halo_core.data.sources import PREPARED, Source
from halo_core.data.units import is_packed
from halo_core.errors import Problem, Refused, shown

FORMAT = 1
KEY = "dataset_name"
AGAIN = "prepare the rows again: halo data prepare CONFIG NEW_FOLDER"
FIXED = ("max_length", "chat_template_path", *made_from.SETTINGS)
"""The keys that a prepared folder fixes."""
_PACKING = ("packing", "packing_strategy", "eval_packing")
_PLACES = ("dataset_config", "dataset_train_split", "dataset_test_split")
"""Which part of a data set the rows are. A run that leaves one as it is takes the folder's."""


_DEFAULTS = RunConfig()


def description(
    config: RunConfig, tokenizer: Any, limits: Mapping[str, int | None], sources: Mapping[str, Sequence[Source]]
) -> dict[str, Any]:
    """Return what a folder says it was made from. limits, sources: of each split by its name."""
    return {
        "format": FORMAT,
        "versions": made_from.versions(),
        "tokenizer": {"digest": made_from.tokenizer_digest(tokenizer), "model_name_or_path": config.model_name_or_path},
        "chat_template": {
            "digest": made_from.template_digest(tokenizer), "chat_template_path": config.chat_template_path,
        },
        "settings": {**made_from.settings_of(config), "max_length": config.max_length,
                     **{name: getattr(config, name) for name in (*_PACKING, *_PLACES)}},
        "limits": dict(limits),
        "eval_dataset": config.eval_dataset,
        "sources": {
            name: [{"key": source.key, "name": source.name, "weight": source.weight, "digest": source.digest()}
                   for source in found]
            for name, found in sources.items()
        },
    }  # fmt: skip


def load(
    folder: Path, config: RunConfig, tokenizer: Any
) -> tuple[Rows, SplitAccount, Rows | None, SplitAccount | None, tuple[str, ...]]:
    """Return the training rows with their account, the evaluation rows with theirs or None, and what to know.

    The rows are mapped into memory. Evaluation rows are None where the run asks for none, or for others than the
    folder holds.

    Raises:
        Refused: the folder was made for another configuration, or is not as it was written.
    """
    told = _told(folder)
    evaluates = config.eval_strategy != "no"
    plain = made_from.plain
    same_evaluation = plain(config.eval_dataset) in (plain(None), plain(told["eval_dataset"]))
    holds = "evaluation" in told["limits"] and same_evaluation
    problems = mismatches(folder, told, config, tokenizer, evaluates and holds)
    if evaluates and not holds and not config.eval_dataset:
        why = f"evaluation is asked for, and {folder} was prepared without evaluation rows"
        remedy = f"give eval_dataset, or eval_strategy: no, or {AGAIN}"
        problems.append(Problem(key="eval_strategy", value=config.eval_strategy, why=why, remedy=remedy))
    if problems:
        raise Refused(problems)
    try:
        train, training = stored.read_rows(folder / "training")
        evaluation, evaluated = (
            stored.read_rows(folder / "evaluation") if evaluates and holds else (None, None)
        )  # fmt: skip
    except stored.Damaged as damage:
        raise Refused(_damaged(folder, str(damage))) from damage
    notes = [f"the rows come tokenised from {folder}, as they were when it was made"]
    for name, version in made_from.versions().items():
        if told["versions"].get(name) != version:
            notes.append(f"{folder} was made with {name} {told['versions'].get(name)}, and this is {version}")
    return train, training, evaluation, evaluated, tuple(notes)


def mismatches(
    folder: Path, told: Mapping[str, Any], config: RunConfig, tokenizer: Any, with_evaluation: bool
) -> list[Problem]:
    """Return every way in which this configuration would make other rows than the folder holds."""
    problems: list[Problem] = []
    before = told["tokenizer"]
    if (here := made_from.tokenizer_digest(tokenizer)) != before["digest"]:
        why = (f"the rows in {folder} were made with another tokenizer: that of {before['model_name_or_path']} "
               f"({before['digest'][:12]}), and this one is {here[:12]}")  # fmt: skip
        problems.append(
            Problem(key="model_name_or_path", value=config.model_name_or_path, why=why,
                    remedy=f"start from a model with that tokenizer, with the same eos_token and pad_token, or {AGAIN}")
        )  # fmt: skip
    before = told["chat_template"]
    if (here := made_from.template_digest(tokenizer)) != before["digest"]:
        was = before["chat_template_path"] or "the tokenizer's own"
        why = (f"the rows in {folder} were rendered with another chat template: {was} ({before['digest'][:12]}), and "
               f"this one is {here[:12]}")  # fmt: skip
        problems.append(
            Problem(key="chat_template_path", value=config.chat_template_path, why=why,
                    remedy=f"give the template of that time, or {AGAIN}")
        )  # fmt: skip
    settings = told["settings"]
    for key, value in made_from.settings_of(config).items():
        if made_from.plain(settings.get(key, value)) != made_from.plain(value):
            problems.append(_differs(folder, key, settings.get(key), value))
    # The split of evaluation rows, and a configuration, may be those of an eval_dataset that the folder does not hold.
    own = not config.eval_dataset or with_evaluation
    for key in _PLACES if own else ("dataset_train_split",):
        value = getattr(config, key)
        is_given = value != getattr(_DEFAULTS, key) and (key != "dataset_test_split" or with_evaluation)
        if is_given and settings.get(key, value) != value:
            problems.append(_differs(folder, key, settings[key], value))
    for name in ("training", *(["evaluation"] if with_evaluation else [])):
        problem = _limit_problem(folder, told, config, name)
        if problem is not None and problem not in problems:
            problems.append(problem)
    return problems


def _limit_problem(folder: Path, told: Mapping[str, Any], config: RunConfig, name: str) -> Problem | None:
    """Return why rows of this split were held against another length."""
    if told["limits"].get(name) == made_from.limit_of(config, name):
        return None
    settings = told["settings"]
    if settings["max_length"] != config.max_length:
        return _differs(folder, "max_length", settings["max_length"], config.max_length)
    cuts = is_packed(config, evaluation=name == "evaluation") and splits(config.packing_strategy)
    key = next((key for key in _PACKING if settings[key] != getattr(config, key)), "packing")
    told_why = "left out there, where this run would cut them" if cuts else "whole there, and too long here"
    before = shown(settings[key])
    why = f"the rows in {folder} were prepared for {key}: {before}: rows over max_length are {told_why}"
    return Problem(key=key, value=getattr(config, key), why=why, remedy=f"set {key}: {before}, or {AGAIN}")


def _differs(folder: Path, key: str, before: Any, now: Any) -> Problem:
    why = f"the rows in {folder} were prepared with {key}: {shown(before)}"
    remedy = f"set {key}: {shown(before)}, or {AGAIN} (batch sizes, seeds, steps, rates and packing may change freely)"
    return Problem(key=key, value=now, why=why, remedy=remedy)


def _told(folder: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads((folder / PREPARED).read_text(encoding="utf-8"))
        written = told["format"]
        if written == FORMAT:
            for name in ("versions", "tokenizer", "chat_template", "settings", "limits", "eval_dataset"):
                told[name]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise Refused(_damaged(folder, f"{PREPARED} cannot be read ({type(fault).__name__}: {fault})")) from fault
    if written != FORMAT:
        why = f"{folder} has format {written}, and this version reads {FORMAT}"
        raise Refused(Problem(key=KEY, value=folder, why=why, remedy=AGAIN))
    return told


def _damaged(folder: Path, what: str) -> Problem:
    remedy = f"copy the folder again, or {AGAIN}"
    return Problem(key=KEY, value=folder, why=f"the prepared folder is not whole: {what}", remedy=remedy)

