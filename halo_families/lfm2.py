"""LFM2 and LFM2.5, MoE and dense: what they are and what works with them, as facts.

Not for mechanisms: the core has those. The line mixes attention layers with short convolutions, routes by sigmoid
scores, and balances its experts by a bias that only the selection sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from halo_core.errors import Problem
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

if TYPE_CHECKING:
    from halo_core.plan import RunPlan

MOE, DENSE = "lfm2_moe", "lfm2"
SHORT_CONV = {MOE: "Lfm2MoeShortConv", DENSE: "Lfm2ShortConv"}
EXPERT_BIAS = "feed_forward.expert_bias"
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
    tiny = {
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    }
    moe = ArchitectureSpec(
        name=MOE, model_types=("lfm2_moe",), is_moe=True, names=replace(sizes, **experts), head=HeadSpec(softcap=None),
        model_class="transformers:Lfm2MoeForCausalLM", config_class="transformers:Lfm2MoeConfig",
        decoder_layer="Lfm2MoeDecoderLayer", source="transformers 5.24, models/lfm2_moe",
        tiny={**tiny, "intermediate_size": 256, "num_dense_layers": 1, "moe_intermediate_size": 64,
              "num_experts": 8, "num_experts_per_tok": 2},
    )
    dense = ArchitectureSpec(
        name=DENSE, model_types=("lfm2",), is_moe=False, names=sizes, head=HeadSpec(softcap=None),
        model_class="transformers:Lfm2ForCausalLM", config_class="transformers:Lfm2Config",
        decoder_layer="Lfm2DecoderLayer", source="transformers 5.24, models/lfm2",
        # The configuration class takes two thirds of this width, rounded up to the given multiple.
        tiny={**tiny, "intermediate_size": 576, "block_multiple_of": 32},
    )
    yield FamilySpec(
        name="lfm2", contract=1, architectures=(moe, dense), transformers=">=5.24,<5.25",
        aliases=("lfm_2", "lfm2_5", "lfm_2_5", "lfm25"), source="hub organisation LiquidAI",
        published=(
            PublishedModel(hub_id="LiquidAI/LFM2-8B-A1B", architecture=MOE,
                           config="halo_families:configs/lfm2-8b-a1b.json"),
            PublishedModel(hub_id="LiquidAI/LFM2.5-8B-A1B", architecture=MOE,
                           config="halo_families:configs/lfm2.5-8b-a1b.json"),
            # Which of the forty layers are attention is not published.
            PublishedModel(hub_id="LiquidAI/LFM2-24B-A2B", architecture=MOE,
                           config="halo_families:configs/lfm2-24b-a2b.json", guessed=("layer_types",)),
        ),
    )


@hookimpl
def halo_moe_blocks() -> Iterator[MoEBlockSpec]:
    """Yield where the routed experts of the MoE architecture sit; its first `num_dense_layers` layers have none."""
    yield MoEBlockSpec(
        architecture=MOE, experts="feed_forward.experts", experts_class="Lfm2MoeExperts", router="feed_forward.gate",
        # Weights are divided by their sum + 1e-6 only with `norm_topk_prob`, then multiplied by a factor.
        router_spec=RouterSpec(router_class="Lfm2MoeTopKRouter", score="sigmoid", first_output="logits",
                               weights_sum_to_one=False, selection_bias=EXPERT_BIAS),
        layout=ExpertLayout(is_transposed=False, is_concatenated=True, has_bias=False, has_gate=True,
                            activation="silu(gate) * up"),
        hub_keys=tuple(f"feed_forward.experts.*.{name}.weight" for name in ("w1", "w3", "w2")),
    )


@hookimpl
def halo_sequence_mixers() -> Iterator[SequenceMixerSpec]:
    """Yield the short convolution of both architectures."""
    for architecture, mixer_class in SHORT_CONV.items():
        yield SequenceMixerSpec(
            architecture=architecture, mixer_class=mixer_class, layer_type="conv", kind="short_conv",
            functions={"causal_conv1d_fn": "short_conv"},
            segments="keyword seq_idx [B, S] int32, honoured only by the causal_conv1d package's kernel",
            border_state="the last conv_L_cache - 1 gated inputs of every channel",
        )


@hookimpl
def halo_balancing_modes() -> Iterator[Answer]:
    """Yield the answers about load balancing."""
    yield from answers(MOE, {
        "balancing:none": CPU,
        "balancing:aux_loss": Unsupported(
            reason="the auxiliary loss is defined on a softmax over the experts, this router scores each by a sigmoid; "
                   "transformers computes none for it",
            instead="set moe_balancing: bias_update, which these models were made with, or none",
            because=("Lfm2MoeTopKRouter",),
        ),
    })
    yield Answer(architecture=MOE, feature="balancing:bias_update", verdict=CPU, facts={"bias": EXPERT_BIAS})
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
    for architecture, mixer_class in SHORT_CONV.items():
        yield from answers(architecture, {"cp:ulysses": Unsupported(
            reason="a short convolution reads across the border between two shards of a sequence, and exchanging "
                   "attention heads does not reach it, until a sequence-mixer exchange exists",
            instead="set context_parallel_size: 1 and lower max_length, or shard the weights over more processes",
            because=(mixer_class,),
        )})


@hookimpl
def halo_features() -> Iterator[Answer]:
    """Yield the answers about everything else."""
    works = ("sft", "gradient_checkpointing", "fsdp", "packing", "padding_free", "lora", "bf16", "lowp")
    both: dict[str, Verdict] = {
        **dict.fromkeys(works, CPU), "qlora": GPU, "compile": GPU,
        "liger": Unsupported(reason="liger-kernel has no kernels for it", instead="set use_liger_kernel: false"),
    }
    yield from answers(MOE, {**both, **dict.fromkeys(("grouped_gemm", "ep", "etp", "fp32_router"), CPU)})
    yield from answers(DENSE, both)
    yield from without_experts(DENSE, "grouped_gemm", "ep", "etp", "fp32_router")


@hookimpl
def halo_check_run(plan: RunPlan, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what this model's own configuration rules out."""
    if "balancing:bias_update" in plan.features and not config.get("use_expert_bias", True):
        yield Problem(
            key="moe_balancing", value="bias_update",
            why="the model's config.json says use_expert_bias: false, so there is no bias to update",
            remedy="set moe_balancing: none",
        )
