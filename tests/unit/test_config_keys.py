"""The keys: defaults against transformers and TRL themselves, features, and what follows from several keys."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from halo_core import support
from halo_core.config import KEYS, RUN_MECHANISMS, RunConfig, active_features, describe, read
from halo_core.config.keys import SCHEDULES
from halo_core.config.read import FOREIGN

ROOT = Path(__file__).parents[2]
OWN_DEFAULTS = {
    "logging_steps": 1,
    "assistant_only_loss": True,
    "completion_only_loss": True,  # TRL's null means the same for rows of prompt and completion
    "bf16": False,
    "report_to": (),
    "output_dir": "trainer_output",
}
"""Where a default differs from TRL's, or is spelt differently."""


@pytest.fixture(scope="module")
def upstream() -> dict[str, object]:
    """Return field -> default of the four configurations that name the same things; the later one wins."""
    from transformers import TrainingArguments
    from trl import ModelConfig, ScriptArguments, SFTConfig

    found: dict[str, object] = {}
    for config_class in (TrainingArguments, SFTConfig, ScriptArguments, ModelConfig):
        for field in dataclasses.fields(config_class):
            made = field.default_factory
            found[field.name] = made() if made is not dataclasses.MISSING else field.default
    return found


def test_defaults_are_those_of_trl_except_the_listed_ones(upstream: dict[str, object]) -> None:
    shared = [name for name in KEYS if name in upstream]
    assert len(shared) > 60
    for name in shared:
        expected = OWN_DEFAULTS.get(name, upstream[name])
        assert KEYS[name].default == expected, name
        if name in OWN_DEFAULTS:
            assert OWN_DEFAULTS[name] != upstream[name], f"{name} is no exception any more"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_balancing", "none"),
        ("expert_parallel_size", 1),
        ("expert_tensor_parallel_size", 1),
        ("context_parallel_size", 1),
        ("data_parallel_replicate_size", 1),
        ("ep_dispatcher", "auto"),
        ("use_grouped_gemm", True),
        ("fsdp_reshard_after_forward", False),
        ("fsdp_reshard_after_backward", True),
        ("fsdp_defer_grad_sync", False),
        ("fp32_router", False),
        ("router_balancing_rate", 0.001),
        ("on_bad_row", "error"),
        ("overlong", "drop"),
        ("learning_rate", 2e-5),
        ("max_length", 1024),
        ("gradient_checkpointing", True),
        ("dtype", "float32"),
    ],
)
def test_our_own_defaults(name: str, value: object) -> None:
    assert getattr(RunConfig(), name) == value


def test_every_field_of_trl_and_transformers_is_taken_at_its_default(upstream: dict[str, object]) -> None:
    for name, default in upstream.items():
        result = read(None, given={name: default})
        assert not result.problems, (name, default, [problem.text() for problem in result.problems])


@pytest.mark.parametrize("value", ["something-else", 7, True, {"a": 1}, ["x"]])
def test_no_field_of_trl_and_transformers_ends_in_a_bare_unknown_key(
    upstream: dict[str, object], value: object
) -> None:
    for name in upstream:
        for problem in read(None, given={name: value}).problems:
            assert "unknown key" not in problem.why, name
            assert problem.why, name
            assert problem.remedy, name


def test_this_check_of_fields_can_fail() -> None:
    (problem,) = read(None, given={"a_field_of_tomorrow": 1}).problems
    assert "unknown key" in problem.why


def test_schedules_are_those_of_transformers_that_need_no_metric() -> None:
    from transformers import SchedulerType

    assert set(SCHEDULES) == {kind.value for kind in SchedulerType} - {"reduce_lr_on_plateau", "greedy"}


