"""Names from configurations of other tools and of other methods, so that nobody is left with "unknown key".

Not for transformers' and TRL's names: `trainer_names.py`.
"""

from __future__ import annotations

from halo_core.config.renamed import gone, moot, only, same, table

_NO_SUCH = "Halo does not have it"
_REMOVE = "remove the line"
_BY_NPROC = "processes beyond one share the weights by themselves"
_METHOD = "it belongs to another method than supervised fine-tuning, the one this version has"
_ATTENTION = "attention is chosen by one key"
_ATTENTION_REMEDY = "attn_implementation: sdpa, eager, flex_attention or flash_attention_2; or leave it out"
_SUPERVISION = "what is learnt follows from a row's kind"
_SUPERVISION_REMEDY = "assistant_only_loss for messages, completion_only_loss for prompt and completion"
_ROWS = "Halo reads messages, prompt and completion, or text"
_LOWP = "the format is one key"

RENAMED = table(
    same("model_name_or_path", "base_model model_name model_id model pretrained_model_name_or_path"),
    same("model_revision", "revision"),
    same("max_length", "sequence_len cutoff_len max_sequence_length seq_length"),
    same("per_device_train_batch_size", "micro_batch_size"),
    same("per_device_eval_batch_size", "eval_batch_size"),
    same("gradient_accumulation_steps", "grad_accumulation_steps accumulation_steps"),
    same("num_train_epochs", "num_epochs epochs n_epochs"),
    same("learning_rate", "lr"),
    same("lr_scheduler_type", "lr_scheduler"),
    same("lr_scheduler_kwargs", "lr_scheduler_args"),
    same("optim", "optimizer"),
    same("adam_beta1", "adam_beta_1"),
    same("adam_beta2", "adam_beta_2"),
    same("adam_epsilon", "adam_eps"),
    same("max_grad_norm", "gradient_clipping clip_grad grad_clip"),
    same("packing", "sample_packing"),
    same("dataset_num_proc", "dataset_processes"),
    same("eval_packing", "eval_sample_packing"),
    same("attn_implementation", "flash_attn_implementation"),
    same("lora_r", "lora_rank"),
    same("lora_target_modules", "lora_target"),
    same("lora_modules_to_save", "additional_target"),
    same("expert_parallel_size", "ep_size"),
    same("expert_tensor_parallel_size", "etp_size"),
    same("context_parallel_size", "cp_size"),
    same("data_parallel_replicate_size", "dp_replicate_size"),
    same("ep_dispatcher", "moe_dispatcher"),
    same("router_balancing_rate", "bias_update_rate"),
    same("allow_warm_restart", "allow_optimizer_warm_restart"),
    same("export_text_only", "text_only_model"),
    same("resume_from_checkpoint", "auto_resume_from_checkpoints"),
)

SETTLED = table(
    only("sft", "supervised fine-tuning is what this version trains", _METHOD, _REMOVE, "stage method rl"),
    only("full", "all weights are trained", "adapters have a key of their own", "use_peft: true", "finetuning_type"),
    only(
        "false", "", _NO_SUCH, _REMOVE,
        "streaming_multipack multipack_real_batches strict plot_loss init_from_scratch reset_sinks train_sinks "
        "merge_expert_lora_on_save fp32_experts fp32_non_ep_params fp32_output_conversion pad_to_sequence_len "
        "interleaved_thinking generate_eval_examples log_decoded_samples enable_torch_profiler "
        "profiler_record_memory_snapshot report_mfu_diagnostics unfrozen_parameters_only "
        "early_stopping",
    ),
    only(
        "false", "", "one machine's processes are started by --nproc and share the weights", "remove it: --nproc N",
        "use_fsdp use_deepspeed use_ddp",
    ),
    only("false", "", "whole copies of the sharded model have a key", "data_parallel_replicate_size: N", "use_hsdp"),
    only(
        "1", "", "Halo shares weights by sharding and experts by expert parallelism",
        "expert_parallel_size, expert_tensor_parallel_size, context_parallel_size",
        "tensor_parallel_size tp_size pipeline_parallel_size pp_size",
    ),
    only(
        "false", "", "rows are kept by their contents, so none of them is ever out of date", "dataset_cache: false",
        "overwrite_cache",
    ),
    moot(
        "rows are tokenised once, and kept by their contents for the next start",
        "dataset_prepared_path dataset_keep_in_memory use_fast_tokenizer "
        "use_fast tokenizer_backend shuffle_merged_datasets ep_lazy_loading max_concurrent_loading "
        "low_cpu_mem_usage",
    ),
)

