"""Writes a complete small Hugging Face folder of any architecture: random weights, a tokenizer, a chat template.

Not for real models, and not a test's fixture alone: `halo init-tiny` and the quickstart train what this writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from halo_core.errors import Problem, Refused
from halo_core.model_config import TINY
from halo_core.registry import Architecture

PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"
"""Ends every turn, and is the end-of-sequence token: a model that has learnt to answer stops after its answer."""

INITIALIZER_RANGE = 0.05
"""Standard deviation of the random weights, unless a family gives its own.

The usual 0.02 is meant for widths in the thousands. At a width of 128 it starts so near zero that the quickstart's
model needs a third more steps (CPU, 546 steps: held-out exact match 0.66 with 0.02, 0.95 with 0.05).
"""

_DATA = files("halo_core.models") / "tiny_data"


def write_tiny(architecture: Architecture, folder: Path, *, seed: int = 0) -> None:
    """Write a model of about one to two million fp32 parameters that transformers loads by its Auto classes.

    The same architecture, seed and library versions give byte-identical files. The global random state is left alone.

    Raises:
        Refused: when `folder` exists and is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise Refused(
            Problem(
                key="out",
                value=folder,
                why="the folder is not empty, and a model's files would mix with what is there",
                remedy="name a new or an empty folder",
            )
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    with _no_progress_bars():
        model = _random_model(architecture, seed)
        # Each process of a run writes a folder of its own; transformers would let only the first one write.
        model.should_save_on_this_rank = lambda is_main_process: True
        model.save_pretrained(folder)


def folder_or_id(name: str, architecture: Architecture, scratch: Path) -> str:
    """Return the folder or hub id that `model_name_or_path: name` means; a tiny model is written to `scratch` first."""
    if name not in TINY:
        return name
    write_tiny(architecture, scratch / "tiny")
    return str(scratch / "tiny")


def write_tokenizer(folder: Path) -> None:
    """Write the tiny models' tokenizer and chat template: byte-level BPE, 2048 entries, four tokens round a turn pair.

    There is no beginning token and no system text; system messages that a row has are rendered. Every digit is its
    own token. The template marks what the assistant said, its end token included, as the text to learn.
    """
    settings = {
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_TOKEN,
        "pad_token": PAD_TOKEN,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenizer.json").write_bytes((_DATA / "tokenizer.json").read_bytes())
    (folder / "chat_template.jinja").write_bytes((_DATA / "chat_template.jinja").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def tiny_config(architecture: Architecture) -> PretrainedConfig:
    """Return the architecture's tiny configuration, with the vocabulary and special ids of the tiny tokenizer."""
    vocabulary = json.loads((_DATA / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    config_class = _attribute(architecture.spec.config_class)
    config: PretrainedConfig = config_class(
        **{"initializer_range": INITIALIZER_RANGE, **architecture.spec.tiny},
        vocab_size=len(vocabulary),
        bos_token_id=None,
        eos_token_id=vocabulary[END_TOKEN],
        pad_token_id=vocabulary[PAD_TOKEN],
    )
    return config


def _random_model(architecture: Architecture, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = _attribute(architecture.spec.model_class)(tiny_config(architecture))
    return model


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _attribute(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
