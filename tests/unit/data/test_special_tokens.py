"""Another end or padding token than the tokenizer's: what it changes in rows, and an export that agrees with itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

import halo_core
from halo_core import registry
from halo_core.checkpoint.special_tokens import with_special_tokens
from halo_core.config import RunConfig
from halo_core.data import pad_id_of, prepare
from halo_core.errors import Refused
from halo_core.models.tiny import END_TOKEN, PAD_TOKEN

WithTemplate = Callable[[str], Any]
NESTED = next(a.spec for a in registry.load().architectures() if a.name.startswith("gemma4") and a.spec.text_config)
"""An architecture whose config.json holds the language model's part under a key of its own."""


def test_given_end_token_ends_plain_texts_and_stands_where_a_template_writes_the_end_token(
    with_template: WithTemplate,
) -> None:
    tokenizer = with_template("{%- for message in messages -%}{{ message.content }}{{ eos_token }}{%- endfor -%}")
    config = RunConfig(eos_token="<|im_end|>", pad_token="<|im_end|>")
    text = prepare(config, tokenizer, rows=[{"text": "One. "}]).train[0]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert text.input_ids[-1] == end and text.supervised[-1]
    messages = [{"role": "user", "content": "First?"}, {"role": "assistant", "content": "One."}]
    row = prepare(config, tokenizer, rows=[{"messages": messages}]).train[0]
    assert row.input_ids.count(end) == 2
    assert row.input_ids[-1] == end and row.supervised[-1]
    assert pad_id_of(tokenizer) == end == tokenizer.eos_token_id


def test_tokens_that_are_none_are_refused_together_with_near_ones(tokenizer: Any) -> None:
    before = (tokenizer.eos_token, tokenizer.pad_token)
    config = RunConfig(eos_token="<|imend|>", pad_token="<|nothing like it|>", chat_template_path="nowhere.jinja")
    with pytest.raises(Refused) as caught:
        prepare(config, tokenizer, rows=[{"text": "a b"}])
    problems = {problem.key: problem for problem in caught.value.problems}
    assert list(problems) == ["eos_token", "pad_token", "chat_template_path"]
    assert "<|im_end|>" in problems["eos_token"].remedy
    assert "remove pad_token" in problems["pad_token"].remedy and "<|pad|>" in problems["pad_token"].remedy
    assert (tokenizer.eos_token, tokenizer.pad_token) == before


def test_export_agrees_with_itself_about_the_tokens_it_was_trained_with(tmp_path: Path) -> None:
    keys = {"model_name_or_path": "tiny", "family": "lfm2", "output_dir": str(tmp_path / "run"), "max_steps": 1,
            "save_strategy": "no", "report_to": "none", "pad_token": END_TOKEN, "eos_token": PAD_TOKEN}  # fmt: skip
    halo_core.train(keys, rows=[{"text": "one two three"}])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    generation = GenerationConfig.from_pretrained(tmp_path / "run")
    assert (tokenizer.eos_token, tokenizer.pad_token) == (PAD_TOKEN, END_TOKEN)
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert config["pad_token_id"] == generation.pad_token_id == tokenizer.pad_token_id
    # Generation ends at the token of this run, and still at that of the source.
    assert generation.eos_token_id == [tokenizer.eos_token_id, tokenizer.pad_token_id]


def test_export_states_the_tokens_in_the_language_models_part_and_where_the_whole_states_them(tmp_path: Path) -> None:
    spec, inner = NESTED, str(NESTED.text_config)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 106], "top_k": 64}')
    config = {"eos_token_id": 1, inner: {"eos_token_id": 1, "hidden_size": 8}}
    found = {"generation_config.json": tmp_path / "generation_config.json", "special_tokens_map.json": tmp_path / "map"}
    files, changed = with_special_tokens(found, config, spec, {"eos_token_id": 106, "pad_token_id": 0})
    assert changed == {
        "eos_token_id": 106,
        inner: {"eos_token_id": 106, "hidden_size": 8, "pad_token_id": 0},
    }
    assert json.loads(files["config.json"]) == changed  # type: ignore[arg-type]
    written = json.loads(files["generation_config.json"])  # type: ignore[arg-type]
    assert written == {"eos_token_id": [106, 1], "top_k": 64, "pad_token_id": 0}
    assert "special_tokens_map.json" not in files
    assert config["eos_token_id"] == 1, "the source's configuration is left alone"


def test_without_given_tokens_nothing_is_written_anew(tmp_path: Path) -> None:
    found = {"special_tokens_map.json": tmp_path / "map"}
    assert with_special_tokens(found, {"eos_token_id": 1}, NESTED, {}) == (found, {"eos_token_id": 1})
