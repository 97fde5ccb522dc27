"""Names from elsewhere: taken with a note where they mean the same, refused with the way out otherwise."""

from __future__ import annotations

import pytest

from halo_core.config import KEYS, read
from halo_core.config.read import FOREIGN


@pytest.mark.parametrize(
    ("old", "value", "key", "read_as"),
    [
        ("max_seq_length", 64, "max_length", 64),
        ("torch_dtype", "torch.bfloat16", "dtype", "bfloat16"),
        ("evaluation_strategy", "epoch", "eval_strategy", "epoch"),
        ("warmup_ratio", 0.1, "warmup_steps", 0.1),
        ("warmup_ratio", 0.0, "warmup_steps", 0),
        ("activation_checkpointing", False, "gradient_checkpointing", False),
        ("micro_batch_size", 2, "per_device_train_batch_size", 2),
        ("num_epochs", 2, "num_train_epochs", 2.0),
        ("sequence_len", 64, "max_length", 64),
        ("base_model", "tiny", "model_name_or_path", "tiny"),
        ("sample_packing", True, "packing", True),
        ("lora_rank", 4, "lora_r", 4),
        ("lr", 1e-4, "learning_rate", 1e-4),
    ],
)
def test_a_renamed_key_is_taken_with_a_note(old: str, value: object, key: str, read_as: object) -> None:
    result = read(None, given={old: value})
    assert not result.problems
    assert getattr(result.config, key) == read_as
    assert key in result.given
    assert any(note.startswith(f"{old} is called {key} here") for note in result.notes)


def test_dataset_is_short_for_dataset_name_and_needs_no_note() -> None:
    result = read(None, given={"dataset": "rows.jsonl"})
    assert result.config.dataset_name == "rows.jsonl"
    assert result.notes == ()


def test_a_list_under_dataset_is_a_list_of_data_sets() -> None:
    for name in ("dataset", "dataset_name"):
        result = read(None, given={name: ["a.jsonl", {"path": "b", "split": "train[:10]"}]})
        assert result.config.dataset_name is None
        assert result.config.datasets == ({"path": "a.jsonl"}, {"path": "b", "split": "train[:10]"})
        assert "datasets" in result.given


def test_rows_for_evaluation_are_one_data_set_or_several() -> None:
    assert read(None, given={"eval_dataset": "a.jsonl"}).config.eval_dataset == "a.jsonl"
    one, several = ({"path": "a", "columns": ["messages"]}, [{"path": "a", "columns": "messages"}, "b"])
    assert read(None, given={"eval_dataset": one}).config.eval_dataset == ({"path": "a", "columns": ("messages",)},)
    assert read(None, given={"eval_dataset": several}).config.eval_dataset == (
        {"path": "a", "columns": ("messages",)},
        {"path": "b"},
    )


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"pth": "a"}, "did you mean path"),
        ({"split": "train"}, "without a path"),
        ({"path": 5, "split": True}, "split"),
        ({"path": "a", "fraction": 0.5}, "another name"),
        ({"path": "a", "weight": 0}, "out of range"),
        (["a"], "not a list"),
        ({"path": "json", "data_files": "a"}, "data_files"),
    ],
)
def test_an_entry_of_datasets_is_checked(entry: object, why: str) -> None:
    (problem,) = read(None, given={"datasets": [entry]}).problems
    assert why in problem.why


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("max_seq_length", "max_length"),
        ("evaluation_strategy", "eval_strategy"),
        ("warmup_ratio", "warmup_steps"),
        ("dataset", "dataset_name"),
        ("torch_dtype", "dtype"),
    ],
)
def test_old_and_new_name_together_are_a_problem_even_when_equal(old: str, new: str) -> None:
    value = {"max_length": 5, "eval_strategy": "no", "warmup_steps": 0.1, "dataset_name": "a", "dtype": "auto"}[new]
    for given in ({old: value, new: value}, {new: value, old: value}):
        (problem,) = read(None, given=given).problems
        assert "is given as well" in problem.why
        assert new in problem.remedy


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"warmup_ratio": 5}, "warmup_ratio"),
        ({"max_seq_length": "x"}, "max_seq_length"),
        ({"torch_dtype": "float16"}, "torch_dtype"),
    ],
)
def test_a_wrong_value_is_told_under_the_name_that_was_typed(given: dict[str, object], key: str) -> None:
    (problem,) = read(None, given=given).problems
    assert problem.key == key


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logging_strategy", "steps"),
        ("overwrite_output_dir", False),
        ("gradient_checkpointing_kwargs", {"use_reentrant": False}),
        ("hub_model_id", "me/model"),
        ("remove_unused_columns", True),
        ("dataloader_num_workers", 4),
        ("fp16", False),
        ("fsdp", ""),
        ("fsdp", []),
        ("deepspeed", None),
        ("label_smoothing_factor", 0.0),
        ("truncation_mode", "keep_start"),
        ("loss_type", "nll"),
        ("dataset_text_field", "text"),
        ("save_safetensors", True),
        ("tf32", None),
        ("model_init_kwargs", {}),
        ("tensor_parallel_size", 1),
        ("do_train", True),
        ("ddp_timeout", 9000),
    ],
)
def test_a_name_that_asks_for_nothing_is_taken_with_a_note(name: str, value: object) -> None:
    result = read(None, given={name: value})
    assert not result.problems
    assert any(note.startswith(f"{name}: ") for note in result.notes)
    assert result.given == frozenset()


