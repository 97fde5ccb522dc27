"""What a dry-run says about parameters: roles, rules, bytes, and each process's share."""

from __future__ import annotations

import pytest

import halo_core
from halo_core import config as configuration
from halo_core import plan, registry
from halo_core.cli.plan_table import parameter_table, print_parameters, print_plan
from halo_core.models.sizes import model_of_plan
from halo_core.optim.groups import by_group, trained

GIVEN = {"model_name_or_path": "tiny", "family": "gpt_oss", "dataset_name": "rows.jsonl", "bf16": True,
         "fp32_router": True, "gradient_accumulation_steps": 2}


def said(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_a_dry_run_lists_roles_with_rule_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(halo_core.check(GIVEN))
    lines = said(capsys)
    assert ["scalar", "no", "bf16", "stochastic", "bfloat16", "4", "32", "2", "0", "4", "4"] in lines
    assert ["bias", "no", "exact", "fp32", "float32", "4", "32", "4", "4", "0", "8"] in lines
    assert ["matrix", "yes", "exact", "fp32", "float32", "4", "4,096", "4", "4", "0", "8"] in lines
    assert not any("model.layers" in word for line in lines for word in line)


def test_every_parameter_is_listed_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    print_parameters(halo_core.check(GIVEN))
    rows = {line[-1]: line for line in said(capsys) if line[-1].startswith(("model.", "lm_head"))}
    assert rows["model.layers.*.mlp.experts.gate_up_proj_bias"][:2] == ["bias", "no"]
    assert rows["model.layers.*.mlp.router.weight"][:4] == ["matrix", "yes", "exact", "fp32"]
    assert len(rows) == 20


@pytest.mark.parametrize(("world", "keys", "weights"), [
    (1, {}, "2.8 MiB"), (4, {"expert_parallel_size": 2}, "2.8 MiB 0.7 MiB on each of 4 processes"),
    (4, {"data_parallel_replicate_size": 2}, "5.7 MiB 1.4 MiB on each of 4 processes"),
])
def test_sizes_are_told_over_all_processes_and_on_each(
    world: int, keys: dict[str, object], weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    read = configuration.read(None, given={**GIVEN, **keys})
    print_plan(plan.build(read, registry.load(), nproc=world, dry_run=True))
    lines = [" ".join(line) for line in said(capsys)]
    assert f"weights {weights}" in lines
    assert any(line.startswith("gradients, summed in fp32 ") for line in lines)


def test_a_table_without_names_has_no_column_for_them() -> None:
    checked = halo_core.check(GIVEN)
    rows = trained(model_of_plan(checked), checked.config)
    assert len(parameter_table(by_group(rows), "x").columns) == 10
    assert len(parameter_table(rows, "x").columns) == 11
