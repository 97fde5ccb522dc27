"""Reads the tokenizer of a model, and refuses one that cannot be read or that knows more tokens than the model.

Not for chat templates nor for making tokens: `halo_core.data` does both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer

from halo_core.data.prepare import Prepared, pad_id_of
from halo_core.data.rows import Rows
from halo_core.errors import Problem, Refused

KEY = "model_name_or_path"


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False, key: str = KEY
) -> Any:
    """Return the tokenizer of a folder or hub id; `key` is what the person named it by.

    Raises:
        Refused: its files are missing or damaged, or config.json, which transformers reads beside them, is not valid.
    """
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except StrictDataclassError as fault:
        raise Refused(invalid_config(name, fault, key=key)) from fault
    except Exception as fault:  # the classes depend on which of a dozen file formats was tried last
        why = f"its tokenizer cannot be read ({_one_line(fault)})"
        remedy = "copy tokenizer.json and tokenizer_config.json of this model into the folder, or download it again"
        raise Refused(Problem(key=key, value=name, why=why, remedy=remedy)) from fault


def invalid_config(name: str | None, fault: StrictDataclassError, *, key: str = KEY) -> Problem:
    """Return the problem of a config.json whose values transformers refuses; `name` is the model, where it is known."""
    why = f"the model's config.json is not valid ({_one_line(fault)})"
    remedy = "correct config.json, or copy or download the model again"
    return Problem(key=None if name is None else key, value=name, why=why, remedy=remedy)


def check_vocabulary(prepared: Prepared, tokenizer: Any, *, vocab_size: int, name: str) -> None:
    """Check that every token of the rows has a place in the model's embedding of `vocab_size` rows.

    Raises:
        Refused: a row holds a token that the model does not know.
    """
    for split, rows in (("training", prepared.train), ("evaluation", prepared.evaluation or ())):
        if isinstance(rows, Rows) and rows.tokens.max(initial=0) < vocab_size:
            continue
        for row in rows:
            largest = max(row.input_ids)
            if largest < vocab_size:
                continue
            token = tokenizer.convert_ids_to_tokens(largest)
            why = f"{split} row {row.row_id + 1} holds the token {token!r} with number {largest}, and the model knows "
            why += f"the numbers below {vocab_size} (vocab_size in config.json)"
            remedy = "use the tokenizer that the model was made with, or save the model once with more embeddings: "
            remedy += "model.resize_token_embeddings(len(tokenizer))"
            raise Refused(Problem(key=KEY, value=name, why=why, remedy=remedy))


def padding_id(tokenizer: Any, *, vocab_size: int) -> int:
    """Return the id that fills short rows: the tokenizer's, or 0 where the model has no embedding for that.

    Padding is known by its position and changes no number, but it is looked up in the embedding as well.
    """
    pad_id = pad_id_of(tokenizer)
    return pad_id if pad_id < vocab_size else 0


def _one_line(fault: BaseException) -> str:
    lines: Iterable[str] = (line.strip() for line in str(fault).splitlines())
    text = " ".join(line for line in lines if line) or type(fault).__name__
    return text if len(text) <= 200 else text[:197] + "..."
