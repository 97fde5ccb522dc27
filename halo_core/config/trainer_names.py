"""The names of transformers' TrainingArguments, of TRL's configurations for supervised fine-tuning, and their former
names, as far as they are no keys of Halo.

Not for other tools: `other_names.py`. Source: transformers 5.24 and 4.x, `training_args.py`; TRL 1.16 and older,
`sft_config.py`, `model_config.py`, `scripts/utils.py`.
"""

from __future__ import annotations

from halo_core.config.renamed import Foreign, gone, moot, only, same, table
from halo_core.config.values import Real

_NO_SUCH = "Halo does not have it"
_REMOVE = "remove the line"
_OWN_LOOP = "Halo has its own training loop"
_TRACKER = "set it with the tracker's own environment variables"
_PREPARED = "rows are tokenised before training, and batches are made in the training process"
_DATA_PARALLEL = "Halo shards or replicates the model itself, without DistributedDataParallel"
_SHARDING = "processes beyond one share the weights; fsdp_reshard_after_forward: true frees them after forward"
_HUB = "says where push_to_hub would upload to, and asks for nothing by itself"
_ONLY_LOSS = "an evaluation sums losses and keeps no predictions"
_SCREEN = "it concerns the screen: a terminal gets a progress bar, everything else gets plain lines"
_GENERATION = "generation is no part of training"

RENAMED = table(
    same("dataset_name", "dataset", silent=True),
    same("max_length", "max_seq_length model_max_length"),
    same("dtype", "torch_dtype"),
    same("eval_strategy", "evaluation_strategy"),
    same("warmup_steps", "warmup_ratio", kind=Real(low=0.0, below=1.0)),
    same("gradient_checkpointing", "activation_checkpointing"),
    same("per_device_train_batch_size", "per_gpu_train_batch_size"),
    same("per_device_eval_batch_size", "per_gpu_eval_batch_size"),
    same("use_liger_kernel", "use_liger"),
    same("dataset_train_split", "train_split"),
    same("dataset_test_split", "test_split eval_split"),
    same("dataset_num_proc", "preprocessing_num_workers num_proc"),
)

