"""Builds an architecture's model on the meta device: shapes, dtypes and sockets, and no memory.

Not for weights (`load.py`): between the two, sharding may replace parameters by shards of themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from halo_core.attention import socket
from halo_core.errors import Refused
from halo_core.kernels.experts.weights import ExpertsKernel
from halo_core.model_config import QUANTISATION
from halo_core.models import mixers, sockets
from halo_core.models.fp32_router import widen_routers, widened
from halo_core.models.tokenizer import invalid_config
from halo_core.registry import Architecture, text_config


def build_meta(
    architecture: Architecture,
    model_config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    attention: str = "eager",
    experts: ExpertsKernel | None = None,
    fp32_router: bool = False,
    mixer_kernels: Mapping[str, Any] | None = None,
    attention_kernel: socket.KernelOfHead | None = None,
) -> PreTrainedModel:
    """Return the causal language model on the meta device, in training mode.

    model_config: the whole config.json; of a multimodal one the text part is built.
    dtype: of the parameters. Tensors that the model's code makes in fp32 on purpose stay in fp32.
    attention: transformers' name of the attention implementation; not read with `attention_kernel`.
    experts: the experts kernel to attach; None leaves transformers' own (for counting only).
    fp32_router: routers hold fp32 parameters and compute in fp32, whatever `dtype` is.
    mixer_kernels: kind -> kernel for layers that mix tokens otherwise than by attention, used for every batch; None for
        transformers' own functions, and the core's that run everywhere where a row holds several documents.
    attention_kernel: head size -> the core's kernel that computes attention, in place of transformers'.
    """
    config = text_model_config(architecture, model_config)
    # Training never reads a cache; with one, transformers also stops telling packed documents apart.
    config.use_cache = False
    model_class = attribute(architecture.spec.model_class)
    implementation = attention if attention_kernel is None else "eager"
    with torch.device("meta"):
        model: PreTrainedModel = model_class._from_config(config, dtype=dtype, attn_implementation=implementation)
    _keep_fp32(model, dtype)
    if fp32_router:
        widen_routers(model, architecture)
    if experts is not None:
        sockets.attach(model, architecture, experts)
    if attention_kernel is not None:
        socket.attach(model, decoder_layer=architecture.spec.decoder_layer, kernel_of_head=attention_kernel)
    if mixer_kernels is None:
        mixers.attach(model, architecture)
    else:
        mixers.attach(model, architecture, {**mixers.KERNELS, **mixer_kernels}, every_batch=True)
    return model.train()


def text_model_config(architecture: Architecture, model_config: Mapping[str, Any]) -> PretrainedConfig:
    """Return the language model's configuration object, read from config.json as a dict.

    Raises:
        Refused: transformers refuses its values.
    """
    inner = text_config(architecture.spec, model_config)
    # How the source stores its weights is no matter of the model, whose weights are plain numbers.
    given = {name: value for name, value in inner.items() if name != QUANTISATION}
    if inner is not model_config and "tie_word_embeddings" in model_config:
        # The multimodal class ties by its own entry and never reads the text part's.
        given["tie_word_embeddings"] = model_config["tie_word_embeddings"]
    try:
        config: PretrainedConfig = attribute(architecture.spec.config_class).from_dict(given)
    except StrictDataclassError as fault:
        raise Refused(invalid_config(None, fault)) from fault
    return config


def attribute(target: str) -> Any:
    """Return what stands at "module:attribute"."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def _keep_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give fp32 to the parameters that transformers would load in fp32 whatever dtype is asked for."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    kept_names, _, _ = build_glob_alternation(list(plan))
    for name, parameter in list(model.named_parameters()):
        if kept_names.search(name):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, widened(parameter))
    model.tie_weights()
