"""Qwen3, MoE and dense: what they are and what works with them, as facts.

Not for mechanisms: the core has those. The plainest line here: full attention in every layer, a softmax router.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from halo_core.family import (
    Answer,
    ArchitectureSpec,
    ConfigNames,
    ExpertLayout,
    FamilySpec,
    HeadSpec,
    MoEBlockSpec,
    PublishedModel,
    RouterSpec,
    answers,
    without_experts,
)
from halo_core.hookspecs import hookimpl
from halo_core.verdict import Supported, Unsupported

MOE, DENSE = "qwen3_moe", "qwen3"
CPU, GPU = Supported(proof="cpu"), Supported(proof="gpu")


@hookimpl
def halo_families() -> Iterator[FamilySpec]:
    """Yield the family with its MoE and its dense architecture."""
    sizes = ConfigNames(
        hidden_size=("hidden_size",), num_layers=("num_hidden_layers",), num_heads=("num_attention_heads",),
        num_kv_heads=("num_key_value_heads",), vocab_size=("vocab_size",),
    )
    # The published files say num_experts; transformers 5.24 writes num_local_experts.
    experts = {"num_experts": ("num_experts", "num_local_experts"), "experts_per_token": ("num_experts_per_tok",),
               "expert_width": ("moe_intermediate_size",)}
    tiny = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
            "head_dim": 16}
    moe = ArchitectureSpec(
        name=MOE, model_types=("qwen3_moe",), is_moe=True, names=replace(sizes, **experts), head=HeadSpec(softcap=None),
        model_class="transformers:Qwen3MoeForCausalLM", config_class="transformers:Qwen3MoeConfig",
        decoder_layer="Qwen3MoeDecoderLayer", source="transformers 5.24, models/qwen3_moe",
        tiny={**tiny, "intermediate_size": 256, "mlp_only_layers": [0], "moe_intermediate_size": 64, "num_experts": 8,
              "num_experts_per_tok": 2, "norm_topk_prob": True},
    )
    dense = ArchitectureSpec(
        name=DENSE, model_types=("qwen3",), is_moe=False, names=sizes, head=HeadSpec(softcap=None),
        model_class="transformers:Qwen3ForCausalLM", config_class="transformers:Qwen3Config",
        decoder_layer="Qwen3DecoderLayer", source="transformers 5.24, models/qwen3",
        tiny={**tiny, "intermediate_size": 384},
    )
    yield FamilySpec(
        name="qwen3", contract=1, architectures=(moe, dense), transformers=">=5.24,<5.25", aliases=("qwen_3",),
        source="hub organisation Qwen",
        published=(
            PublishedModel(hub_id="Qwen/Qwen3-30B-A3B", architecture=MOE,
                           config="halo_families:configs/qwen3-30b-a3b.json"),
            PublishedModel(hub_id="Qwen/Qwen3-4B", architecture=DENSE, config="halo_families:configs/qwen3-4b.json"),
        ),
    )


@hookimpl
def halo_moe_blocks() -> Iterator[MoEBlockSpec]:
    """Yield where the routed experts of the MoE architecture sit; layers of `mlp_only_layers` have none."""
    yield MoEBlockSpec(
        architecture=MOE, experts="mlp.experts", experts_class="Qwen3MoeExperts", router="mlp.gate",
        # Weights add up to one only with `norm_topk_prob`, which the configuration class leaves off.
        router_spec=RouterSpec(router_class="Qwen3MoeTopKRouter", score="softmax", first_output="logits",
                               weights_sum_to_one=False),
        layout=ExpertLayout(is_transposed=False, is_concatenated=True, has_bias=False, has_gate=True,
                            activation="silu(gate) * up"),
        hub_keys=tuple(f"mlp.experts.*.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
    )


@hookimpl
def halo_balancing_modes() -> Iterator[Answer]:
    """Yield the answers about load balancing."""
    yield from answers(MOE, {
        "balancing:none": CPU, "balancing:aux_loss": CPU,
        "balancing:bias_update": Unsupported(
            reason="the router has no bias that only the selection sees",
            instead="set moe_balancing: aux_loss or none", because=("Qwen3MoeTopKRouter",),
        ),
    })
    yield from answers(DENSE, {"balancing:none": CPU})
    yield from without_experts(DENSE, "balancing:bias_update", "balancing:aux_loss")


@hookimpl
def halo_attention_backends() -> Iterator[Answer]:
    """Yield the answers about attention."""
    for architecture in (MOE, DENSE):
        yield from answers(architecture, {
            "attention:eager": CPU, "attention:sdpa": CPU, "attention:flex_attention": GPU,
            "attention:flash_attention_2": GPU,
        })


@hookimpl
def halo_context_parallel() -> Iterator[Answer]:
    """Yield the answers about context parallelism."""
    for architecture in (MOE, DENSE):
        yield from answers(architecture, {"cp:ulysses": CPU})


@hookimpl
def halo_features() -> Iterator[Answer]:
    """Yield the answers about everything else."""
    works = ("sft", "gradient_checkpointing", "fsdp", "packing", "padding_free", "lora", "bf16", "lowp")
    both = {**dict.fromkeys(works, CPU), **dict.fromkeys(("qlora", "compile", "liger"), GPU)}
    yield from answers(MOE, {**both, **dict.fromkeys(("grouped_gemm", "ep", "etp", "fp32_router"), CPU)})
    yield from answers(DENSE, both)
    yield from without_experts(DENSE, "grouped_gemm", "ep", "etp", "fp32_router")
