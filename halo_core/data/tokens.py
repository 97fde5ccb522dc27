"""From a text with spans to token ids with a flag each: the whole text is tokenised once, spans follow by offsets.

Not for finding the spans (`spans.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halo_core.data.examples import RowFault
from halo_core.data.template import Span


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Token ids, for each whether it is to be learnt, and whether a token reaches over the beginning of a span."""

    input_ids: list[int]
    supervised: list[bool]
    joins: bool = False


def tokens_of(
    tokenizer: Any, texts: Sequence[str], spans: Sequence[Sequence[Span] | None], *, add_special_tokens: bool
) -> list[Tokens | RowFault]:
    """Return the tokens of each text; spans None stand for the whole text.

    A token is learnt when it overlaps a span, the rule of transformers' assistant masks, so a token that joins the
    last letters before a span with its first ones is learnt. `add_special_tokens` is true for plain texts and false
    for rendered conversations, whose template writes them.

    A fault stands in for a text whose spans cannot be followed, which only happens with a tokenizer without offsets.
    """
    options = {
        "add_special_tokens": add_special_tokens,
        "return_attention_mask": False,
        "return_token_type_ids": False,
        # Lengths are our business; a warning about the model's limit would come for rows that are dropped.
        "verbose": False,
    }
    if not texts:
        return []
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(list(texts), return_offsets_mapping=True, **options)
        return [
            _overlapping(ids, offsets, own) if own is not None else _whole(ids)
            for ids, offsets, own in zip(encoded["input_ids"], encoded["offset_mapping"], spans, strict=True)
        ]
    return [_by_beginnings(tokenizer, text, own, options) for text, own in zip(texts, spans, strict=True)]


def _whole(ids: list[int]) -> Tokens:
    return Tokens(input_ids=ids, supervised=[True] * len(ids))


def _overlapping(ids: list[int], offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> Tokens:
    """Return the tokens with those learnt that overlap one of the ordered, disjoint spans."""
    ends = [end for _, end in spans]
    flags: list[bool] = []
    joins = False
    for start, end in offsets:
        # Of the spans that end behind the token's beginning, the first is the one it can overlap.
        candidate = bisect_left(ends, start + 1)
        overlaps = candidate < len(spans) and end > spans[candidate][0]
        joins = joins or (overlaps and start < spans[candidate][0])
        flags.append(overlaps)
    return Tokens(input_ids=ids, supervised=flags, joins=joins)


def _by_beginnings(
    tokenizer: Any, text: str, spans: Sequence[Span] | None, options: dict[str, Any]
) -> Tokens | RowFault:
    """Return the tokens without offsets: the ids of the text up to a border must begin the ids of the whole."""
    ids = list(tokenizer(text, **options)["input_ids"])
    if spans is None:
        return _whole(ids)
    flags = [False] * len(ids)
    for span in spans:
        borders = []
        for border in span:
            part = ids if border == len(text) else list(tokenizer(text[:border], **options)["input_ids"])
            if ids[: len(part)] != part:
                detail = "a token joins two turns, and this tokenizer does not tell where its tokens stand"
                return RowFault("the assistant's text cannot be told from the rest", detail)
            borders.append(len(part))
        flags[borders[0] : borders[1]] = [True] * (borders[1] - borders[0])
    return Tokens(input_ids=ids, supervised=flags)
