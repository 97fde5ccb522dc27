"""A small real tokenizer, chat templates, and a writer of data files, for the tests of data.

Not for models: nothing here has weights.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from pydoc_data import topics
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TRL_TEMPLATES = Path(str(find_spec("trl").origin)).parent / "chat_templates"

SPECIAL_TOKENS = [
    "<|startoftext|>", "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>",
    "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>", "<|turn>",
    "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>",
    "<start_of_turn>", "<end_of_turn>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|user|>",
    "<|assistant|>", "<|system|>",
]  # fmt: skip


@pytest.fixture(scope="session")
def trained_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE trained on Python's own help texts, with the turn tokens of several templates."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(list(topics.topics.values())[:40], trainer)
    bos = bpe.token_to_id("<|startoftext|>")
    bpe.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|startoftext|> $A", special_tokens=[("<|startoftext|>", bos)]),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture
def tokenizer(trained_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return a copy that a test may change; it has no chat template."""
    return copy.deepcopy(trained_tokenizer)


@pytest.fixture
def with_template(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], PreTrainedTokenizerFast]:
    """Return a function that gives the tokenizer a chat template: one that TRL ships, by name, or the text itself."""

    def give(template: str) -> PreTrainedTokenizerFast:
        is_name = "{" not in template
        text = (TRL_TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8") if is_name else template
        tokenizer.chat_template = text
        return tokenizer

    return give


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes rows (or lines as they are) to a .jsonl file and returns its path."""

    def write(rows: list[Any], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(path)

    return write