def test_every_feature_that_a_key_can_ask_for_has_a_mechanism() -> None:
    known = {mechanism.feature for mechanism in (*support.MECHANISMS, *RUN_MECHANISMS)}
    patterns = [facts.asks.feature.replace("{}", ".*") for facts in KEYS.values() if facts.asks]
    for pattern in patterns:
        assert any(re.fullmatch(pattern, feature) for feature in known), pattern
    reachable = {feature for feature in known if any(re.fullmatch(pattern, feature) for pattern in patterns)}
    assert known - reachable == {"sft"}, "a mechanism that no key can ask for"
    assert len(known) == len(support.MECHANISMS) + len(RUN_MECHANISMS)


def test_mechanisms_that_are_not_built_name_a_way_out() -> None:
    assert all(mechanism.instead for mechanism in RUN_MECHANISMS if not mechanism.built)


def test_defaults_ask_for_nothing_but_what_is_built() -> None:
    asked = {feature for _, _, feature in active_features(RunConfig())}
    assert asked == {"gradient_checkpointing", "grouped_gemm", "dequantize_source"}
    built = {mechanism.feature for mechanism in (*support.MECHANISMS, *RUN_MECHANISMS) if mechanism.built}
    assert asked <= built


@pytest.mark.parametrize(
    ("key", "value", "feature"),
    [
        ("expert_parallel_size", 2, "ep"),
        ("expert_tensor_parallel_size", 2, "etp"),
        ("context_parallel_size", 2, "cp:ulysses"),
        ("data_parallel_replicate_size", 2, "fsdp"),
        ("attn_implementation", "eager", "attention:eager"),
        ("attn_implementation", "sdpa", "attention:sdpa"),
        ("attn_implementation", "flex_attention", "attention:flex_attention"),
        ("attn_implementation", "flash_attention_2", "attention:flash_attention_2"),
        ("attn_implementation", "flash_attention_3", "attention:flash_attention_2"),
        ("attn_implementation", "flash_attention_4", "attention:flash_attention_2"),
        ("attn_implementation", "kernels-community/vllm-flash-attn3", "attention:flash_attention_2"),
        ("attn_implementation", "kernels-community/flash-attn2@main:varlen", "attention:flash_attention_2"),
        ("moe_balancing", "bias_update", "balancing:bias_update"),
        ("moe_balancing", "aux_loss", "balancing:aux_loss"),
        ("packing", True, "packing"),
        ("eval_packing", True, "packing"),
        ("padding_free", True, "padding_free"),
        ("use_peft", True, "lora"),
        ("load_in_4bit", True, "qlora"),
        ("load_in_8bit", True, "qlora"),
        ("use_liger_kernel", True, "liger"),
        ("torch_compile", True, "compile"),
        ("torch_compile_mode", "max-autotune", "compile"),
        ("bf16", True, "bf16"),
        ("fp32_router", True, "fp32_router"),
        ("lowp_precision", "mxfp4", "lowp"),
        ("save_sharded_ep", True, "save_sharded_ep"),
        ("push_to_hub", True, "push_to_hub"),
        ("fsdp_reshard_after_backward", False, "fsdp_reshard_after_backward"),
    ],
)
def test_an_active_value_asks_for_its_feature(key: str, value: object, feature: str) -> None:
    result = read(None, given={key: value})
    assert (key, value, feature) in active_features(result.config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe_balancing", "auto"),
        ("moe_balancing", "none"),
        ("use_grouped_gemm", False),
        ("gradient_checkpointing", False),
        ("lowp_precision", "bf16"),
        ("eval_packing", False),
        ("attn_implementation", None),
    ],
)
def test_an_inert_value_asks_for_nothing(key: str, value: object) -> None:
    assert key not in [asked for asked, _, _ in active_features(read(None, given={key: value}).config)]