SETTLED = table(
    # What Halo does anyway, at these values.
    only(
        "steps", "metrics.jsonl has every step, a line is printed every logging_steps",
        "a run always reports by steps", "remove the line and set logging_steps",
        "logging_strategy",
    ),
    only(
        "false", "an output_dir that holds a run is never overwritten",
        "an output_dir that holds a run is never overwritten",
        "give another output_dir, or resume_from_checkpoint: true",
        "overwrite_output_dir",
    ),
    (Foreign(
        name=name, harmless=("{use_reentrant: false}", "{}"), note="recomputation is never reentrant here",
        why="recomputation is never reentrant here, and every decoder layer is recomputed",
        remedy="remove it and set gradient_checkpointing: true",
    ) for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")),
    only(
        "false", "recomputation is never reentrant here", "recomputation is never reentrant here", _REMOVE,
        "gradient_checkpointing_use_reentrant",
    ),
    only(
        "keep_start", "overlong: truncate keeps the start; the default drops the row",
        "Halo keeps the start of a row or drops it", "overlong: truncate, or drop, or error",
        "truncation_mode",
    ),
    only(
        "nll chunked_nll", "the loss is the mean negative log-likelihood of all supervised tokens", _NO_SUCH,
        "loss_type: nll, or remove the line",
        "loss_type",
    ),
    only(
        "text", "rows of text stand in the column text", "Halo reads rows of text from the column text",
        "rename the column to text",
        "dataset_text_field",
    ),
    only(
        "random", "rows are shuffled anew in each epoch, by data_seed", "Halo shuffles rows anew in each epoch",
        _REMOVE,
        "train_sampling_strategy",
    ),
    only("false", "rows are not grouped by length", "Halo does not group rows by length", _REMOVE, "group_by_length"),
    only(
        "true", "the loss is the mean over the supervised tokens of the whole global batch",
        "the loss is always the mean over the supervised tokens of the whole global batch", _REMOVE,
        "average_tokens_across_devices",
    ),
    only(
        "causal_lm", "language models are what Halo trains", "Halo trains language models only", _REMOVE,
        "lora_task_type",
    ),
    only(
        "true", "weights are always written as safetensors", "weights are written as safetensors only", _REMOVE,
        "save_safetensors",
    ),
    only("auto 1", "rows are padded to the longest of their batch", _NO_SUCH, _REMOVE, "pad_to_multiple_of"),
    only("inductor", "torch.compile uses inductor", _NO_SUCH, "set torch_compile: true", "torch_compile_backend"),
    only(
        "nccl gloo", "the backend follows the device", "the backend follows the device: nccl or gloo", _REMOVE,
        "ddp_backend",
    ),
    only("-1 0", "processes are started by --nproc", "processes are started by --nproc", _REMOVE, "local_rank"),
    only(
        "huggingface", "trackers choose their own project", "Halo does not name a tracker's project", _TRACKER,
        "project",
    ),
    # What changes no result.
    moot("rows are shuffled anew in each epoch, by data_seed", "shuffle_dataset"),
    moot(
        _PREPARED,
        "dataset_batch_size dataloader_num_workers dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context "
        "dataloader_in_order",
    ),
    moot("Halo reads the columns of a row's kind and no others", "remove_unused_columns"),
    moot("evaluation follows eval_strategy", "do_eval"),
    moot("training is what `halo train` does", "do_train"),
    moot(
        _ONLY_LOSS,
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
        "batch_eval_metrics",
    ),
    moot("metrics.jsonl has every step, the first included", "logging_first_step"),
    moot("nothing is filtered: a loss that is not finite stops the run", "logging_nan_inf_filter"),
    moot("metrics.jsonl has the tokens of every step", "include_num_input_tokens_seen include_tokens_per_second"),
    moot(_SCREEN, "disable_tqdm log_level log_level_replica log_on_each_node"),
    moot("SIGTERM always saves before the run ends", "enable_jit_checkpoint"),
    moot("lengths are not read from a column", "length_column_name"),
    moot("memory is not measured by this key", "skip_memory_metrics"),
    moot(_HUB, "hub_model_id hub_strategy hub_private_repo hub_always_push hub_revision"),
    moot(
        _DATA_PARALLEL,
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_timeout "
        "ignore_bias_buffers",
    ),
)

REFUSED = table(
    only(
        "false", "", "float16 needs scaled losses, which Halo does not have",
        "dtype: bfloat16 (weights and compute in bf16)",
        "fp16",
    ),
    only(
        "false", "an evaluation runs in the dtype of training", "an evaluation runs in the dtype of training",
        "remove the line, and set dtype",
        "bf16_full_eval fp16_full_eval",
    ),
    only("false", "torch's own setting, exact fp32, stays", "Halo leaves torch's setting, exact fp32", _REMOVE, "tf32"),
    only(
        "false", "", "Halo keeps activations on the device", "set gradient_checkpointing: true",
        "activation_offloading",
    ),
    only(
        "false", "", "the batch size is part of the result, and Halo does not search for one",
        "set per_device_train_batch_size and gradient_accumulation_steps",
        "auto_find_batch_size",
    ),
    only("0", "", _NO_SUCH, _REMOVE, "label_smoothing_factor neftune_noise_alpha eval_delay"),
    only(
        "false", "", _NO_SUCH, _REMOVE,
        "eval_on_start full_determinism restore_callback_states_from_checkpoint use_cache "
        "include_inputs_for_metrics skip_prepare_dataset",
    ),
    only(
        "false", "a resumed run goes on with the rows that come next",
        "a resumed run goes on with the rows that come next", _REMOVE,
        "ignore_data_skip",
    ),
    only(
        "false", "a short last step of an epoch is kept", "a short last step of an epoch is kept: no row is lost",
        _REMOVE,
        "dataloader_drop_last",
    ),
    only(
        "false", "checkpoints are points to resume from; the finished model lies in output_dir",
        "checkpoints are points to resume from; the finished model lies in output_dir", _REMOVE,
        "save_only_model",
    ),
    only("false", "", "checkpoints are written once", _REMOVE, "save_on_each_node"),
    only("false", "", "Halo reads whole data sets", _REMOVE, "dataset_streaming streaming"),
    only(
        "false", "the device is a GPU where there is one", "the device is a GPU where there is one",
        "hide the GPUs: CUDA_VISIBLE_DEVICES= halo train ...",
        "use_cpu no_cuda",
    ),
    only("false", "", "Halo runs on CUDA and on CPU", _REMOVE, "use_mps_device use_ipex jit_mode_eval"),
    only("false", "", "prediction is no part of training", "halo sample DIR \"prompt\"", "do_predict"),
    only("[]", "an evaluation measures the loss", _ONLY_LOSS, _REMOVE, "include_for_metrics"),
    only("[]", "the columns follow from a row's kind", "the columns follow from a row's kind", _REMOVE, "label_names"),
    only(
        "{}", "", "what it holds has keys of its own",
        "model_revision, dtype, attn_implementation, trust_remote_code",
        "model_init_kwargs",
    ),
    only(
        "{}", "", "Halo prepares rows itself", "give rows of messages, prompt and completion, or text",
        "dataset_kwargs",
    ),
    only(
        "{} false [] none", "processes beyond one share the weights", _SHARDING,
        "remove it: --nproc N shards; see also fsdp_reshard_after_forward",
        "fsdp fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap",
    ),
    only("[]", "", _NO_SUCH, _REMOVE, "debug"),
    gone(
        _OWN_LOOP,
        "remove it: --nproc N shards the model; sizes are expert_parallel_size, context_parallel_size, ...",
        "deepspeed accelerator_config parallelism_config",
    ),
    gone(
        "the optimizer takes its settings from keys of their own",
        "adam_beta1, adam_beta2, adam_epsilon, weight_decay",
        "optim_args",
    ),
    gone(
        "every trainable parameter is optimized", "use_peft and lora_target_modules train a part",
        "optim_target_modules",
    ),
    gone(
        "Halo does not empty the allocator's cache",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment",
        "torch_empty_cache_steps",
    ),
    gone(
        "special tokens are the tokenizer's", "set them in the model's tokenizer files",
        "bos_token",
    ),
    gone(
        "a token does not belong in a file that the run copies", "log in with `hf auth login`, or set HF_TOKEN",
        "hub_token push_to_hub_token",
    ),
    gone("Halo does not push to it", _REMOVE, "push_to_hub_model_id push_to_hub_organization"),
    gone(
        "where a tracker keeps its data is the tracker's own setting", _TRACKER,
        "trackio_space_id trackio_bucket_id trackio_static_space_id logging_dir wandb_project wandb_entity "
        "wandb_run_name wandb_name wandb_watch wandb_log_model wandb_mode",
    ),
    gone(
        "a list of data sets has its own key",
        "datasets: [{path: NAME, split: SPLIT, weight: 0.5}, ...]; weight is how often an epoch sees each row",
        "dataset_mixer dataset_mixture dataset_splits dataset_configs",
    ),
    gone("Halo does not split a data set", "give eval_dataset, or dataset_test_split", "test_split_size"),
    gone(
        "a template is a file or comes with a tokenizer",
        "put it into a .jinja file and set chat_template_path: FILE",
        "chat_template chat_template_jinja",
    ),
    gone("environment variables belong to the shell", "NAME=value halo train ...", "env"),
    gone(
        "mixed precision has one form here", "dtype: bfloat16, or bf16: true",
        "fp16_opt_level half_precision_backend fp16_backend bf16_backend",
    ),
    gone(_NO_SUCH, "set optim", "adafactor"),
    gone(
        _NO_SUCH, _REMOVE,
        "tpu_num_cores tpu_metrics_debug past_index ray_scope torchdynamo mp_parameters split_batches "
        "dispatch_batches even_batches use_seedable_sampler num_of_sequences chars_per_token "
        "use_legacy_prediction_loop xpu_backend sortish_sampler",
    ),
    gone(_GENERATION, _REMOVE, "predict_with_generate generation_max_length generation_num_beams generation_config"),
)
