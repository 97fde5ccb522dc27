"""The tiny folders of every architecture: complete, small, repeatable, and loaded by transformers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from halo_core import registry
from halo_core.errors import Refused
from halo_core.models import tiny
from halo_core.registry import Architecture

ARCHITECTURES = registry.load().architectures()
FILES = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]
ENGLISH = (
    "The sun was already low when the old man walked down to the harbour. He looked at the boats for a while, said "
    "nothing, and then asked the girl whether she had seen his dog. Please write a short letter to my landlord, "
    "explaining that the heating has been broken since Monday, and ask when somebody will come to repair it."
)
PAIR = [{"role": "user", "content": "What is hot?"}, {"role": "assistant", "content": "The sun is."}]
MOST_TOKENS_BESIDE_A_PAIR = 12

every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda found: found.name)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@every_architecture
def test_folder_is_complete_and_loads_by_the_auto_classes(architecture: Architecture, tmp_path: Path) -> None:
    tiny.write_tiny(architecture, tmp_path)
    assert sorted(contents(tmp_path)) == FILES
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == architecture.spec.model_class.partition(":")[2]
    assert model.config.architectures == [type(model).__name__]
    assert 1_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 2_000_000
    assert all(parameter.isfinite().all() for parameter in model.parameters())

    words = AutoTokenizer.from_pretrained(tmp_path)
    assert len(words) == model.config.vocab_size
    assert words.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert words.pad_token_id == model.config.pad_token_id
    assert words.decode(words(ENGLISH)["input_ids"]) == ENGLISH
    ids = words.apply_chat_template(PAIR, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt")
    assert ids["assistant_masks"].sum() > 1
    with torch.no_grad():
        assert model(input_ids=ids["input_ids"], use_cache=False).logits.isfinite().all()


@every_architecture
def test_same_seed_writes_the_same_bytes_and_leaves_the_global_seed_alone(
    architecture: Architecture, tmp_path: Path
) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    for name, seed in (("first", 5), ("second", 5), ("other", 6)):
        tiny.write_tiny(architecture, tmp_path / name, seed=seed)
    assert torch.equal(torch.rand(3), expected)
    first, second, other = (contents(tmp_path / name) for name in ("first", "second", "other"))
    assert first == second
    assert first.pop("model.safetensors") != other.pop("model.safetensors")
    assert first == other


def test_folder_that_is_not_empty_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(Refused, match="not empty"):
        tiny.write_tiny(ARCHITECTURES[0], tmp_path)
    assert contents(tmp_path) == {"thesis.txt": b"years of work"}


def test_pair_of_turns_costs_few_tokens_beside_its_content(tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template(PAIR, return_dict=True)["input_ids"]
    content = [token for message in PAIR for token in tokenizer(message["content"])["input_ids"]]
    assert len(rendered) - len(content) == 4 <= MOST_TOKENS_BESIDE_A_PAIR
    assert tokenizer.decode(rendered) == "<|user|>What is hot?<|end|><|assistant|>The sun is.<|end|>"


def test_what_the_assistant_says_and_its_end_are_marked_as_learnt(tokenizer: Any) -> None:
    turns = [*PAIR, {"role": "user", "content": "And cold?"}, {"role": "assistant", "content": "Ice."}]
    rendered = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    learnt = [
        token
        for token, marked in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True)
        if marked
    ]
    assert tokenizer.decode(learnt) == "The sun is.<|end|>Ice.<|end|>"


def test_generation_prompt_is_a_prefix_of_the_full_rendering(tokenizer: Any) -> None:
    asked = tokenizer.apply_chat_template(PAIR[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    full = tokenizer.apply_chat_template(PAIR, return_dict=True)["input_ids"]
    assert full[: len(asked)] == asked


def test_system_message_is_rendered_when_given_and_never_made_up(tokenizer: Any) -> None:
    system = {"role": "system", "content": "Be brief."}
    with_system = tokenizer.apply_chat_template([system, *PAIR], tokenize=False)
    assert with_system.startswith("<|system|>Be brief.<|end|><|user|>")
    assert "<|system|>" not in tokenizer.apply_chat_template(PAIR, tokenize=False)


@pytest.mark.parametrize(
    ("message", "said"),
    [({"role": "tool", "content": "3"}, "not tool"), ({"role": "user", "content": [{"type": "image"}]}, "text alone")],
)
def test_template_refuses_what_it_cannot_render(tokenizer: Any, message: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        tokenizer.apply_chat_template([message], tokenize=False)


def test_special_tokens_are_distinct_and_there_is_no_beginning_token(tokenizer: Any) -> None:
    assert tokenizer.bos_token is None
    assert (tokenizer.eos_token, tokenizer.pad_token) == (tiny.END_TOKEN, tiny.PAD_TOKEN)
    assert tokenizer("plain")["input_ids"][-1] != tokenizer.eos_token_id


@pytest.mark.parametrize(
    "text", [ENGLISH, "", "  two  blanks\n\ttab ", "e\u0301 日本語 🙂", "x = 1234.5  # don't", "\x00\x7f"]
)
def test_any_text_survives_the_shipped_tokenizer(text: str, tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    shipped = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert shipped.decode(shipped.encode(text).ids, skip_special_tokens=False) == text


def test_english_word_costs_one_to_three_tokens_on_average(tokenizer: Any) -> None:
    tokens, words = len(tokenizer(ENGLISH)["input_ids"]), len(ENGLISH.split())
    assert words < tokens < 3 * words


def test_every_digit_is_a_token_of_its_own(tokenizer: Any) -> None:
    assert tokenizer.tokenize("1024") == ["1", "0", "2", "4"]
