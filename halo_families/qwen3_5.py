"""Qwen3.5 and Qwen3.6, MoE and dense, text part: what they are and what works with them, as facts.

Not for mechanisms, nor for images: the published checkpoints are multimodal, and these are their language models.
Three layers of four are a gated delta net, whose state runs along the whole sequence.
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
    SequenceMixerSpec,
    answers,
    without_experts,
)
from halo_core.hookspecs import hookimpl
from halo_core.verdict import Supported, Unsupported, Verdict

MOE, DENSE = "qwen3_5_moe", "qwen3_5"
DELTA_NET = {MOE: "Qwen3_5MoeGatedDeltaNet", DENSE: "Qwen3_5GatedDeltaNet"}
PREFIXES = (("model.language_model.", "model."),)
UNTRAINED = (r"^mtp\.", r"^model\.visual\.")
CPU, GPU = Supported(proof="cpu"), Supported(proof="gpu")


@hookimpl
def halo_families() -> Iterator[FamilySpec]:
    """Yield the family with its MoE and its dense architecture."""
    sizes = ConfigNames(
        hidden_size=("hidden_size",), num_layers=("num_hidden_layers",), num_heads=("num_attention_heads",),
        num_kv_heads=("num_key_value_heads",), vocab_size=("vocab_size",),
    )
    experts = {"num_experts": ("num_experts",), "experts_per_token": ("num_experts_per_tok",),
               "expert_width": ("moe_intermediate_size",)}
    # Four layers: by default the fourth is attention, the others are delta nets.
    tiny = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
            "linear_value_head_dim": 32}
    moe = ArchitectureSpec(
        name=MOE, model_types=("qwen3_5_moe_text", "qwen3_5_moe"), text_config="text_config", is_moe=True,
        names=replace(sizes, **experts), head=HeadSpec(softcap=None), source_prefixes=PREFIXES, untrained=UNTRAINED,
        model_class="transformers:Qwen3_5MoeForCausalLM", config_class="transformers:Qwen3_5MoeTextConfig",
        decoder_layer="Qwen3_5MoeDecoderLayer", source="transformers 5.24, models/qwen3_5_moe",
        tiny={**tiny, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 8,
              "num_experts_per_tok": 2},
    )
    dense = ArchitectureSpec(
        name=DENSE, model_types=("qwen3_5_text", "qwen3_5"), text_config="text_config", is_moe=False,
        names=sizes, head=HeadSpec(softcap=None), source_prefixes=PREFIXES, untrained=UNTRAINED,
        model_class="transformers:Qwen3_5ForCausalLM", config_class="transformers:Qwen3_5TextConfig",
        decoder_layer="Qwen3_5DecoderLayer", source="transformers 5.24, models/qwen3_5",
        tiny={**tiny, "intermediate_size": 256},
    )
    yield FamilySpec(
        name="qwen3_5", contract=1, architectures=(moe, dense), transformers=">=5.24,<5.25",
        aliases=("qwen35", "qwen_3_5", "qwen3_6", "qwen36", "qwen_3_6"), source="hub organisation Qwen",
        published=(
            PublishedModel(hub_id="Qwen/Qwen3.5-35B-A3B", architecture=MOE,
                           config="halo_families:configs/qwen3.5-35b-a3b.json"),
        ),
    )


@hookimpl
def halo_moe_blocks() -> Iterator[MoEBlockSpec]:
    """Yield where the routed experts of the MoE architecture sit, beside an always-on gated expert."""
    yield MoEBlockSpec(
        architecture=MOE, experts="mlp.experts", experts_class="Qwen3_5MoeExperts", router="mlp.gate",
        router_spec=RouterSpec(router_class="Qwen3_5MoeTopKRouter", score="softmax", first_output="logits",
                               weights_sum_to_one=True),
        layout=ExpertLayout(is_transposed=False, is_concatenated=True, has_bias=False, has_gate=True,
                            activation="silu(gate) * up"),
        # The published bf16 files fuse all experts; others keep one tensor per expert, as transformers writes them.
        hub_keys=("mlp.experts.gate_up_proj", "mlp.experts.down_proj",
                  *(f"mlp.experts.*.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj"))),
        shared_expert="mlp.shared_expert",
    )


@hookimpl
def halo_sequence_mixers() -> Iterator[SequenceMixerSpec]:
    """Yield the gated delta net of both architectures."""
    for architecture, mixer_class in DELTA_NET.items():
        yield SequenceMixerSpec(
            architecture=architecture, mixer_class=mixer_class, layer_type="linear_attention", kind="delta_rule",
            functions={"causal_conv1d_fn": "short_conv", "torch_chunk_gated_delta_rule": "delta_rule"},
            segments="keywords seq_idx [B, S] int32 (convolution) and cu_seq_lens_q [documents + 1] int32 (delta "
                     "rule), honoured only by the causal_conv1d and flash-linear-attention packages",
            border_state="the last linear_conv_kernel_dim - 1 inputs of every channel, and a matrix "
                         "[linear_key_head_dim, linear_value_head_dim] per value head",
        )


@hookimpl
def halo_balancing_modes() -> Iterator[Answer]:
    """Yield the answers about load balancing."""
    yield from answers(MOE, {
        "balancing:none": CPU, "balancing:aux_loss": CPU,
        "balancing:bias_update": Unsupported(
            reason="the router has no bias that only the selection sees",
            instead="set moe_balancing: aux_loss or none", because=("Qwen3_5MoeTopKRouter",),
        ),
    })
    yield from answers(DENSE, {"balancing:none": CPU})
    yield from without_experts(DENSE, "balancing:bias_update", "balancing:aux_loss")


@hookimpl
def halo_attention_backends() -> Iterator[Answer]:
    """Yield the answers about attention."""
    for architecture in (MOE, DENSE):
        yield from answers(architecture, {
            "attention:eager": CPU, "attention:sdpa": CPU, "attention:flash_attention_2": GPU,
            "attention:flex_attention": Unsupported(
                reason="transformers does not offer flex attention for these models",
                instead="leave attn_implementation out, or set it to sdpa or flash_attention_2",
            ),
        })


@hookimpl
def halo_context_parallel() -> Iterator[Answer]:
    """Yield the answers about context parallelism."""
    for architecture, mixer_class in DELTA_NET.items():
        yield from answers(architecture, {"cp:ulysses": Unsupported(
            reason="a gated delta net hands its state from each token to the next, and exchanging attention heads does "
                   "not reach it, until a sequence-mixer exchange exists",
            instead="set context_parallel_size: 1 and lower max_length, or shard the weights over more processes",
            because=(mixer_class,),
        )})


@hookimpl
def halo_features() -> Iterator[Answer]:
    """Yield the answers about everything else."""
    works = ("sft", "gradient_checkpointing", "fsdp", "packing", "padding_free", "lora", "bf16", "lowp")
    both: dict[str, Verdict] = {**dict.fromkeys(works, CPU), **dict.fromkeys(("qlora", "compile", "liger"), GPU)}
    yield from answers(MOE, {**both, **dict.fromkeys(("grouped_gemm", "ep", "etp", "fp32_router"), CPU)})
    yield from answers(DENSE, both)
    yield from without_experts(DENSE, "grouped_gemm", "ep", "etp", "fp32_router")
