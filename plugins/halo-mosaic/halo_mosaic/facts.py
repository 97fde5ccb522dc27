"""The Mosaic family as facts for Halo: what it is, where its experts are, and an answer for every feature.

Not for torch: Halo asks for facts before it imports torch, so model and block are named here, not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    RouterSpec,
    answers,
)
from halo_core.hookspecs import hookimpl
from halo_core.verdict import Supported, Unsupported

if TYPE_CHECKING:
    import typer

    from halo_core.plan import RunPlan

MOSAIC = "mosaic"
CPU, GPU = Supported(proof="cpu"), Supported(proof="gpu")


@hookimpl
def halo_families() -> Iterator[FamilySpec]:
    """Yield the family with its one architecture."""
    yield FamilySpec(
        name=MOSAIC, contract=1, transformers=">=5.24,<5.25", source="this package, halo_mosaic/model.py",
        architectures=(ArchitectureSpec(
            name=MOSAIC, model_types=("mosaic",), is_moe=True, decoder_layer="MosaicDecoderLayer",
            model_class="halo_mosaic.model:MosaicForCausalLM", config_class="halo_mosaic.model:MosaicConfig",
            names=ConfigNames(
                hidden_size=("hidden_size",), num_layers=("num_hidden_layers",), num_heads=("num_attention_heads",),
                num_kv_heads=("num_key_value_heads",), vocab_size=("vocab_size",), num_experts=("num_tiles",),
                experts_per_token=("tiles_per_token",), expert_width=("tile_width",),
            ),
            head=HeadSpec(softcap=None), source="this package, halo_mosaic/model.py",
            tiny={"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                  "num_tiles": 8, "tiles_per_token": 2, "tile_width": 128},
        ),),
    )


@hookimpl
def halo_moe_blocks() -> Iterator[MoEBlockSpec]:
    """Yield the block: it has no experts module of its own, so the whole block goes through `bind`."""
    yield MoEBlockSpec(
        architecture=MOSAIC, experts="mixture", experts_class="MosaicMixture", wrapper="halo_mosaic.block:bind",
        router="mixture.router",
        router_spec=RouterSpec(router_class="MosaicRouter", score="sigmoid", first_output="logits",
                               weights_sum_to_one=True),
        layout=ExpertLayout(is_transposed=False, is_concatenated=True, has_bias=True, has_gate=False,
                            activation="relu(inner) ** 2"),
        hub_keys=tuple(f"mixture.tiles.*.{part}.{kind}" for part in ("inner", "outer") for kind in ("weight", "bias")),
    )


@hookimpl
def halo_features() -> Iterator[Answer]:
    """Yield an answer for every feature, each as if Halo had the mechanism already."""
    split = Unsupported(
        reason="every expert is a module of its own, there is no tensor over the experts that processes could share",
        instead="set expert_parallel_size and expert_tensor_parallel_size to 1", because=("MosaicTile",),
    )
    yield from answers(MOSAIC, {
        **dict.fromkeys(("sft", "gradient_checkpointing", "grouped_gemm", "balancing:none", "attention:eager",
                         "attention:sdpa", "cp:ulysses", "fsdp", "packing", "padding_free", "lora", "bf16", "lowp",
                         "fp32_router"), CPU),
        **dict.fromkeys(("attention:flash_attention_2", "qlora", "compile"), GPU),
        "ep": split,
        "etp": split,
        "attention:flex_attention": Unsupported(
            reason="the model class does not offer it", instead="set attn_implementation: sdpa"),
        "liger": Unsupported(
            reason="liger-kernel has no kernels for this model", instead="set use_liger_kernel: false"),
        "balancing:bias_update": Unsupported(
            reason="its router has no selection bias", instead="set moe_balancing: none", because=("MosaicRouter",)),
        "balancing:aux_loss": Unsupported(
            reason="the auxiliary loss is defined on a softmax over the experts, this router scores each by a sigmoid",
            instead="set moe_balancing: none", because=("MosaicRouter",)),
    })


@hookimpl
def halo_check_run(plan: RunPlan, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what a model's own configuration rules out."""
    if config.get("tiles_per_token") == 1:
        yield Problem(
            key="model_name_or_path", value=plan.model_name_or_path,
            why="its config.json says tiles_per_token: 1; a single expert's weight is always one, so the router would "
                "get no gradient and stay as it is",
            remedy="a model with two or more tiles per token",
        )


@hookimpl
def halo_add_commands(commands: typer.Typer) -> None:
    """Add `halo mosaic-load`."""
    from halo_mosaic.load import mosaic_load

    commands.command()(mosaic_load)
