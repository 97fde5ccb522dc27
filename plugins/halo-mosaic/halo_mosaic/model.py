"""The Mosaic model for transformers: attention and experts side by side, experts as a list of small modules.

Not for Halo: nothing of it is imported, so the model loads and generates wherever this package is installed.
Shapes: B batch, S sequence, T = B*S tokens, H hidden, E experts, K experts per token, M expert width.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm, LlamaRotaryEmbedding


@strict
class MosaicConfig(PreTrainedConfig):
    """Sizes of a Mosaic model."""

    model_type = "mosaic"

    vocab_size: int = 32000
    hidden_size: int = 1024
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int | None = None
    num_tiles: int = 16
    tiles_per_token: int = 2
    tile_width: int = 1024
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    attention_bias: bool = False
    attention_dropout: float = 0.0
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Derive the size of an attention head where none is given."""
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)


class MosaicTile(nn.Module):
    """One expert: [N, H] -> [N, H] through `relu(x)**2` of width M, with biases and without a gate."""

    def __init__(self, config: MosaicConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.hidden_size, config.tile_width)
        self.outer = nn.Linear(config.tile_width, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the expert's output for every row."""
        return self.outer(squared_relu(self.inner(hidden)))


class MosaicRouter(nn.Module):
    """Scores every expert by a sigmoid of its own; the K best share a weight of one."""

    def __init__(self, config: MosaicConfig) -> None:
        super().__init__()
        self.tiles_per_token = config.tiles_per_token
        self.weight = nn.Parameter(torch.empty(config.num_tiles, config.hidden_size))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [T, E], weights [T, K] and expert ids [T, K] int64."""
        logits = nn.functional.linear(hidden, self.weight)
        chosen, ids = logits.float().sigmoid().topk(self.tiles_per_token, dim=-1)
        return logits, (chosen / chosen.sum(-1, keepdim=True)).to(hidden.dtype), ids


class MosaicMixture(nn.Module):
    """The block: a router and a list of experts, run one expert after the other. [B, S, H] -> [B, S, H]."""

    def __init__(self, config: MosaicConfig) -> None:
        super().__init__()
        self.router = MosaicRouter(config)
        self.tiles = nn.ModuleList(MosaicTile(config) for _ in range(config.num_tiles))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the weighted sum of each token's K experts."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        _, weights, ids = self.router(tokens)
        total = torch.zeros_like(tokens)
        for number, tile in enumerate(self.tiles):
            rows, slots = torch.where(ids == number)
            total = total.index_add(0, rows, tile(tokens[rows]) * weights[rows, slots, None])
        return total.view_as(hidden)


class MosaicDecoderLayer(GradientCheckpointingLayer):
    """One layer: attention and mixture read the same norm, and both are added to the stream."""

    def __init__(self, config: MosaicConfig, layer_idx: int) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, layer_idx)
        self.mixture = MosaicMixture(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Return the stream after this layer, [B, S, H]."""
        normed = self.norm(hidden_states)
        attended, _ = self.self_attn(normed, **kwargs)
        return hidden_states + attended + self.mixture(normed)


class MosaicPreTrainedModel(PreTrainedModel):
    """What transformers needs to know about every Mosaic model."""

    config_class = MosaicConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MosaicDecoderLayer"]  # noqa: RUF012 - transformers reads a list
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MosaicRouter):
            nn.init.normal_(module.weight, std=self.config.initializer_range)


class MosaicModel(MosaicPreTrainedModel):
    """Embedding, layers and the last norm."""

    def __init__(self, config: MosaicConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(MosaicDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the last hidden states [B, S, H], and the cache when one is used."""
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(past, past + hidden.shape[1], device=hidden.device)[None]
        mask = attention_mask if isinstance(attention_mask, dict) else None
        if mask is not None:
            mask = mask["full_attention"]
        else:
            mask = create_causal_mask(
                config=self.config, inputs_embeds=hidden, attention_mask=attention_mask, cache=cache,
                position_ids=position_ids,
            )
        rotary = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary, cache=cache, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), cache=cache)


class MosaicForCausalLM(MosaicPreTrainedModel, GenerationMixin):
    """A Mosaic model with its head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - as transformers writes it

    def __init__(self, config: MosaicConfig) -> None:
        super().__init__(config)
        self.model = MosaicModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, logits_to_keep: int = 0, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        """Return logits [B, S, vocabulary], and the loss when labels are given."""
        outputs = self.model(input_ids, **kwargs)
        logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=outputs.cache)


def squared_relu(inner: Tensor) -> Tensor:
    """Return relu(x)**2, element by element."""
    return nn.functional.relu(inner).square()


AutoConfig.register("mosaic", MosaicConfig)
AutoModelForCausalLM.register(MosaicConfig, MosaicForCausalLM)
