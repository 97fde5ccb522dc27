"""The role of every parameter of every architecture, and whether it is decayed. Numbers in names are `*`."""

from __future__ import annotations

import pytest
import torch

from halo_core import registry
from halo_core.config import read
from halo_core.models.build import build_meta
from halo_core.models.tiny import tiny_config
from halo_core.optim.groups import by_pattern, trained

ARCHITECTURES = {architecture.name: architecture for architecture in registry.load().architectures()}
ATTENTION = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
GATED = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def below(place: str, *names: str) -> tuple[str, ...]:
    return tuple(f"model.layers.*.{place}{name}" for name in names)


EXPERTS = ("gate_up_proj", "down_proj")
NORMS = below("", "input_layernorm.weight", "post_attention_layernorm.weight")
QK_NORMS = below("self_attn.", "q_norm.weight", "k_norm.weight")
GEMMA = {
    "matrix": (*below("self_attn.", *ATTENTION), *below("mlp.", *GATED)),
    "norm": (
        *NORMS, *QK_NORMS, "model.norm.weight",
        *below("", "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"),
    ),
}
LFM = {
    "matrix": (
        *below("self_attn.", *ATTENTION[:3], "out_proj.weight"), *below("conv.", "in_proj.weight", "out_proj.weight"),
        *below("feed_forward.", "w*.weight"),
    ),
    "convolution": below("conv.", "conv.weight"),
    "norm": (
        *below("", "operator_norm.weight", "ffn_norm.weight"), "model.embedding_norm.weight",
        *below("self_attn.", "q_layernorm.weight", "k_layernorm.weight"),
    ),
}
QWEN = {
    "matrix": (*below("self_attn.", *ATTENTION), "lm_head.weight"),
    "norm": (*NORMS, *QK_NORMS, "model.norm.weight"),
}
DELTA = {
    "matrix": (
        *QWEN["matrix"],
        *below("linear_attn.", "out_proj.weight", *(f"in_proj_{part}.weight" for part in ("qkv", "z", "a", "b"))),
    ),
    "convolution": below("linear_attn.", "conv*d.weight"),
    "bias": below("linear_attn.", "dt_bias"),
    "scalar": below("linear_attn.", "A_log"),
    "norm": (*QWEN["norm"], *below("linear_attn.", "norm.weight")),
}
SPARSE = (*below("mlp.experts.", *EXPERTS), *below("mlp.", "gate.weight"))
TABLE: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt_oss": {
        "matrix": (
            *below("self_attn.", *ATTENTION), *below("mlp.experts.", *EXPERTS), *below("mlp.", "router.weight"),
            "lm_head.weight",
        ),
        "bias": (
            *below("self_attn.", *(name.replace("weight", "bias") for name in ATTENTION)),
            *below("mlp.experts.", *(f"{name}_bias" for name in EXPERTS)), *below("mlp.", "router.bias"),
        ),
        "scalar": below("self_attn.", "sinks"),
        "norm": (*NORMS, "model.norm.weight"),
    },
    "gemma4_moe": {
        "matrix": (*GEMMA["matrix"], *below("experts.", *EXPERTS), *below("router.", "proj.weight")),
        "scalar": below("router.", "scale", "per_expert_scale"),
        "norm": (
            *GEMMA["norm"],
            *below("", "pre_feedforward_layernorm_*.weight", "post_feedforward_layernorm_*.weight"),
        ),
    },
    "gemma4": {
        "matrix": (
            *GEMMA["matrix"], *below("", "per_layer_input_gate.weight", "per_layer_projection.weight"),
            "model.per_layer_model_projection.weight",
        ),
        "embedding": ("model.embed_tokens_per_layer.weight",),
        "norm": (
            *GEMMA["norm"], *below("", "post_per_layer_input_norm.weight"), "model.per_layer_projection_norm.weight",
        ),
    },
    "lfm2_moe": {**LFM, "matrix": (*LFM["matrix"], *below("feed_forward.experts.", *EXPERTS),
                                   *below("feed_forward.", "gate.weight"))},
    "lfm2": LFM,
    "qwen3_moe": {**QWEN, "matrix": (*QWEN["matrix"], *SPARSE, *below("mlp.", *GATED))},
    "qwen3": {**QWEN, "matrix": (*QWEN["matrix"], *below("mlp.", *GATED))},
    "qwen3_5_moe": {**DELTA, "matrix": (*DELTA["matrix"], *SPARSE, *below("mlp.shared_expert.", *GATED),
                                        *below("mlp.", "shared_expert_gate.weight"))},
    "qwen3_5": {**DELTA, "matrix": (*DELTA["matrix"], *below("mlp.", *GATED))},
}
IS_DECAYED = {"matrix": True, "embedding": True, "convolution": True, "bias": False, "norm": False, "scalar": False}


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_parameter_has_the_role_that_stands_here(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model = build_meta(architecture, tiny_config(architecture).to_dict(), dtype=torch.bfloat16)
    found: dict[str, set[str]] = {}
    for row in by_pattern(trained(model, read(None, given={"bf16": True}).config)):
        found.setdefault(row.role, set()).add(row.name)
        assert row.is_decayed == IS_DECAYED[row.role]
        assert row.step == "bf16 stochastic"
    wanted = {role: set(names) for role, names in TABLE[name].items()}
    wanted.setdefault("embedding", set()).add("model.embed_tokens.weight")
    assert found == wanted


def test_roles_do_not_follow_dimensions() -> None:
    dimensions: dict[str, set[int]] = {}
    for architecture in ARCHITECTURES.values():
        model = build_meta(architecture, tiny_config(architecture).to_dict(), dtype=torch.float32)
        ndim = {name: parameter.ndim for name, parameter in model.named_parameters()}
        for row in trained(model, read(None).config):
            dimensions.setdefault(row.role, set()).add(ndim[row.name])
    assert dimensions["bias"] == {1, 2} and dimensions["matrix"] == {2, 3} and dimensions["convolution"] == {3}
