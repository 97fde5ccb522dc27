"""Makes a tiny folder whose experts are stored as MXFP4, by a quantiser of its own. Not for reading one back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from halo_core.models.tiny import write_tiny
from halo_core.testing.cases import shake

NAMES = ("gate_up_proj", "down_proj")
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
STORED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks [E, R, C/32, 16] and scales [E, R, C/32], both uint8, of a weight [E, C, R]."""
    groups = weight.float().transpose(1, 2).contiguous().unflatten(2, (-1, 32))
    largest = groups.abs().amax(dim=-1).clamp(min=2.0**-100)
    exponents = torch.floor(torch.log2(largest)).int() - 2
    scaled = groups * torch.exp2(-exponents.float()).unsqueeze(-1)
    codes = (scaled.unsqueeze(-1) - torch.tensor(VALUES)).abs().argmin(dim=-1).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponents + 127).to(torch.uint8)


def write_packed(architecture: Any, folder: Path, *, files: int = 1, scales_apart: bool = False) -> Path:
    """Write the architecture's tiny model in bf16 with packed experts.

    files: over how many files. scales_apart: every scale lies in the last of them, its blocks do not.
    """
    write_tiny(architecture, folder)
    shake(folder)
    state: dict[str, Tensor] = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        if key.endswith(NAMES):
            state[f"{key}_blocks"], state[f"{key}_scales"] = quantised(tensor)
        else:
            state[key] = tensor.bfloat16()
    write_state(folder, state, files=files, scales_apart=scales_apart)
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": STORED}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def write_state(folder: Path, state: dict[str, Tensor], *, files: int = 1, scales_apart: bool = False) -> None:
    """Write tensors as the folder's weights."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    if files == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return
    placed: dict[str, str] = {}
    for number, key in enumerate(state):
        last = scales_apart and key.endswith("_scales")
        part = files - 1 if last else number % (files - 1 if scales_apart else files)
        placed[key] = f"model-{part + 1:05}-of-{files:05}.safetensors"
    for name in sorted(set(placed.values())):
        save_file({k: t for k, t in state.items() if placed[k] == name}, folder / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