@pytest.mark.parametrize("name", ["paged|sdpa", "flash_attn", "kernels-community/sage_attention", "someone/flash-attn"])
def test_attention_that_is_not_exact_or_not_known_is_refused(name: str) -> None:
    (problem,) = read(None, given={"attn_implementation": name}).problems
    assert "flash_attention_2" in problem.remedy


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"warmup_steps": 10}, 10),
        ({"warmup_steps": 0.1}, 0.1),
        ({"warmup_steps": 10.0}, 10),
        ({"save_steps": 0.5}, 0.5),
        ({"learning_rate": 0.0}, 0.0),
        ({"max_steps": -1}, -1),
        ({"num_train_epochs": 0.25}, 0.25),
    ],
)
def test_numbers_at_the_edge_of_their_range(given: dict[str, object], value: object) -> None:
    result = read(None, given=given)
    assert not result.problems
    (key,) = given
    assert getattr(result.config, key) == value
    assert type(getattr(result.config, key)) is type(value)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"router_aux_loss_coef": 0.01}, "router_aux_loss_coef"),
        ({"load_in_4bit": True, "load_in_8bit": True, "use_peft": True}, "load_in_8bit"),
        ({"load_in_4bit": True}, "load_in_4bit"),
        ({"packing": True, "max_length": None}, "max_length"),
    ],
)
def test_keys_that_contradict_each_other_are_a_problem(given: dict[str, object], key: str) -> None:
    (problem,) = read(None, given=given).problems
    assert problem.key == key


def test_an_auxiliary_loss_that_is_asked_for_takes_its_weight() -> None:
    assert not read(None, given={"router_aux_loss_coef": 0.01, "moe_balancing": "aux_loss"}).problems
    assert not read(None, given={"router_aux_loss_coef": 0.0}).problems


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"lora_r": 8}, "while use_peft is false"),
        ({"eval_steps": 5}, "while eval_strategy is no"),
        ({"save_steps": 5, "save_strategy": "epoch"}, "while save_strategy is epoch"),
        ({"warmup_steps": 5, "lr_scheduler_type": "constant"}, "while lr_scheduler_type is constant"),
        ({"adam_beta1": 0.5, "optim": "sgd"}, "while optim is sgd"),
        ({"ep_dispatcher": "deepep"}, "while expert_parallel_size is 1"),
        ({"num_train_epochs": 2, "max_steps": 5}, "max_steps: 5 wins"),
        ({"metric_for_best_model": "loss"}, "load_best_model_at_end"),
        ({"eval_strategy": "steps"}, "every logging_steps: 1"),
    ],
)
def test_a_key_without_effect_is_told_and_not_ignored(given: dict[str, object], word: str) -> None:
    result = read(None, given=given)
    assert not result.problems
    assert any(word in note for note in result.notes), result.notes


def test_a_key_at_its_default_needs_no_note() -> None:
    assert read(None, given={"lora_r": 16, "save_sharded_ep": False, "router_balancing_rate": 0.001}).notes == ()


def test_every_key_is_read_or_asks_for_a_feature() -> None:
    parts = (path for path in (ROOT / "halo_core").rglob("*.py") if "config" not in path.relative_to(ROOT).parts)
    read_names = {name for path in parts for name in re.findall(r"\bconfig\.([a-z_0-9]+)\b", path.read_text())}
    for name, facts in KEYS.items():
        beside = KEYS[facts.idle_while[0]].asks if facts.idle_while else None
        weighs_a_feature = name == "router_aux_loss_coef"  # refused unless moe_balancing: aux_loss asks for one
        assert name in read_names or facts.asks or beside or weighs_a_feature, f"{name} is ignored"


def test_the_reference_page_has_every_key_and_every_foreign_name() -> None:
    page = describe.markdown()
    assert all(f"\n| `{name}` | " in page for name in KEYS)
    assert all(f"`{name}`" in page for name in FOREIGN)


def test_importing_the_configuration_imports_no_torch() -> None:
    code = (
        "import sys, halo_core.config; from halo_core.config import read; read(None, ['seed=1']); "
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "yaml" in loaded
    assert not {"torch", "transformers", "trl", "datasets", "numpy"} & set(loaded)
