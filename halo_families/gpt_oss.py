"""GPT-OSS (MoE only): what it is and what works with it, as facts.

Not for mechanisms: the core has those. Its attention carries a learned sink per head, its experts store gate and up
interleaved, with biases, and its router takes the softmax over the chosen experts alone.
"""

from __future__ import annotations

from collections.abc import Iterator

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
)
from halo_core.hookspecs import hookimpl
from halo_core.verdict import Supported, Unsupported

MOE = "gpt_oss"
CPU, GPU = Supported(proof="cpu"), Supported(proof="gpu")


@hookimpl
def halo_families() -> Iterator[FamilySpec]:
    """Yield the family with its one architecture."""
    moe = ArchitectureSpec(
        name=MOE, model_types=("gpt_oss",), is_moe=True, head=HeadSpec(softcap=None),
        names=ConfigNames(
            hidden_size=("hidden_size",), num_layers=("num_hidden_layers",), num_heads=("num_attention_heads",),
            num_kv_heads=("num_key_value_heads",), vocab_size=("vocab_size",),
            num_experts=("num_local_experts", "num_experts"), experts_per_token=("num_experts_per_tok",),
            expert_width=("intermediate_size",),
        ),
        model_class="transformers:GptOssForCausalLM", config_class="transformers:GptOssConfig",
        decoder_layer="GptOssDecoderLayer", source="transformers 5.24, models/gpt_oss",
        tiny={"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
              "head_dim": 16, "sliding_window": 16, "intermediate_size": 64, "num_local_experts": 8,
              "num_experts_per_tok": 2},
    )
    yield FamilySpec(
        name="gpt_oss", contract=1, architectures=(moe,), transformers=">=5.24,<5.25", aliases=("gptoss",),
        source="hub organisation openai",
        published=(
            PublishedModel(hub_id="openai/gpt-oss-20b", architecture=MOE,
                           config="halo_families:configs/gpt-oss-20b.json"),
        ),
    )


@hookimpl
def halo_moe_blocks() -> Iterator[MoEBlockSpec]:
    """Yield where the routed experts sit."""
    yield MoEBlockSpec(
        architecture=MOE, experts="mlp.experts", experts_class="GptOssExperts", router="mlp.router",
        router_spec=RouterSpec(router_class="GptOssTopKRouter", score="softmax_of_topk", first_output="logits",
                               weights_sum_to_one=True),
        layout=ExpertLayout(is_transposed=True, is_concatenated=False, has_bias=True, has_gate=True,
                            activation="(up + 1) * gate * sigmoid(1.702 * gate); gate at most 7, up within -7 and 7"),
        # A bf16 checkpoint holds the first four; an MXFP4 one holds blocks and scales in place of the two matrices.
        hub_keys=("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj",
                  "mlp.experts.down_proj_bias", "mlp.experts.gate_up_proj_blocks", "mlp.experts.gate_up_proj_scales",
                  "mlp.experts.down_proj_blocks", "mlp.experts.down_proj_scales"),
    )


@hookimpl
def halo_balancing_modes() -> Iterator[Answer]:
    """Yield the answers about load balancing."""
    yield from answers(MOE, {
        "balancing:none": CPU, "balancing:aux_loss": CPU,
        "balancing:bias_update": Unsupported(
            reason="the router's bias is a trained weight that also changes the routing weights; there is none that "
                   "only the selection sees",
            instead="set moe_balancing: aux_loss or none", because=("GptOssTopKRouter",),
        ),
    })


@hookimpl
def halo_attention_backends() -> Iterator[Answer]:
    """Yield the answers about attention."""
    yield from answers(MOE, {
        "attention:eager": CPU, "attention:flex_attention": GPU, "attention:flash_attention_2": GPU,
        "attention:sdpa": Unsupported(
            reason="every head has a learned sink in its softmax, torch's scaled dot product attention has no place "
                   "for it, and transformers refuses the pair",
            instead="leave attn_implementation out, or set it to eager or flash_attention_2",
            because=("GptOssAttention",),
        ),
    })


@hookimpl
def halo_context_parallel() -> Iterator[Answer]:
    """Yield the answers about context parallelism."""
    yield from answers(MOE, {"cp:ulysses": CPU})


@hookimpl
def halo_features() -> Iterator[Answer]:
    """Yield the answers about everything else."""
    works = ("sft", "gradient_checkpointing", "fsdp", "packing", "padding_free", "lora", "bf16", "lowp")
    yield from answers(MOE, {
        **dict.fromkeys((*works, "grouped_gemm", "ep", "etp", "fp32_router"), CPU),
        **dict.fromkeys(("qlora", "compile", "liger"), GPU),
    })
