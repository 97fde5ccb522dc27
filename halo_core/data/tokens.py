"""From a text with spans to token ids with a flag each: the whole text is tokenised once, spans follow by offsets.

Not for finding the spans (`spans.py`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halo_core.data.examples import RowFault
from halo_core.data.rendered import UNTRUE
from halo_core.data.template import Span


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Token ids, for each whether it is to be learnt, and whether a token reaches over the beginning of a span."""

    input_ids: list[int]
    supervised: list[bool]
    joins: bool = False


def tokens_of(
    tokenizer: Any,
    texts: Sequence[str],
    spans: Sequence[Sequence[Span] | None],
    *,
    others: Sequence[Sequence[Span]] = (),
    add_special_tokens: bool,
) -> list[Tokens | RowFault]:
    """Return the tokens of each text; spans None stand for the whole text, others they are ordered and disjoint.

    A token is learnt when it overlaps a span, the rule of transformers' assistant masks, so a token that joins the
    last letters before a span with its first ones is learnt. `others` are for each text the places that no learnt
    token may touch, such as a user's words; left out, there are none. `add_special_tokens` is true for plain texts
    and false for rendered conversations, whose template writes them.

    A fault stands in for a text whose spans cannot be followed in its tokens: one joins the words of two, or the
    tokenizer does not tell where its tokens stand.
    """
    foreign = others or [()] * len(texts)
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
        encoded = tokenizer(list(texts), **options)
        made: list[Tokens | RowFault] = []
        for text, own, theirs, encoding in zip(texts, spans, foreign, encoded.encodings, strict=True):
            if own is None:
                made.append(_whole(encoding.ids))
                continue
            followed = _followed(text, encoding.ids, encoding.offsets, own, theirs)
            made.append(followed if followed is not None else _by_beginnings(tokenizer, text, own, options))
        return made
    return [_by_beginnings(tokenizer, text, own, options) for text, own in zip(texts, spans, strict=True)]


def _whole(ids: list[int]) -> Tokens:
    return Tokens(input_ids=ids, supervised=[True] * len(ids))


def _followed(
    text: str, ids: list[int], offsets: list[Span], spans: Sequence[Span], others: Sequence[Span]
) -> Tokens | RowFault | None:
    """Return the tokens with those learnt that overlap one of the spans, or None where the offsets cannot be trusted.

    What is learnt is read back from the tokens: they cover each span, and none of them touches the words of others.
    """
    told = len(ids)
    while told > 1 and offsets[told - 1] == (0, 0):
        told -= 1  # an end token that the tokenizer adds stands for no text
    starts, ends = [start for start, _ in offsets[:told]], [end for _, end in offsets[:told]]
    flags = [False] * len(ids)
    joins = False
    for start, end in spans:
        first, behind = bisect_right(ends, start), bisect_left(starts, end)
        if first >= behind or text[start : starts[first]].strip() or text[ends[behind - 1] : end].strip():
            return None
        for begin, stop in others:
            # The spans do not touch these places, so only the tokens at their borders can.
            if begin < ends[behind - 1] and starts[first] < stop:
                told_text = text[starts[first] : ends[behind - 1]]
                detail = f"a token joins two turns, the assistant's and another, in: {told_text[:120]!r}"
                return RowFault(UNTRUE, detail)
        joins = joins or starts[first] < start
        flags[first:behind] = [True] * (behind - first)
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
                return RowFault(UNTRUE, detail)
            borders.append(len(part))
        flags[borders[0] : borders[1]] = [True] * (borders[1] - borders[0])
    return Tokens(input_ids=ids, supervised=flags)