REFUSED = table(
    gone(
        "an attention backend has one name here", _ATTENTION_REMEDY,
        "flash_attention flash_attn use_flash_attention_2 use_flash_attn sdp_attention sdpa_attention "
        "xformers_attention eager_attention flex_attention",
    ),
    gone(
        _SUPERVISION, _SUPERVISION_REMEDY,
        "train_on_inputs train_on_prompt mask_history train_on_completions_only train_on_responses_only "
        "assistant_message_template response_template instruction_template "
        "roles_to_train train_on_eos",
    ),
    gone(
        _ROWS, "make the columns messages, prompt and completion, or text",
        "conversation_field field_messages dataset_format formatting type columns tags prompt_style "
        "prompt_template tools_field images_field text_column messages_column prompt_field completion_field",
    ),
    gone(
        "how often an epoch sees the rows of a set is its weight",
        "give each data set its weight: datasets: [{path: NAME, weight: 0.5}, ...]",
        "dataset_ratio dataset_fraction mix_strategy interleave_probs",
    ),
    gone(
        "a data set is taken whole", "make a data set with the rows you want, or datasets: [{path: NAME, weight: 0.5}]",
        "max_samples max_train_samples max_eval_samples num_eval_examples",
    ),
    gone(
        "Halo does not split a data set", "give eval_dataset, or dataset_test_split",
        "val_set_size val_size test_size test_datasets eval_dataset_size",
    ),
    gone(
        "the chat template decides about it", "put the text into the rows, or set chat_template_path: FILE.jinja",
        "system_prompt default_system_message default_system auto_insert_empty_system_msg "
        "model_supports_system_role force_chat_template template",
    ),
    gone(
        "the tokenizer comes with the model", "set tokens in the model's own tokenizer files",
        "special_tokens tokens added_special_tokens tokenizer_type tokenizer_config tokenizer_name_or_path "
        "tokenizer_name resize_vocab resize_token_embeddings_to_32x truncation_side padding_side",
    ),
    gone(
        "the class follows from the model's config.json", _REMOVE,
        "model_type base_model_config model_code_revision base_model_revision is_moe",
    ),
    gone(
        "adapters and quantised weights have keys of their own", "use_peft: true, lora_r, lora_alpha, load_in_4bit",
        "adapter peft_type lora_model_dir adapter_name_or_path lora_target_linear lora_fan_in_fan_out qlora lora "
        "quantization_bit quantization_method gptq",
    ),
    gone(
        "an interval is counted in steps",
        "eval_strategy: steps with eval_steps, save_strategy: steps with save_steps",
        "evals_per_epoch saves_per_epoch",
    ),
    gone(
        "the batch of one device and the passes of a step have keys",
        "per_device_train_batch_size and gradient_accumulation_steps",
        "batch_size train_batch_size global_batch_size",
    ),
    gone(
        _BY_NPROC, "remove it; the command line has --nproc N",
        "nproc num_processes num_machines nnodes world_size nproc_per_node dp_size data_parallel_size "
        "fsdp_shard_ep1_experts",
    ),
    gone(
        "how tokens travel to their experts is one key", "ep_dispatcher: auto, all_to_all or deepep",
        "ep_scope ep_buffer_backend nvlink_domain_size expert_parallel_backend",
    ),
    gone(
        "bf16 training has one form here", "bf16: true, or dtype: bfloat16",
        "bf16_optimizer mixed_precision precision pure_bf16 bfloat16 float16 amp",
    ),
    gone(
        _LOWP, "lowp_precision: fp8, mxfp8, fp4, mxfp4 or nvfp4",
        "lowp_apply_dense_mlp lowp_apply_moe_experts lowp_keep_first_blocks lowp_keep_last_blocks "
        "quantization_aware_training qat",
    ),
    gone(
        "every weight is trained, or adapters are", "use_peft: true trains adapters",
        "freeze_layers_patterns unfreeze_layers_patterns unfrozen_parameters freeze_trainable_layers "
        "lora_layers_to_transform",
    ),
    gone(
        "where a tracker keeps its data is the tracker's own setting", "set the tracker's own environment variables",
        "project_name mlflow_tracking_uri mlflow_experiment_name comet_project_name trackio_project_name "
        "use_wandb use_tensorboard tracker",
    ),
    gone(
        "a run has no profiler of its own", "start it under a profiler",
        "profiler_output_dir profiler_wait profiler_warmup profiler_active profiler_ranks num_full_model_params "
        "profile_steps",
    ),
    gone(
        "a shard of the exported folder has the size that the source's had", _REMOVE,
        "save_max_shard_size max_shard_size",
    ),
    gone(
        "schedules of transformers keep the rate where it is asked for", "lr_scheduler_type and lr_scheduler_kwargs",
        "cosine_min_lr_ratio min_lr min_lr_rate lr_end cosine_constant_lr_ratio",
    ),
    gone(
        _NO_SUCH, _REMOVE,
        "plugins liger_rope liger_rms_norm liger_glu_activation liger_fused_linear_cross_entropy "
        "gradient_checkpointing_ratio noisy_embedding_alpha early_stopping_patience curriculum_sampling "
        "galore_rank badam_mode loraplus_lr_ratio dataset_dir media_dir image_max_pixels video_max_pixels "
        "pipeline_schedule pipeline_microbatches pipeline_split",
    ),
    gone(
        _METHOD, "remove the line",
        "advantage_method apply_hard_labels beta cache_implementation cast_lm_head_to_fp32 "
        "center_rewards_coefficient chat_template_kwargs delta desirable_weight disable_dropout discopop_tau "
        "distill_alpha distill_loss distill_temperature ds3_gather_for_generation entropy_coef entropy_coef_delta"
        " entropy_coef_max entropy_coef_min entropy_target epsilon epsilon_high f_alpha_divergence_coef "
        "f_divergence_type generation_batch_size generation_kwargs importance_sampling_level kl_beta "
        "label_smoothing ld_alpha log_completions log_completions_hub_repo log_multimodal log_unique_prompts "
        "loss_weights mask_truncated_completions max_completion_length max_prompt_length "
        "max_tool_calling_iterations min_p multi_objective_aggregation normalize_advantages "
        "num_completions_to_print num_generations num_generations_eval num_iterations off_policy_mask_threshold "
        "pooling_mode precompute_ref_batch_size precompute_ref_log_probs ref_model ref_model_mixup_alpha "
        "ref_model_sync_steps reference_model_name_or_path repetition_penalty reward_clip_range reward_funcs "
        "reward_model reward_model_name_or_path reward_weights rewards rpo_alpha sapo_temperature_neg "
        "sapo_temperature_pos save_completions scale_rewards steps_per_generation sync_ref_model target_margin "
        "teacher_model teacher_model_init_kwargs teacher_model_name_or_path teacher_model_revision temperature "
        "top_entropy_quantile top_k top_p transformers_continuous_batching_config trl undesirable_weight "
        "use_adaptive_entropy use_bias_correction_kl use_clm_loss use_transformers_continuous_batching "
        "use_transformers_paged use_vllm use_weighting vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos "
        "vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_importance_sampling_cap "
        "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_correction "
        "vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url "
        "vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex "
        "vllm_tensor_parallel_size",
    ),
)
