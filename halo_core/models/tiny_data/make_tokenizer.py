"""Makes `tokenizer.json` of this folder, once, for the repository. Not for a run: nothing imports this file.

The merges are learnt from the chatterbot-corpus package (`pip install chatterbot-corpus`), the quickstart's rows and
Python's own help texts, so another Python version may give other merges. From the root of the repository:

    python halo_core/models/tiny_data/make_tokenizer.py
"""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path

import chatterbot_corpus
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

NUM_ENTRIES = 2048
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def texts() -> list[str]:
    """Return English text; every turn of the corpus four times, for the help texts are longer and less like chat."""
    folder = Path(chatterbot_corpus.__file__).parent / "data" / "english"
    turns = [
        str(turn)
        for path in sorted(folder.glob("*.yml"))
        for conversation in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]
        for turn in conversation
    ]
    with Path("examples/quickstart/train.jsonl").open(encoding="utf-8") as rows:
        quickstart = [message["content"] for row in rows for message in json.loads(row)["messages"]]
    return turns * 4 + quickstart + list(pydoc_data.topics.topics.values())


def train(lines: list[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer of `NUM_ENTRIES` entries; every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_ENTRIES,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


if __name__ == "__main__":
    train(texts()).save(str(Path(__file__).with_name("tokenizer.json")), pretty=False)
