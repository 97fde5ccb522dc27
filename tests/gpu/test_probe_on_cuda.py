"""The start-up probe on a CUDA device: every architecture passes under each attention, and leaks are found in bf16.

Not for numbers of packed documents: see `test_packing_on_cuda.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from halo_core import config as configuration
from halo_core import plan, runtime
from halo_core import registry as facts
from halo_core.models.build import build_meta
from halo_core.models.hidden import last_hidden
from halo_core.models.load import load_weights
from halo_core.models.tiny import write_tiny
from halo_core.testing.cases import shake
from halo_core.trainer import probe
from tests.leaking import LEAKS, breaks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

REGISTRY = facts.load()
ARCHITECTURES = {architecture.name: architecture for architecture in REGISTRY.architectures()}


def model_of(architecture: Any, folder: Path, attention: str, dtype: str, *, resolved_mixers: bool = True) -> Any:
    """Return the architecture's shaken tiny model on the device, with what the plan resolves to there attached."""
    if not (folder / "config.json").exists():
        write_tiny(architecture, folder)
        shake(folder)
    given = {
        "model_name_or_path": str(folder), "dataset_name": "rows.jsonl", "output_dir": str(folder / "run"),
        "attn_implementation": attention, "dtype": dtype, "gradient_checkpointing": False,
    }  # fmt: skip
    checked = plan.build(configuration.read(None, given=given), REGISTRY)
    resolved = runtime.resolve(checked)
    model = build_meta(
        architecture, checked.model_config, dtype=resolved.dtype, attention=resolved.attention,
        attention_kernel=resolved.attention_kernel, experts=resolved.experts_kernel,
        mixer_kernels=resolved.mixer_kernels if resolved_mixers else None,
    )  # fmt: skip
    load_weights(model, folder, architecture, device=resolved.device)
    return model.eval()


def find(model: Any, architecture: Any) -> probe.Leak | None:
    return probe.find_leak(
        model, architecture, last_hidden, device=torch.device("cuda"), packs=True, flattens=True
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "flash_attention_2"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_architecture_leaks(name: str, attention: str, dtype: str, tmp_path: Path) -> None:
    word = ARCHITECTURES[name].cell(f"attention:{attention}").word
    if word not in ("Supported", "declared") or (attention == "flash_attention_2" and dtype == "float32"):
        pytest.skip(f"attention {attention} in {dtype} is not offered for it: {word}")
    assert find(model_of(ARCHITECTURES[name], tmp_path / "model", attention, dtype), ARCHITECTURES[name]) is None


@pytest.mark.parametrize(("name", "way"), LEAKS)
def test_a_leak_is_found_in_bf16(name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = ARCHITECTURES[name]
    model = model_of(architecture, tmp_path / "model", "eager", "bfloat16", resolved_mixers=False)
    breaks(way, model, architecture, monkeypatch)
    leak = find(model, architecture)
    assert leak is not None
    mixing = [path for path, module in model.named_modules() if type(module).__name__ == leak.module]
    assert leak.path == mixing[0]
