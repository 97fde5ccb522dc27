"""Gemma 4, MoE and dense, text part: what they are and what works with them, as facts.

Not for mechanisms, nor for images and sound: the published checkpoints are multimodal, and these are their language
models. Full-attention layers have wider heads than sliding ones; experts and router stand in the layer itself,
beside a dense network that every token takes.
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
from halo_core.verdict import Experimental, Supported, Unsupported, Verdict

MOE, DENSE = "gemma4_moe", "gemma4"
CPU, GPU = Supported(proof="cpu"), Supported(proof="gpu")


@hookimpl
def halo_families() -> Iterator[FamilySpec]:
    """Yield the family with its MoE and its dense architecture, told apart by `enable_moe_block` (absent: dense)."""
    sizes = ConfigNames(
        hidden_size=("hidden_size",), num_layers=("num_hidden_layers",), num_heads=("num_attention_heads",),
        num_kv_heads=("num_key_value_heads",), vocab_size=("vocab_size",),
    )
    experts = {"num_experts": ("num_experts",), "experts_per_token": ("top_k_experts",),
               "expert_width": ("moe_intermediate_size",)}
    tiny = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 64, "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 30.0}
    moe = ArchitectureSpec(
        name=MOE, model_types=("gemma4_text", "gemma4"), text_config="text_config", when=("enable_moe_block", True),
        is_moe=True, names=replace(sizes, **experts), head=HeadSpec(softcap="final_logit_softcapping"),
        model_class="transformers:Gemma4ForCausalLM", config_class="transformers:Gemma4TextConfig",
        decoder_layer="Gemma4TextDecoderLayer", source="transformers 5.24, models/gemma4",
        source_prefixes=(("model.language_model.", "model."),),
        untrained=(r"^model\.(vision_tower|embed_vision|audio_tower|embed_audio)\.",),
        tiny={**tiny, "enable_moe_block": True, "moe_intermediate_size": 64, "num_experts": 8, "top_k_experts": 2,
              "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
    )
    dense = replace(
        moe, name=DENSE, when=("enable_moe_block", False), is_moe=False, names=sizes,
        # Layers that share keys and values with an earlier one have none of their own; a checkpoint still may.
        untrained=(*moe.untrained, r"^model\.(language_model\.)?layers\.\d+\.self_attn\.([kv]_proj|[kv]_norm)\."),
        tiny={**tiny, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16,
              "vocab_size_per_layer_input": 4096},
    )
    yield FamilySpec(
        name="gemma4", contract=1, architectures=(moe, dense), transformers=">=5.24,<5.25", aliases=("gemma_4",),
        source="hub organisation google",
        published=tuple(
            PublishedModel(hub_id=hub_id, architecture=MOE, config="halo_families:configs/gemma-4-26b-a4b.json")
            for hub_id in ("google/gemma-4-26B-A4B", "google/gemma-4-26B-A4B-it")
        ),
    )


@hookimpl
def halo_moe_blocks() -> Iterator[MoEBlockSpec]:
    """Yield where the routed experts of the MoE architecture sit: there is no block module round them."""
    yield MoEBlockSpec(
        architecture=MOE, experts="experts", experts_class="Gemma4TextExperts", router="router",
        # Weights are made to add up to one, then multiplied by a trained scale per expert.
        router_spec=RouterSpec(router_class="Gemma4TextRouter", score="softmax", first_output="probabilities",
                               weights_sum_to_one=False),
        layout=ExpertLayout(is_transposed=False, is_concatenated=True, has_bias=False, has_gate=True,
                            activation="gelu_tanh(gate) * up"),
        hub_keys=("experts.gate_up_proj", "experts.down_proj"), shared_expert="mlp",
    )


@hookimpl
def halo_balancing_modes() -> Iterator[Answer]:
    """Yield the answers about load balancing."""
    yield from answers(MOE, {
        "balancing:none": CPU,
        "balancing:aux_loss": Unsupported(
            reason="the auxiliary loss takes a softmax of the router's first output, which here is one already; "
                   "transformers computes none for it",
            instead="set moe_balancing: none", because=("Gemma4TextRouter",),
        ),
        "balancing:bias_update": Unsupported(
            reason="the router has no bias that only the selection sees",
            instead="set moe_balancing: none", because=("Gemma4TextRouter",),
        ),
    })
    yield from answers(DENSE, {"balancing:none": CPU})
    yield from without_experts(DENSE, "balancing:bias_update", "balancing:aux_loss")


@hookimpl
def halo_attention_backends() -> Iterator[Answer]:
    """Yield the answers about attention."""
    for architecture in (MOE, DENSE):
        yield from answers(architecture, {
            "attention:eager": CPU, "attention:sdpa": CPU,
            "attention:flex_attention": Experimental(note="heads of 512 in full-attention layers are untried with it"),
            # Heads of full-attention layers are 512 wide, and flash kernels take 256: the core has another for those.
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
    both: dict[str, Verdict] = {**dict.fromkeys(works, CPU), "qlora": GPU, "compile": GPU}
    yield from answers(MOE, {
        **both, **dict.fromkeys(("grouped_gemm", "ep", "etp", "fp32_router"), CPU),
        "liger": Experimental(note="liger-kernel names the plain dense model as its target, not the one with experts"),
    })
    yield from answers(DENSE, {**both, "liger": GPU})
    yield from without_experts(DENSE, "grouped_gemm", "ep", "etp", "fp32_router")
