"""Gives a tokenizer the special tokens and the chat template that the configuration names.

Not for reading the model's tokenizer, nor for rendering (`template.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halo_core.config import RunConfig
from halo_core.errors import Problem, Refused


def set_up_tokenizer(config: RunConfig, tokenizer: Any) -> None:
    """Give the tokenizer the tokens and the template that the configuration names, in place, so that it is saved so.

    `eos_token` ends plain texts, and templates that write the tokenizer's end token write it; `pad_token` fills rows.

    Raises:
        Refused: a token that the tokenizer does not have; no template where `chat_template_path` says, or one that
            writes tokens which the tokenizer does not have. All at once.
    """
    vocabulary = tokenizer.get_vocab()
    problems = [
        problem
        for key in ("eos_token", "pad_token")
        if (problem := _unknown_token(key, getattr(config, key), tokenizer, vocabulary)) is not None
    ]
    template: str | None = None
    if config.chat_template_path is not None:
        try:
            template = _template_at(config.chat_template_path, vocabulary)
        except Refused as refused:
            problems.extend(refused.problems)
    if problems:
        raise Refused(problems)
    if config.eos_token is not None:
        tokenizer.eos_token = config.eos_token
    if config.pad_token is not None:
        tokenizer.pad_token = config.pad_token
    if template is not None:
        tokenizer.chat_template = template


def special_ids_of(config: RunConfig, tokenizer: Any) -> dict[str, int]:
    """Return the ids of the special tokens that the configuration names, by their names in config.json."""
    return {
        f"{key}_id": int(tokenizer.convert_tokens_to_ids(token))
        for key in ("eos_token", "pad_token")
        if (token := getattr(config, key)) is not None
    }


def _unknown_token(key: str, token: str | None, tokenizer: Any, vocabulary: Mapping[str, int]) -> Problem | None:
    """Return the problem of a token that is none of the tokenizer's, with those that are written nearly so."""
    if token is None or token in vocabulary:
        return None
    known = [str(added) for added in tokenizer.get_added_vocab()]
    near = difflib.get_close_matches(token, known, 3, 0.6) or difflib.get_close_matches(token, vocabulary, 3, 0.75)
    likely = f"did you mean {' or '.join(near)}? Or " if near else ""
    remedy = f"{likely}remove {key} to keep the tokenizer's own, {getattr(tokenizer, key) or 'which has none'}"
    return Problem(key=key, value=token, why="the tokenizer has no such token", remedy=remedy)


def _template_at(given: str, vocabulary: Mapping[str, int]) -> str:
    """Return the template in a .jinja file, or that of another tokenizer, by its folder or hub id."""
    path = Path(given).expanduser()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if not path.is_dir() and (given.startswith((".", "/", "~")) or given.count("/") > 1 or path.suffix == ".jinja"):
        remedy = "give a .jinja file, or the folder or hub id of a tokenizer"
        raise Refused(Problem(key="chat_template_path", value=given, why="no such file or folder", remedy=remedy))
    from transformers import AutoTokenizer

    try:
        other = AutoTokenizer.from_pretrained(str(path) if path.is_dir() else given)
    except (OSError, ValueError) as error:
        why = f"no tokenizer can be read there: {str(error).strip().splitlines()[0]}"
        remedy = "give a .jinja file, or the folder or hub id of a tokenizer"
        raise Refused(Problem(key="chat_template_path", value=given, why=why, remedy=remedy)) from error
    if not other.chat_template:
        why = "this tokenizer has no chat template"
        raise Refused(Problem(key="chat_template_path", value=given, why=why, remedy="give a .jinja file"))
    template = other.get_chat_template(None, None)
    missing = [token for token in other.get_added_vocab() if token in template and token not in vocabulary]
    if missing:
        why = f"its template writes tokens that the model's tokenizer does not have: {', '.join(missing)}"
        remedy = "give a .jinja file that uses the tokenizer's own tokens; adding tokens is not built yet"
        raise Refused(Problem(key="chat_template_path", value=given, why=why, remedy=remedy, kind="not built"))
    return str(template)
