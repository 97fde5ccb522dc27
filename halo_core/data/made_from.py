"""What tokenised rows follow from, beside the data: tokenizer, chat template, settings, versions, as plain values.

Not for keeping rows (`cache.py`, `prepared.py`): both ask here whether two runs would make the same ones.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from halo_core.config import KEYS, RunConfig
from halo_core.data.units import longest_row

FREE = frozenset({
    "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "datasets", "eval_dataset",
    "packing", "packing_strategy", "eval_packing", "padding_free", "max_length", "chat_template_path",
    "dataset_num_proc", "dataset_cache",
})  # fmt: skip
"""Data keys that change no row, or that are told in another way: where rows come from by the digests of the files, the
template by its own, and max_length, together with packing that cuts, by the longest row that is kept."""

SETTINGS = tuple(
    name for name, facts in KEYS.items() if facts.area == "Data" and facts.reader == "data" and name not in FREE
)
"""The keys that decide what becomes of a row."""


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return key -> value of everything that decides what becomes of a row."""
    return {name: getattr(config, name) for name in SETTINGS}


def limit_of(config: RunConfig, name: str) -> int | None:
    """Return the longest row that is kept of a split, in tokens. name: `training` or `evaluation`."""
    return longest_row(config, evaluation=name == "evaluation")


def tokenizer_digest(tokenizer: Any) -> str:
    """Return 32 hexadecimal digits that are equal exactly when two tokenizers make the same tokens.

    Of a fast tokenizer the whole of tokenizer.json counts, but for padding and truncation, which rows never have. What
    it does with its added tokens is also seen by doing it, whatever setting it follows from.
    """
    parts: list[Any] = [sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())]
    parts.append({name: str(getattr(tokenizer, name, None)) for name in _BESIDE_THE_FILE})
    added = sorted(getattr(tokenizer, "added_tokens_decoder", {}).items())
    text = "".join(f"a {token} b{token}" for _, token in added)
    parts.append([list(tokenizer(text, add_special_tokens=special)["input_ids"]) for special in (False, True)])
    whole = _whole(tokenizer)
    if whole is not None:
        parts.append({name: value for name, value in whole.items() if name not in ("padding", "truncation")})
    else:
        parts += [type(tokenizer).__qualname__, sorted(tokenizer.get_vocab().items())]
        file = getattr(tokenizer, "vocab_file", None)
        if file is not None and Path(file).is_file():
            parts.append(hashlib.blake2b(Path(file).read_bytes()).hexdigest())
    return _digest(parts)


def _whole(tokenizer: Any) -> dict[str, Any] | None:
    """Return tokenizer.json of a fast tokenizer, or None of one that has none, or has parts that cannot be written."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    try:
        whole: dict[str, Any] = json.loads(backend.to_str())
    except Exception:  # tokenizers raises a plain Exception for parts written in Python
        return None
    return whole


def template_digest(tokenizer: Any) -> str:
    """Return 32 hexadecimal digits of the chat template's text, or of there being none."""
    return _digest(getattr(tokenizer, "chat_template", None))


def versions() -> dict[str, str]:
    """Return the versions of the software that renders and tokenises."""
    return {name: importlib.metadata.version(name) for name in ("halo-moe", "transformers", "tokenizers", "jinja2")}


def everything(config: RunConfig, tokenizer: Any, limit: int | None) -> dict[str, Any]:
    """Return all of it as plain values, for the name of what is kept: this very code and, where it matters, the day."""
    template = json.dumps(getattr(tokenizer, "chat_template", None))
    return {
        "tokenizer": tokenizer_digest(tokenizer),
        "chat_template": template_digest(tokenizer),
        "date": str(datetime.date.today()) if "strftime_now" in template else "",
        "settings": settings_of(config),
        "limit": limit,
        "versions": versions(),
        "code": _code(),
    }


def plain(value: Any) -> str:
    """Return values as text that is equal exactly when they are."""
    return json.dumps(value, sort_keys=True, default=str)


_BESIDE_THE_FILE = ("split_special_tokens", "add_bos_token", "add_eos_token")
"""Settings that change tokens, and that tokenizer.json may not hold."""


@lru_cache(maxsize=1)
def _code() -> str:
    """Return a digest of this package's own sources: rows of a former version are not those of this one."""
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
