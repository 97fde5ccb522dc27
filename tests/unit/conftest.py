"""Small model folders of every architecture, made by transformers alone. Not for models that Halo writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# No torch at this level: most unit tests never need it.
VOCABULARY = 256
SHARD_BYTES = 900_000


class Sources:
    """Makes source folders once per session; `folder(name, form)` returns the one asked for.

    Forms: `plain` as save_pretrained writes the text class; `fused` the module layout, experts fused; `sharded` as
    plain over several files; `wrapped` a multimodal checkpoint with vision tensors, and with a prediction head that
    no class of transformers loads where the family has one; `wrapped_bf16` the same in bf16; `wrapped_fused` with
    the experts fused.
    """

    def __init__(self, root: Path, registry: Any) -> None:
        self.root, self.registry = root, registry
        self.made: dict[tuple[str, str], Path] = {}

    def architecture(self, name: str) -> Any:
        return next(a for a in self.registry.architectures() if a.name == name)

    def folder(self, name: str, form: str = "plain") -> Path:
        if (name, form) not in self.made:
            self.made[name, form] = self._make(self.architecture(name), form)
        return self.made[name, form]

    def _make(self, architecture: Any, form: str) -> Path:
        import torch
        from safetensors.torch import load_file, save_file

        folder = self.root / f"{architecture.name}-{form}"
        torch.manual_seed(7)
        model = wrapper_model(architecture) if form.startswith("wrapped") else text_model(architecture)
        randomise(model)
        if form == "wrapped_bf16":
            keep = {name: b.dtype for name, b in model.named_buffers()}
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
            assert keep == {name: b.dtype for name, b in model.named_buffers()}
        if form in ("sharded", "wrapped", "wrapped_bf16"):
            model.save_pretrained(folder, max_shard_size=SHARD_BYTES)
        else:
            model.save_pretrained(folder)
        if form == "wrapped_fused":
            state = {k: v.contiguous() for k, v in model.state_dict().items() if k not in model.all_tied_weights_keys}
            save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        if form == "fused":
            state = {k: v.contiguous() for k, v in model.state_dict().items()}
            for tied in model.all_tied_weights_keys:
                del state[tied]
            save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        if form in ("wrapped", "wrapped_bf16") and any("mtp" in pattern for pattern in architecture.spec.untrained):
            extra = {f"mtp.layers.0.{n}": torch.randn(4, 6) for n in ("fc.weight", "experts.3.up_proj.weight")}
            file = folder / "model-mtp.safetensors"
            save_file(extra, file, metadata={"format": "pt"})
            index = folder / "model.safetensors.index.json"
            listed = json.loads(index.read_text())
            listed["weight_map"].update(dict.fromkeys(extra, file.name))
            index.write_text(json.dumps(listed))
            assert load_file(file).keys() == extra.keys()
        (folder / "tokenizer.json").write_text('{"stands": "for a tokenizer"}')
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        (folder / "generation_config.json").write_text('{"max_new_tokens": 3}')
        return folder


def text_model(architecture: Any) -> Any:
    """Return transformers' own random model of the text class."""
    from halo_core.models.build import attribute

    spec = architecture.spec
    config = attribute(spec.config_class)(**spec.tiny, vocab_size=VOCABULARY, pad_token_id=0)
    return attribute(spec.model_class)(config)


def wrapper_model(architecture: Any) -> Any:
    """Return transformers' own random model of the multimodal class around the text class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    model_type = next(t for t in architecture.spec.model_types if "text_config" in CONFIG_MAPPING[t].sub_configs)
    config_class = CONFIG_MAPPING[model_type]
    text = text_model(architecture).config
    vision_class = config_class.sub_configs["vision_config"]
    common = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 4}
    if "depth" in vision_class().to_dict():
        vision = {**common, "depth": 1, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2,
                  "out_hidden_size": text.hidden_size, "num_position_embeddings": 16}
        ids = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
    else:
        vision = {**common, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
                  "position_embedding_size": 16, "pooling_kernel_size": 2}
        ids = {"image_token_id": 250, "video_token_id": 251, "audio_token_id": 249, "boi_token_id": 252,
               "eoi_token_id": 253, "audio_config": None}
    config = config_class(
        text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=text.tie_word_embeddings, **ids
    )
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class](config)


def randomise(model: Any) -> None:
    """Move every stored tensor off its usual first value, so that a tensor left at it is seen."""
    import torch

    with torch.no_grad():
        for tensor in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values():
            tensor.add_(torch.randn_like(tensor), alpha=0.1)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Return the maker of source folders."""
    from halo_core import registry

    return Sources(tmp_path_factory.mktemp("sources"), registry.load())


@pytest.fixture(scope="session")
def text_class_model() -> Callable[[Any], Any]:
    """Return the function that makes transformers' own random model of an architecture."""
    return text_model