@pytest.mark.parametrize(
    ("name", "value", "way_out"),
    [
        ("logging_strategy", "epoch", "logging_steps"),
        ("overwrite_output_dir", True, "resume_from_checkpoint"),
        ("gradient_checkpointing_kwargs", {"use_reentrant": True}, "gradient_checkpointing: true"),
        ("chat_template", "chatml", "chat_template_path"),
        ("dataset_mixer", {"a/b": 1.0}, "datasets"),
        ("fp16", True, "dtype: bfloat16"),
        ("fsdp", "full_shard auto_wrap", "--nproc"),
        ("deepspeed", "zero3.json", "--nproc"),
        ("truncation_mode", "keep_end", "overlong"),
        ("model_init_kwargs", {"torch_dtype": "bfloat16"}, "dtype"),
        ("val_set_size", 0.1, "eval_dataset"),
        ("flash_attention", True, "attn_implementation"),
        ("dataset_ratio", 0.5, "data set"),
        ("ep_scope", "node", "ep_dispatcher"),
        ("ep_buffer_backend", "legacy", "ep_dispatcher"),
        ("hub_token", "hf_x", "HF_TOKEN"),
        ("train_on_inputs", False, "assistant_only_loss"),
        ("num_generations", 8, "remove"),
        ("tensor_parallel_size", 2, "expert_parallel_size"),
    ],
)
def test_a_name_that_asks_for_something_else_is_refused_with_the_way_out(
    name: str, value: object, way_out: str
) -> None:
    (problem,) = read(None, given={name: value}).problems
    assert problem.key == name
    assert way_out in problem.remedy


def test_no_foreign_name_is_a_key_and_every_target_is_one() -> None:
    assert not set(FOREIGN) & set(KEYS)
    for foreign in FOREIGN.values():
        assert foreign.to is None or foreign.to in KEYS, foreign.name
        assert foreign.to or foreign.harmless is None or (foreign.why and foreign.remedy), foreign.name


FORMER = """
    adafactor bf16_full_eval dispatch_batches evaluation_strategy fp16_backend fp16_opt_level
    fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap group_by_length half_precision_backend
    include_inputs_for_metrics include_tokens_per_second jit_mode_eval logging_dir mp_parameters no_cuda
    overwrite_output_dir past_index per_gpu_eval_batch_size per_gpu_train_batch_size push_to_hub_model_id
    push_to_hub_organization push_to_hub_token ray_scope save_safetensors split_batches torchdynamo tpu_metrics_debug
    tpu_num_cores use_ipex use_legacy_prediction_loop use_mps_device warmup_ratio xpu_backend
    chars_per_token dataset_batch_size max_seq_length num_of_sequences use_liger torch_dtype
    gradient_checkpointing_use_reentrant dataset_mixer dataset_splits dataset_configs chat_template
    preprocessing_num_workers truncation_side auto_insert_empty_system_msg model_code_revision base_model_revision
    tokenizer_name_or_path
"""
"""Fields that older releases of transformers, TRL and its handbook had."""


@pytest.mark.parametrize("name", FORMER.split())
def test_a_former_field_is_known_by_name(name: str) -> None:
    assert name in FOREIGN


def test_a_strangers_file_for_trl_reads_without_a_problem() -> None:
    given = {
        "model_name_or_path": "org/model",
        "torch_dtype": "bfloat16",
        "attn_implementation": "flash_attention_2",
        "dataset_name": "org/data",
        "dataset_config": "all",
        "dataset_num_proc": 12,
        "learning_rate": 2.0e-4,
        "num_train_epochs": 1,
        "packing": True,
        "max_seq_length": 4096,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_ratio": 0.03,
        "logging_steps": 5,
        "logging_strategy": "steps",
        "evaluation_strategy": "steps",
        "eval_steps": 100,
        "save_strategy": "epoch",
        "save_total_limit": 1,
        "report_to": ["wandb"],
        "seed": 42,
        "bf16": True,
        "tf32": False,
        "push_to_hub": False,
        "hub_model_id": "me/x",
        "overwrite_output_dir": False,
        "output_dir": "out",
        "remove_unused_columns": True,
        "ddp_timeout": 5400,
        "dataloader_num_workers": 4,
        "use_peft": True,
        "lora_r": 32,
        "lora_alpha": 16,
        "lora_target_modules": "all-linear",
        "log_level": "info",
        "do_eval": True,
        "optim": "adamw_torch",
    }
    result = read(None, given=given)
    assert not result.problems, [problem.text() for problem in result.problems]
    assert result.config.lora_target_modules == ("all-linear",)


@pytest.mark.parametrize("name", ["hub_token", "push_to_hub_token", "hf_token", "wandb_api_key", "HF_TOKEN"])
def test_a_secret_is_refused_without_being_printed(name: str) -> None:
    (problem,) = read(None, [f"{name}=hf_abc"]).problems
    assert problem.key == name and "hf_abc" not in problem.text() and "(not shown)" in problem.text()
