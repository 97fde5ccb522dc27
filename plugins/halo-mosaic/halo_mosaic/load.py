"""`halo mosaic-load`: how many tokens of a text each expert of each layer gets; not for training."""

from __future__ import annotations

from pathlib import Path


def mosaic_load(folder: Path, text: str) -> None:
    """Count the tokens that each expert of a Mosaic model gets for one text."""
    import torch
    from transformers import AutoTokenizer

    from halo_mosaic.model import MosaicForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = MosaicForCausalLM.from_pretrained(folder)
    for number, layer in enumerate(model.model.layers):
        layer.mixture.router.register_forward_hook(
            lambda router, _, outputs, number=number: print(
                f"layer {number}: {torch.bincount(outputs[2].flatten(), minlength=len(router.weight)).tolist()}"
            )
        )
    with torch.no_grad():
        model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False))
