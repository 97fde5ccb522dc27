"""The same rows through TRL's SFTTrainer: its ids and labels are an independent answer to ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from halo_core.config import RunConfig
from halo_core.data import IGNORED, collate, prepare

WithTemplate = Callable[[str], Any]

CHATS = [
    {"messages": [{"role": "user", "content": "Open a file?"}, {"role": "assistant", "content": "Call open."}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Is it ünïcode, 漢字 or 🙂?"},
            {"role": "assistant", "content": "All of it: ünïcode 漢字 🙂\n\n    indented"},
            {"role": "user", "content": "  spaces  "},
            {"role": "assistant", "content": "Kept."},
        ]
    },
]
ANSWERS = [
    {"prompt": "What is a file?", "completion": " A named place."},
    {"prompt": "Q: two\nA:", "completion": " 2<|endoftext|>"},
]
CHAT_ANSWERS = [{"prompt": chat["messages"][:-1], "completion": chat["messages"][-1:]} for chat in CHATS]
TEXTS = [{"text": "def f():\n    return 1\n"}, {"text": "Ends by itself.<|endoftext|>"}]


@pytest.fixture
def by_trl(tmp_path: Path) -> Callable[..., list[tuple[list[int], list[int]]]]:
    """Return a function that prepares rows with TRL and returns ids and labels of each."""

    def prepared(tokenizer: Any, rows: list[dict[str, Any]], **given: Any) -> list[tuple[list[int], list[int]]]:
        from transformers import LlamaConfig, LlamaForCausalLM
        from trl import SFTConfig, SFTTrainer

        small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **small))
        arguments = SFTConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False, **given)
        trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
        return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]

    return prepared


def labels_of(row: Any, tokenizer: Any) -> list[int]:
    """Return labels as TRL has them, unshifted, out of the targets of our batch."""
    batch = collate([row], tokenizer.pad_token_id)
    return [IGNORED, *batch.targets[0].tolist()[:-1]]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("rows", "template", "ours", "theirs"),
    [
        (CHATS, "lfm2_training", {}, {"assistant_only_loss": True}),
        (CHATS, "qwen3_training", {}, {"assistant_only_loss": True}),
        (CHATS, "gptoss_training", {}, {"assistant_only_loss": True}),
        (CHATS, "lfm2_training", {"assistant_only_loss": False}, {}),
        (ANSWERS, "lfm2_training", {}, {}),
        (ANSWERS, "lfm2_training", {"completion_only_loss": False}, {"completion_only_loss": False}),
        (CHAT_ANSWERS, "qwen3", {}, {}),
        (CHAT_ANSWERS, "gemma4", {}, {}),
        (CHAT_ANSWERS, "lfm2", {"completion_only_loss": False}, {"completion_only_loss": False}),
        (TEXTS, "lfm2_training", {}, {}),
        ([*CHATS, {"messages": [*CHATS[0]["messages"], *CHATS[1]["messages"][1:]]}], "lfm2_training",
         {"max_length": 24, "overlong": "truncate"}, {"assistant_only_loss": True, "max_length": 24}),
    ],
    ids=[
        "marked lfm2", "marked qwen3", "marked gptoss", "whole chat", "completion", "whole completion",
        "chat completion qwen3", "chat completion gemma4", "whole chat completion", "text", "truncated",
    ],
)  # fmt: skip
def test_ids_and_labels_equal_those_of_trl(
    rows: list[dict[str, Any]],
    template: str,
    ours: dict[str, Any],
    theirs: dict[str, Any],
    with_template: WithTemplate,
    by_trl: Callable[..., Any],
) -> None:
    tokenizer = with_template(template)
    expected = by_trl(tokenizer, rows, **theirs)
    # The first token has no position to be predicted from: TRL's labels name it where all is learnt, its loss does not.
    expected = [(ids, [IGNORED, *labels[1:]]) for ids, labels in expected]
    prepared = prepare(RunConfig(**ours), tokenizer, rows=json.loads(json.dumps(rows)))
    assert [(list(row.input_ids), labels_of(row, tokenizer)) for row in prepared.train] == expected
