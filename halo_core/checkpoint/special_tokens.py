"""The end and padding tokens of an export, where the run was given others: config.json and generation_config.json.

Not for the tokenizer's own files, which the tokenizer writes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halo_core.checkpoint.export_files import CONFIG_FILE
from halo_core.family import ArchitectureSpec
from halo_core.registry import text_config

GENERATION_FILE = "generation_config.json"
LEGACY_MAP = "special_tokens_map.json"
"""A file of earlier tokenizers that names special tokens once more; today's tokenizer_config.json has them all."""


def with_special_tokens(
    found: Mapping[str, Path | bytes], config: Mapping[str, Any], spec: ArchitectureSpec, ids: Mapping[str, int]
) -> tuple[dict[str, Path | bytes], dict[str, Any]]:
    """Return the companions and config.json with the run's special tokens in the place of the source's.

    found: name -> origin. config: the source's config.json. ids: `eos_token_id`, `pad_token_id`, those that were
    given. The language model's part gets them, and the whole configuration where it states them. Generation still
    ends at the source's end tokens as well, as it does after training with TRL.
    """
    if not ids:
        return dict(found), dict(config)
    changed = copy.deepcopy(dict(config))
    inner: Any = text_config(spec, changed)
    for name, token_id in ids.items():
        inner[name] = token_id
        if name in changed:
            changed[name] = token_id
    files: dict[str, Path | bytes] = {**found, CONFIG_FILE: _json(changed)}
    files.pop(LEGACY_MAP, None)
    origin = found.get(GENERATION_FILE)
    if origin is not None:
        generation = json.loads(origin if isinstance(origin, bytes) else origin.read_bytes())
        for name, token_id in ids.items():
            given = generation.get(name) if name == "eos_token_id" else None
            earlier = given if isinstance(given, list) else [] if given is None else [given]
            others = [other for other in earlier if other != token_id]
            generation[name] = [token_id, *others] if others else token_id
        files[GENERATION_FILE] = _json(generation)
    return files, changed


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"
