"""Every combination of dtype, bf16 and optim: which weights, which optimizer, how many bytes, or which refusal.

The page about precision has the same table, and is compared with this one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halo_core
from halo_core import registry, runtime
from halo_core.config import read
from halo_core.config.precision import rule_of
from halo_core.errors import Refused
from halo_core.models.build import build_meta
from halo_core.models.sizes import model_of_plan, sizes_of, sizes_of_plan
from halo_core.models.tiny import tiny_config
from halo_core.optim.build import build_optimizer
from halo_core.optim.groups import by_group, by_pattern, log_lines, trained

PAGE = Path(__file__).parents[2] / "docs" / "precision-and-optimizer.md"
FP32, BF16 = "float32", "bfloat16"
AUTO = {"auto, fp32 source": FP32, "auto, bf16 source": BF16}
DTYPES = ("left out", FP32, BF16, *AUTO)
TABLE: dict[tuple[str, bool, str], tuple[str, str, int, int] | str] = {}
"""(dtype, bf16, optim) -> (weights, optimizer class, bytes a parameter without and with accumulation), or the key that
is refused. Bytes: weight, gradient and state."""

for _optim, _name, _in_fp32, _in_bf16 in (
    ("sgd", "SGD", (8, 8), (4, 8)), ("adamw_torch", "AdamW", (16, 16), (8, 12)),
    ("adamw_torch_fused", "AdamW", (16, 16), (8, 12)),
):
    for _dtype in DTYPES:
        _narrow = _dtype in (BF16, "auto, bf16 source")
        TABLE[_dtype, False, _optim] = (BF16 if _narrow else FP32, _name, *(_in_bf16 if _narrow else _in_fp32))
        TABLE[_dtype, True, _optim] = "optim" if _optim == "sgd" else (BF16, "AdamWBF16", 8, 10)
    TABLE[FP32, True, _optim] = "dtype"
for _dtype in DTYPES:
    _masters = (BF16, "AdamWFP32", 16, 18)
    TABLE[_dtype, False, "adamw_fp32"] = _masters if _dtype in (BF16, "auto, bf16 source") else "optim"
    TABLE[_dtype, True, "adamw_fp32"] = "dtype" if _dtype == FP32 else _masters


def source(folder: Path, dtype: str, name: str = "qwen3_moe") -> str:
    """Write a config.json without weights, which is all that a plan reads."""
    architecture = next(a for a in registry.load().architectures() if a.name == name)
    config = {**architecture.spec.tiny, "model_type": architecture.spec.model_types[0], "dtype": dtype,
              "vocab_size": 512}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def keys(tmp_path: Path, dtype: str, bf16: bool, optim: str) -> dict[str, Any]:
    given = {"model_name_or_path": source(tmp_path / "model", AUTO.get(dtype, BF16)), "dataset_name": "rows.jsonl",
             "optim": optim, "output_dir": str(tmp_path / "run")}
    if dtype != "left out":
        given["dtype"] = "auto" if dtype in AUTO else dtype
    return {**given, "bf16": True} if bf16 else given


@pytest.mark.parametrize(("dtype", "bf16", "optim"), TABLE, ids=str)
def test_combination(dtype: str, bf16: bool, optim: str, tmp_path: Path) -> None:
    expected = TABLE[dtype, bf16, optim]
    given = keys(tmp_path, dtype, bf16, optim)
    if isinstance(expected, str):
        with pytest.raises(Refused) as refused:
            halo_core.check(given)
        problem = next(problem for problem in refused.value.problems if problem.key == expected)
        assert "set " in problem.remedy
        return
    weights, optimizer, plain, accumulated = expected
    checked = halo_core.check(given)
    assert runtime.dtype_name(runtime.resolve(checked).dtype) == weights
    assert checked.config.dtype in (weights, "auto")
    model = nn.Linear(4, 4, dtype=getattr(torch, weights))
    assert type(build_optimizer(model, checked.config)).__name__ == optimizer
    for steps, each in ((1, plain), (4, accumulated)):
        config = halo_core.check({**given, "gradient_accumulation_steps": steps}).config
        assert {row.bytes_each for row in trained(model, config)} == {each}
    noted = any("loses every step smaller than half a bf16 step" in note for note in checked.plan.notes)
    assert noted == (weights == BF16 and optimizer in ("SGD", "AdamW"))


def test_the_page_has_this_table() -> None:
    rows = [[cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
            for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    said = {(dtype, bf16, optim): rest for dtype, bf16, optim, *rest in (row for row in rows if len(row) == 6)
            if bf16 in ("true", "false")}
    for (dtype, bf16, optim), expected in TABLE.items():
        shown = "adamw_torch" if optim == "adamw_torch_fused" else optim
        found = said[dtype, str(bf16).lower(), shown]
        if isinstance(expected, str):
            assert found[0].startswith("refused"), (dtype, bf16, optim)
        else:
            weights, optimizer, plain, accumulated = expected
            assert found[:2] == [weights, optimizer]
            assert found[2] == (f"{plain}" if plain == accumulated else f"{plain}; {accumulated}")
    assert len(said) == len(DTYPES) * 2 * 3


@pytest.mark.parametrize(("given", "ways"), [
    ({"bf16": True, "dtype": "float32"}, ("remove this line", "optim: adamw_fp32", "bf16: false")),
    ({"bf16": True, "optim": "sgd"}, ("optim: adamw_torch_fused", "bf16: false")),
    ({"optim": "adamw_fp32"}, ("optim: adamw_torch_fused", "bf16: true")),
])
def test_a_refusal_names_every_way_out_and_each_is_one(given: dict[str, Any], ways: tuple[str, ...]) -> None:
    (problem,) = read(None, given=given).problems
    assert all(way in problem.remedy for way in ways)
    kept = {name: value for name, value in given.items() if name != problem.key}
    for changed in (
        kept, {"bf16": True, "optim": "adamw_fp32"}, {"bf16": False, "dtype": "float32"},
        {"bf16": False, "dtype": "bfloat16", "optim": "sgd"}, {**kept, "optim": "adamw_torch_fused"},
    ):
        assert not read(None, given=changed).problems


def test_bf16_says_no_to_nothing_that_was_not_given() -> None:
    result = read(None, given={"bf16": True})
    assert not result.problems and not any("dtype" in note for note in result.notes)
    assert rule_of(result.config.optim, result.config.bf16) == "stochastic"


def test_nearest_rounding_loses_what_the_note_says() -> None:
    for optimizer, kept in ((torch.optim.SGD, False), (None, True)):
        weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        if optimizer is not None:
            one = optimizer([weight], lr=1e-4)
        else:
            config = read(None, given={"bf16": True, "learning_rate": 1e-4}).config
            holder = nn.Module()
            holder.weight = weight
            one = build_optimizer(holder, config)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            one.step()
        assert (weight.float().mean().item() < 0.995) == kept
    with torch.no_grad():
        for value in (1.0, 1.5, 1.99):
            held = torch.tensor(value, dtype=torch.bfloat16)
            assert float(held - held / 1024) == float(held) and float(held - held / 128) < float(held)


@pytest.mark.parametrize(("dtype", "bf16", "optim", "step", "state"), [
    ("bfloat16", True, "adamw_torch", "exact fp32", 8), ("bfloat16", False, "adamw_torch", "torch", 8),
    ("bfloat16", False, "adamw_fp32", "exact fp32", 8), ("bfloat16", False, "sgd", "torch", 0),
    ("float32", False, "adamw_torch", "torch", 8),
])
def test_an_fp32_router_among_other_weights_takes_the_exact_rule(
    dtype: str, bf16: bool, optim: str, step: str, state: int, tmp_path: Path
) -> None:
    checked = halo_core.check({**keys(tmp_path, dtype, bf16, optim), "fp32_router": True,
                               "gradient_accumulation_steps": 2})
    model = model_of_plan(checked)
    rows = trained(model, checked.config)
    routers = [row for row in rows if ".mlp.gate.weight" in row.name]
    assert len(routers) == 3 and {(row.dtype, row.step, row.state, row.sums) for row in routers} == {
        (torch.float32, step, state, 0)}
    others = {row.dtype for row in rows if row not in routers}
    assert others == {getattr(torch, dtype)}
    notes = [note for note in checked.plan.notes if "fp32_router: true changes nothing" in note]
    assert len(notes) == (dtype == "float32")
    sizes = sizes_of_plan(checked)
    assert sizes.optimizer_bytes == sum(row.elements * row.state for row in rows)
    assert sizes.gradient_bytes + sizes.sum_bytes == sum(row.elements * (row.gradient + row.sums) for row in rows)
    lines = log_lines(rows)
    assert sum("3 tensors" in line and "fp32" in line for line in lines) == (dtype == "bfloat16")
    assert sum(int(line.split(" elements")[0].split()[-1].replace(",", "")) for line in lines) == sizes.trainable
    assert sum(row.tensors for row in by_group(rows)) == sum(row.tensors for row in by_pattern(rows)) == len(rows)


def test_sizes_count_fp32_sums_in_place_of_gradients_only_where_nobody_needs_both() -> None:
    model = nn.Linear(10, 10, dtype=torch.bfloat16)
    found = {}
    for optim, bf16 in (("adamw_torch", True), ("adamw_torch", False), ("adamw_fp32", False)):
        sizes = sizes_of(model, optim=optim, bf16=bf16, gradient_accumulation_steps=4)
        found[optim, bf16] = (sizes.gradient_bytes, sizes.sum_bytes, sizes.optimizer_bytes)
    assert found == {("adamw_torch", True): (0, 440, 440), ("adamw_torch", False): (220, 440, 440),
                     ("adamw_fp32", False): (0, 440, 1320)}
    narrow = sizes_of(model, optim="adamw_torch", bf16=True, gradient_accumulation_steps=4,
                      grad_accumulation_dtype="bfloat16")
    assert (narrow.gradient_bytes, narrow.sum_bytes) == (220, 0)


@pytest.mark.parametrize("given", [
    {"fp32_grad_reduce": True}, {"grad_accumulation_dtype": "bf16", "gradient_accumulation_steps": 2},
])
def test_keys_about_narrow_gradients_say_that_fp32_weights_have_none(given: dict[str, Any], tmp_path: Path) -> None:
    (key, _), *_ = given.items()
    for dtype, count in ((FP32, 1), (BF16, 0)):
        notes = halo_core.check({**keys(tmp_path, dtype, False, "adamw_torch"), **given}).plan.notes
        assert sum(note.startswith(key) and "changes nothing" in note for note in notes) == count


def test_a_meta_model_of_every_architecture_has_a_table() -> None:
    for architecture in registry.load().architectures():
        model = build_meta(architecture, tiny_config(architecture).to_dict(), dtype=torch.bfloat16)
        config = read(None, given={"bf16": True}).config
        rows = by_group(trained(model, config))
        assert sum(row.elements for row in rows) == sum(parameter.numel() for parameter in model.parameters())
