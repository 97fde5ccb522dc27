"""The cells of the support matrix as things to show, and the refusal of those that do not work.

Not for proofs of what works: see `conformance.py`. No torch here: a refusal must come without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from halo_core import config as configuration
from halo_core import plan, support
from halo_core.errors import Problem, Refused
from halo_core.registry import Architecture, Registry
from halo_core.support import Cell
from halo_core.verdict import Supported


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a person types to ask for a feature: configuration keys, and the number of processes."""

    keys: Mapping[str, Any] = field(default_factory=dict)
    nproc: int = 1


ASKS: Mapping[str, Ask] = MappingProxyType(
    {
        "sft": Ask(),
        "gradient_checkpointing": Ask(keys={"gradient_checkpointing": True}),
        "grouped_gemm": Ask(keys={"use_grouped_gemm": True}),
        "attention:eager": Ask(keys={"attn_implementation": "eager"}),
        "attention:sdpa": Ask(keys={"attn_implementation": "sdpa"}),
        "attention:flex_attention": Ask(keys={"attn_implementation": "flex_attention"}),
        "attention:flash_attention_2": Ask(keys={"attn_implementation": "flash_attention_2"}),
        "balancing:none": Ask(keys={"moe_balancing": "none"}),
        "balancing:bias_update": Ask(keys={"moe_balancing": "bias_update"}),
        "balancing:aux_loss": Ask(keys={"moe_balancing": "aux_loss"}),
        "ep": Ask(keys={"expert_parallel_size": 2}, nproc=2),
        "etp": Ask(keys={"expert_tensor_parallel_size": 2}, nproc=2),
        "cp:ulysses": Ask(keys={"context_parallel_size": 2}, nproc=2),
        "fsdp": Ask(nproc=2),
        "packing": Ask(keys={"packing": True}),
        "padding_free": Ask(keys={"padding_free": True}),
        "lora": Ask(keys={"use_peft": True}),
        "qlora": Ask(keys={"use_peft": True, "load_in_4bit": True}),
        "liger": Ask(keys={"use_liger_kernel": True}),
        "compile": Ask(keys={"torch_compile": True}),
        "bf16": Ask(keys={"bf16": True}),
        "fp32_router": Ask(keys={"fp32_router": True}),
        "lowp": Ask(keys={"lowp_precision": "fp8"}),
    }
)
"""How each feature is asked for. A feature that is missing here cannot be shown to refuse, which a test forbids."""


def supported_cells(registry: Registry, *, device: str = "cpu") -> list[Cell]:
    """Return the cells printed Supported whose proof is due on this kind of device ("cpu" or "gpu")."""
    cells = []
    for architecture in registry.architectures():
        for feature in support.FEATURES:
            cell = architecture.cell(feature)
            answer = architecture.answers.get(feature)
            verdict = answer[0].verdict if answer else None
            if cell.word == "Supported" and isinstance(verdict, Supported) and verdict.proof == device:
                cells.append(cell)
    return cells


def unsupported_cells(registry: Registry) -> list[Cell]:
    """Return the cells printed Unsupported: every one must refuse."""
    everything = [a.cell(feature) for a in registry.architectures() for feature in support.FEATURES]
    return [cell for cell in everything if cell.word == "Unsupported"]


def is_familys_no(cell: Cell) -> bool:
    """Return whether the family says no to a feature whose mechanism this core has: a claim that can be tried."""
    return cell.word == "Unsupported" and support.mechanism(cell.feature).built


def smallest_config(architecture: Architecture, feature: str, folder: Path) -> dict[str, Any]:
    """Return the shortest configuration that asks for `feature` on the architecture's tiny model.

    The model's folder, made below `folder`, holds a config.json and nothing else: what is refused without reading
    weights cannot miss them.
    """
    model = folder / architecture.name
    model.mkdir(parents=True, exist_ok=True)
    spec = architecture.spec
    config = {**spec.tiny, "model_type": spec.model_types[0]}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    needed = {
        "model_name_or_path": str(model), "dataset_name": "rows.jsonl", "output_dir": str(folder / "output"),
        # On by default, and each a feature of its own that might refuse first.
        "gradient_checkpointing": False, "use_grouped_gemm": False,
    }
    return {**needed, **ASKS[feature].keys}


def refusal(registry: Registry, architecture: Architecture, feature: str, folder: Path) -> tuple[Problem, ...]:
    """Return the problems with which a run that asks for `feature` on this architecture is refused; none: it is not."""
    given = smallest_config(architecture, feature, folder)
    read = configuration.read(None, given=given, more_words=registry.words())
    try:
        plan.build(read, registry, nproc=ASKS[feature].nproc)
    except Refused as refused:
        return refused.problems
    return ()


def assert_refused(registry: Registry, architecture: Architecture, feature: str, folder: Path) -> None:
    """Check that the cell's word is kept: a run that asks for the feature is refused, with the cell's own reason.

    Raises:
        AssertionError: when the run is let through, or refused with other words, way out or author than the matrix.
    """
    part = architecture.cell(feature).decisive
    problems = refusal(registry, architecture, feature, folder)
    said = [
        problem for problem in problems
        if part.reason in problem.why and problem.remedy == part.instead and problem.by == part.author
    ]
    if not said:
        found = "\n".join(problem.text() for problem in problems) or "nothing: the run would start"
        raise AssertionError(
            f"{architecture.name} {feature}: the matrix says {part.word}, {part.reason!r} (by {part.author}), "
            f"the run was refused with {found}"
        )
    missing = [name for name in part.because if name not in said[0].why]
    assert not missing, f"{architecture.name} {feature}: the refusal does not name {', '.join(missing)}"
