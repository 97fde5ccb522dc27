"""What attention may see where rows hold several documents: by hand, and beside transformers' own masks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from halo_core.kernels.documents import find
from halo_core.models.masks import FULL, SLIDING, layer_types, masks_apart, padding_mask, seen_positions

SEGMENTS = torch.tensor([[0, 1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 2, 3]])


def config(*kinds: str, implementation: str = "sdpa", window: int | None = 3) -> Any:
    return SimpleNamespace(
        layer_types=list(kinds) or None, sliding_window=window, num_hidden_layers=2, _attn_implementation=implementation
    )


def test_a_position_sees_its_document_up_to_itself_and_no_further_than_the_window() -> None:
    numbers = torch.tensor([[0, 0, 0, 1, 1]])
    assert seen_positions(numbers).int().tolist() == [
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    ]
    assert seen_positions(numbers, 2).int().tolist() == [
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    ]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_masks_are_those_that_transformers_makes_of_packed_positions(implementation: str) -> None:
    """Without padding, which transformers does not tell apart from documents."""
    segments = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 3]])
    model = Qwen3Config(
        num_hidden_layers=2, layer_types=[FULL, SLIDING], sliding_window=3, use_sliding_window=True,
        attn_implementation=implementation,
    )  # fmt: skip
    given = {
        "config": model, "inputs_embeds": torch.zeros(1, 8, 4, dtype=torch.bfloat16), "attention_mask": None,
        "cache": None, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]]),
    }  # fmt: skip
    found = masks_apart(model, find(segments), torch.bfloat16)
    assert isinstance(found, dict)
    for kind, make in ((FULL, create_causal_mask), (SLIDING, create_sliding_window_causal_mask)):
        wanted = make(**given)
        mask = found[kind]
        assert mask is not None
        assert mask.dtype == wanted.dtype
        assert torch.equal(mask, wanted)


def test_every_position_sees_itself_also_in_padding() -> None:
    seen = seen_positions(find(SEGMENTS).numbers, 1)
    assert bool(seen.diagonal(dim1=1, dim2=2).all())
    assert not bool((seen_positions(find(SEGMENTS).numbers)[0, :6, 6:]).any()), "no document sees padding"


def test_one_kind_of_layer_takes_its_mask_and_several_take_a_dictionary() -> None:
    documents = find(SEGMENTS)
    alone = masks_apart(config(FULL, FULL), documents, torch.float32)
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(alone[:, 0], seen_positions(documents.numbers))
    both = masks_apart(config("conv", SLIDING), documents, torch.float32, {"conv"})
    assert isinstance(both, dict)
    assert both["conv"] is None
    assert torch.equal(both[SLIDING], seen_positions(documents.numbers, 3)[:, None])  # type: ignore[arg-type]
    assert masks_apart(config(FULL, SLIDING), documents, torch.float32, {FULL, SLIDING}) == {FULL: None, SLIDING: None}


def test_a_configuration_without_layer_types_has_one_kind() -> None:
    assert layer_types(config(window=None)) == [FULL, FULL]
    assert layer_types(config(window=5)) == [SLIDING, SLIDING]


def test_what_nothing_keeps_apart_is_an_error() -> None:
    documents = find(SEGMENTS)
    with pytest.raises(NotImplementedError, match="type conv"):
        masks_apart(config(FULL, "conv"), documents, torch.float32)
    with pytest.raises(NotImplementedError, match="attention flex_attention"):
        masks_apart(config(FULL, implementation="flex_attention"), documents, torch.float32)


def test_nothing_padded_means_no_mask_and_a_row_of_padding_is_real() -> None:
    whole = torch.ones(2, 3, dtype=torch.int64)
    assert padding_mask(whole, find(whole)) is None
    padded = torch.tensor([[1, 1, 0], [0, 0, 0]])
    mask = padding_mask(padded, find(padded))
    assert mask is not None
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1]]
