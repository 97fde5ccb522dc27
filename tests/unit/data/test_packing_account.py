"""From texts and conversations to packs: every token accounted for, and the same text learnt packed or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from halo_core.config import RunConfig
from halo_core.data import IGNORED, Rows, Unit, collate, prepare, units_of
from halo_core.data.packing import STRATEGIES
from halo_core.errors import Refused

WORDS = ("if", "while", "a class", "import", "and then", "lambda", "yield", "")
TEXTS = st.lists(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map(" ".join) | st.none(), min_size=1, max_size=8
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    texts=TEXTS, max_length=st.sampled_from([3, 10, 16, 4097]), strategy=st.sampled_from(STRATEGIES),
    overlong=st.sampled_from(["drop", "truncate"]),
)  # fmt: skip
def test_tokens_in_are_tokens_trained_plus_tokens_dropped_by_reason(
    trained_tokenizer: PreTrainedTokenizerFast, texts: list[str | None], max_length: int, strategy: str, overlong: str
) -> None:
    config = RunConfig(
        packing=True, packing_strategy=strategy, max_length=max_length, overlong=overlong, on_bad_row="skip"
    )
    try:
        units = units_of(config, prepare(config, trained_tokenizer, [{"text": text} for text in texts]))
    except Refused:
        return  # nothing is left to train on, and it says why
    account = units.account.train
    # A text of blanks alone is a bad row, which never gets as far as tokens.
    rows_in = [trained_tokenizer(f"{text}<|endoftext|>")["input_ids"] for text in texts if text and text.strip()]
    batches = [collate([unit], 0) for unit in units.train]
    assert account.tokens_read == sum(map(len, rows_in))
    trained = sum(batch.tokens for batch in batches)
    reasons = {reason: dropped.tokens for reason, dropped in account.dropped.items()}
    reasons["cut"] = account.cut_tokens
    assert account.packing is not None
    reasons["left out"] = account.packing.left_out_tokens
    assert account.tokens_read == trained + sum(reasons.values()) == account.tokens + sum(reasons.values())
    # Every token of a text is to be learnt, so each is a target or counted as none, or went with what was left out.
    assert sum(batch.supervised_tokens for batch in batches) == account.supervised_tokens
    kept = account.tokens + account.packing.left_out_tokens
    assert kept == account.supervised_tokens + sum(account.lost_targets.values())
    assert account.rows_read == account.rows + sum(dropped.rows for dropped in account.dropped.values())
    if strategy != "bfd":
        assert account.cut_rows == 0 and not any("longer than max_length" in reason for reason in account.dropped)
    told = account.text()
    assert f"{account.tokens_read} read, {account.tokens} kept, {account.supervised_tokens} supervised" in told


def learnt_text(units: list[Unit], tokenizer: Any, size: int, flatten: bool) -> Counter[str]:
    """Return the text that is learnt of each document, in batches of `size` units."""
    found: Counter[str] = Counter()
    for start in range(0, len(units), size):
        batch = collate(units[start : start + size], 0, flatten=flatten)
        for row in range(len(batch.input_ids)):
            for segment in range(1, int(batch.segment_ids[row].max()) + 1):
                targets = batch.targets[row][batch.segment_ids[row] == segment]
                found[tokenizer.decode(targets[targets != IGNORED])] += 1
    return found


@pytest.mark.parametrize("template", ["gptoss", "qwen3", "qwen3_5_think", "gemma4", "lfm2"])
def test_learnt_text_of_conversations_is_the_same_packed_or_not(
    template: str, with_template: Callable[[str], PreTrainedTokenizerFast]
) -> None:
    tokenizer = with_template(template)
    rows = [
        {"messages": [{"role": "user", "content": f"what is {word}?"},
                      {"role": "assistant", "content": f"{word} {'is it ' * number}"},
                      {"role": "user", "content": "and then?"},
                      {"role": "assistant", "content": f"nothing but {word}"}]}
        for number, word in enumerate(("a", "if", "class", "lambda", "yield", "while", "import"))
    ]  # fmt: skip
    config = RunConfig(packing=True, max_length=450)
    prepared = prepare(config, tokenizer, rows)
    assert isinstance(prepared.train, Rows) and len(prepared.train) == 7
    packs = units_of(config, prepared).train
    assert len(packs) < 7
    alone = learnt_text(prepared.train[:], tokenizer, 1, False)
    assert len(alone) == 7 and all("nothing but" in text and "what is" not in text for text in alone)
    for units in (prepared.train[:], packs[:]):
        for size in (1, 3):
            for flatten in (False, True):
                assert learnt_text(units, tokenizer, size, flatten) == alone
