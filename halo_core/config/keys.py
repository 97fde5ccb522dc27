"""Every key of a run: its default, what it means, who reads it, and which feature it asks for.

Not for reading files (`read.py`), nor for names that come from elsewhere (`renamed.py`). Names and defaults are those
of transformers' TrainingArguments and of TRL's SFTConfig, ScriptArguments and ModelConfig where the thing is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from halo_core.config.containers import DatasetList, FlagOrText, Many, NullIs, Optional, Table
from halo_core.config.facts import Asks, facts_of, key
from halo_core.config.values import CountOrRatio, Flag, Real, Text, Whole, Word

_LARGEST_SEED = 2**32 - 1
_BOOLEAN, _TEXT, _TEXTS = Flag(), Text(), Many(kind=Text())
_SIZE = Whole(low=1)

SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
)
_REACTS = ("it changes the rate by an evaluation, so a resumed run could not repeat it", "cosine, or linear")
_SCHEDULE = Word(choices=SCHEDULES, refused={"reduce_lr_on_plateau": _REACTS, "greedy": _REACTS})

_NO_FLOAT16 = ("float16 needs scaled losses, which Halo does not have", "dtype: bfloat16, or float32")
_DTYPE = Word(
    choices=("float32", "bfloat16", "auto"),
    aliases={"fp32": "float32", "bf16": "bfloat16", "torch.float32": "float32", "torch.bfloat16": "bfloat16"},
    refused=dict.fromkeys(("float16", "fp16", "half", "torch.float16"), _NO_FLOAT16),
)
_BY_BF16 = ("bf16 moments and stochastic rounding come with bf16: true", "adamw_torch_fused, and bf16: true")
_OPTIM = Word(
    choices=("sgd", "adamw_torch", "adamw_torch_fused", "adamw_fp32"),
    refused=dict.fromkeys(("adamw_bf16", "bf16_optimizer"), _BY_BF16),
)
_SUMS = Word(choices=("float32", "bfloat16"), aliases=_DTYPE.aliases)
_ATTENTION = Word(
    choices=("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"),
    pattern=r"kernels-community/[\w.-]*flash[\w.-]*(@[\w.-]+)?(:[\w.-]+)?",
    pattern_words="kernels-community/NAME of a flash attention kernel",
)
_EXACT = {"eager": "eager", "sdpa": "sdpa", "flex_attention": "flex_attention", ...: "flash_attention_2"}
_NOT_A_TRACKER = ("Halo has no link to it", "tensorboard, wandb, trackio or none; metrics.jsonl is always written")
_TRACKERS = Many(
    kind=Word(
        choices=("tensorboard", "wandb", "trackio"),
        refused={
            "all": ("which trackers that means depends on what is installed", "name them: [tensorboard, wandb]"),
            **dict.fromkeys(("azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "mlflow",
                             "neptune", "swanlab"), _NOT_A_TRACKER),
        },
    ),
    nothing="none", nothing_aliases=("no",),
)
_NO_AS_NONE = {"none": "no"}
_SGD = ("optim", ("sgd",))
_CONSTANT = ("lr_scheduler_type", ("constant",))
_PACKING = Word(choices=("bfd", "bfd_split", "wrapped"), aliases={"bfd-requeue": "bfd_split"})
_FILE_AS_PATH = ("Halo chooses the reader by the file's name", "give the file or folder itself as path")
_DATASETS = DatasetList(
    fields={
        "path": _TEXT, "name": _TEXT, "config": _TEXT, "split": _TEXT, "columns": _TEXTS, "weight": Real(above=0.0),
    },
    refused={
        "data_files": _FILE_AS_PATH, "data_dir": _FILE_AS_PATH,
        "fraction": ("the part of its rows that an epoch sees has another name here", "write weight: 0.5"),
    },
)
_EVALUATED = dataclasses.replace(
    _DATASETS,
    may_be_one=True,
    fields={name: kind for name, kind in _DATASETS.fields.items() if name != "weight"},
    refused={**_DATASETS.refused, **dict.fromkeys(
        ("weight", "fraction"), ("evaluation sees every row of a set exactly once", "leave it out"))},
)

_model = partial(key, area="Model")
_data = partial(key, area="Data")
_loop = partial(key, area="Training", reader="trainer")
_optim = partial(key, area="Optimizer and schedule", reader="optim")
_speed = partial(key, area="Precision and kernels")
_events = partial(key, area="Logging, evaluation, saving", reader="trainer")
_parallel = partial(key, area="Parallelism", reader="plan")
_experts = partial(key, area="Experts")
_lora = partial(key, area="Adapters and quantised weights", reader="plan", idle_while=("use_peft", (False,)))
_allow = partial(key, area="Permissions", reader="plan")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of one run, every key with a value. Lists are tuples; nothing here changes after reading."""

    # Model
    model_name_or_path: str | None = _model(
        None, Optional(kind=_TEXT), reader="plan",
        meaning="folder or hub id to start from; `tiny` or `tiny-dense` is the family's small random model")
    model_revision: str = _model("main", _TEXT, "branch, tag or commit of a hub id", reader="plan")
    family: str | None = _model(
        None, Optional(kind=_TEXT), "the model family; read from the model when left out", reader="plan")
    dtype: str = _model("float32", _DTYPE, "dtype of weights and compute; `auto` is the source's", reader="models")
    trust_remote_code: bool = _model(
        False, _BOOLEAN, "run Python code that the tokenizer's repository brings", reader="trainer",
        asks=Asks(feature="trust_remote_code", inert=(False,)))
    attn_implementation: str | None = _model(
        None, Optional(kind=_ATTENTION), reader="plan",
        meaning="attention by its mathematics: any flash name runs an exact flash kernel; null chooses",
        asks=Asks(feature="attention:{}", inert=(None,), also=_EXACT))
    chat_template_path: str | None = _model(
        None, Optional(kind=_TEXT), "a .jinja file, or a tokenizer's folder or hub id, instead of the model's template",
        reader="data")
    eos_token: str | None = _model(
        None, Optional(kind=_TEXT), "end of a turn or row, a token of the tokenizer; null: the tokenizer's",
        reader="trainer", asks=Asks(feature="special_tokens", inert=(None,)))
    pad_token: str | None = _model(
        None, Optional(kind=_TEXT), "padding, a token of the tokenizer; null: the tokenizer's",
        reader="trainer", asks=Asks(feature="special_tokens", inert=(None,)))
    dequantize_source: bool = _model(
        True, _BOOLEAN, "read a quantised checkpoint as bf16; false: refuse one", reader="models",
        asks=Asks(feature="dequantize_source", inert=(False,)))
    export_text_only: bool = _model(
        False, _BOOLEAN, "write the text model alone where the source is multimodal", reader="checkpoint",
        asks=Asks(feature="export_text_only", inert=(False,)))

    # Data
    dataset_name: str | None = _data(
        None, Optional(kind=_TEXT), reader="data",
        meaning="a .jsonl, .json, .parquet or .csv file, a folder of such files, of `save_to_disk` or of "
        "`halo data prepare`, or a hub id (`dataset` for short)")
    dataset_config: str | None = _data(None, Optional(kind=_TEXT), "configuration of a hub data set", reader="data")
    dataset_train_split: str = _data("train", _TEXT, "split to train on", reader="data")
    dataset_test_split: str = _data("test", _TEXT, "split to evaluate on", reader="data")
    datasets: tuple[Mapping[str, Any], ...] | None = _data(
        None, Optional(kind=_DATASETS), reader="data",
        meaning="several data sets instead of dataset_name; `weight` is how often an epoch sees each row of one")
    eval_dataset: str | tuple[Mapping[str, Any], ...] | None = _data(
        None, Optional(kind=_EVALUATED), "rows of their own to evaluate on", reader="data")
    dataset_num_proc: int | None = _data(
        None, Optional(kind=_SIZE), "processes that render and tokenise rows; null: this one alone", reader="data",
        unit="processes")
    dataset_cache: bool = _data(
        True, _BOOLEAN, "keep tokenised rows of files in $HALO_CACHE (~/.cache/halo) for the next start",
        reader="data")
    max_length: int | None = _data(
        1024, Optional(kind=Whole(low=2)), "longest row; what is longer follows `overlong`; null sets no limit",
        reader="data", unit="tokens")
    overlong: str = _data(
        "drop", Word(choices=("drop", "truncate", "error")), "what happens to rows longer than max_length",
        reader="data")
    on_bad_row: str = _data(
        "error", Word(choices=("error", "skip")), "what happens to rows that cannot be used", reader="data")
    assistant_only_loss: bool = _data(
        True, _BOOLEAN, "learn only what the assistant says, in `messages` rows", reader="data")
    train_on_last_assistant_only: bool = _data(
        False, _BOOLEAN, "learn only the last message of the assistant of each row", reader="data")
    completion_only_loss: bool = _data(
        True, NullIs(kind=_BOOLEAN, value=True), "learn only the completion, in `prompt` and `completion` rows",
        reader="data")
    packing: bool = _data(
        False, _BOOLEAN, "put several rows into one sequence of at most max_length, each on its own", reader="data",
        asks=Asks(feature="packing", inert=(False,)))
    packing_strategy: str = _data(
        "bfd", _PACKING,
        "which rows share a sequence: `bfd` whole rows, best fit first; `bfd_split` cuts those longer than max_length; "
        "`wrapped` cuts wherever a sequence is full", reader="data")
    eval_packing: bool | None = _data(
        None, Optional(kind=_BOOLEAN), "pack the evaluation rows; null: as `packing`", reader="data",
        asks=Asks(feature="packing", inert=(None, False)))
    padding_free: bool = _data(
        False, _BOOLEAN, "flatten a batch to one row of its real tokens", reader="data",
        asks=Asks(feature="padding_free", inert=(False,)))

    # Training
    output_dir: str = _loop(
        "trainer_output", NullIs(kind=_TEXT, value="trainer_output"),
        "the finished model, the log and the checkpoints; must not hold another run")
    run_name: str | None = _loop(None, Optional(kind=_TEXT), "name of the run for trackers; null: the folder's name")
    per_device_train_batch_size: int = _loop(8, _SIZE, "rows of one forward pass on one device", unit="rows")
    per_device_eval_batch_size: int = _loop(8, _SIZE, "the same for evaluation", unit="rows")
    gradient_accumulation_steps: int = _loop(1, _SIZE, "forward passes of one optimizer step", unit="passes")
    num_train_epochs: float = _loop(3.0, Real(above=0.0), "passes over the data, parts of one included", unit="epochs")
    max_steps: int = _loop(
        -1, Whole(low=1, also=(-1,)), "optimizer steps; wins over num_train_epochs; -1: by epochs", unit="steps")
    seed: int = _loop(42, Whole(low=0, high=_LARGEST_SEED), "seed of everything random")
    data_seed: int | None = _loop(
        None, Optional(kind=Whole(low=0, high=_LARGEST_SEED)), "seed of the order of rows; null: `seed`")
    gradient_checkpointing: bool = _loop(
        True, NullIs(kind=_BOOLEAN, value=True),
        "recompute activations in backward: less memory, about a third more compute",
        asks=Asks(feature="gradient_checkpointing", inert=(False,)))
    resume_from_checkpoint: bool | str | None = _loop(
        None, Optional(kind=FlagOrText()), "true: the last checkpoint in output_dir; a path: that checkpoint")

    # Optimizer and schedule
    optim: str = _optim(
        "adamw_torch_fused", _OPTIM,
        "the optimizer; sgd has no momentum, adamw_fp32 keeps fp32 masters and moments beside bf16 weights")
    learning_rate: float = _optim(2e-5, Real(low=0.0), "highest learning rate of the schedule")
    lr_scheduler_type: str = _optim("linear", _SCHEDULE, "the schedule of the learning rate, transformers' by name")
    lr_scheduler_kwargs: Mapping[str, Any] | None = _optim(
        None, Optional(kind=Table()), "further arguments of that schedule, such as {min_lr_rate: 0.1}")
    warmup_steps: int | float = _optim(
        0, CountOrRatio(), "steps of rising rate, or their share of all steps",
        unit="steps or ratio", idle_while=_CONSTANT)
    weight_decay: float = _optim(0.0, Real(low=0.0), "decay of weights; biases, norms and scalars are left out")
    adam_beta1: float = _optim(0.9, Real(low=0.0, below=1.0), "decay of Adam's first moment", idle_while=_SGD)
    adam_beta2: float = _optim(0.999, Real(low=0.0, below=1.0), "decay of Adam's second moment", idle_while=_SGD)
    adam_epsilon: float = _optim(1e-8, Real(above=0.0), "added to Adam's denominator", idle_while=_SGD)
    max_grad_norm: float = _optim(1.0, Real(low=0.0), "longest global gradient; 0 does not clip")

    # Precision and kernels
    bf16: bool = _speed(
        False, NullIs(kind=_BOOLEAN, value=False), reader="optim",
        meaning="bf16 weights, and AdamW with bf16 moments and stochastic rounding",
        asks=Asks(feature="bf16", inert=(False,)))
    fp32_grad_reduce: bool = _speed(
        False, _BOOLEAN, "sum gradients over processes in fp32; false: in the dtype of the weights", reader="sharding",
        asks=Asks(feature="fp32_grad_reduce", inert=(False,)))
    grad_accumulation_dtype: str = _speed(
        "float32", _SUMS, "in which gradients add up over micro-batches, where the weights are bf16", reader="trainer",
        idle_while=("gradient_accumulation_steps", (1,)))
    lowp_precision: str | None = _speed(
        None, Optional(kind=Word(choices=("bf16", "fp8", "mxfp8", "fp4", "mxfp4", "nvfp4"))), reader="models",
        meaning="train for later use with weights of this format; null and bf16: none",
        asks=Asks(feature="lowp", inert=(None, "bf16")))
    use_liger_kernel: bool = _speed(
        False, _BOOLEAN, "Liger's fused kernels", reader="models", asks=Asks(feature="liger", inert=(False,)))
    liger_kernel_config: Mapping[str, bool] | None = _speed(
        None, Optional(kind=Table(kind=_BOOLEAN)), "which of Liger's kernels", reader="models",
        idle_while=("use_liger_kernel", (False,)))
    torch_compile: bool = _speed(
        False, _BOOLEAN, "compile the model with torch.compile",
        reader="models", asks=Asks(feature="compile", inert=(False,)))
    torch_compile_mode: str | None = _speed(
        None, Optional(kind=Word(choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"))),
        "mode of torch.compile; setting it compiles", reader="models", asks=Asks(feature="compile", inert=(None,)))
    use_chunked_grpo_logprobs: bool = _speed(
        False, _BOOLEAN, "log-probabilities of a policy in chunks", reader="methods",
        asks=Asks(feature="use_chunked_grpo_logprobs", inert=(False,)))
    kernels: Mapping[str, str] | None = _speed(
        None, Optional(kind=Table(kind=_TEXT)), "kernel by name, such as {experts: reference}; null chooses",
        reader="plan")

    # Logging, evaluation, saving
    logging_steps: int | float = _events(
        1, CountOrRatio(positive=True), "a line is printed every so many steps; metrics.jsonl has every step",
        unit="steps or ratio")
    report_to: tuple[str, ...] = _events((), _TRACKERS, "trackers that get the metrics as well")
    enable_efficiency_metrics: bool = _events(
        False, _BOOLEAN, "use of the hardware as metrics",
        asks=Asks(feature="enable_efficiency_metrics", inert=(False,)))
    enable_moe_metrics: bool = _events(
        False, _BOOLEAN, "load and choice of experts as metrics",
        asks=Asks(feature="enable_moe_metrics", inert=(False,)))
    eval_strategy: str = _events(
        "no", Word(choices=("no", "steps", "epoch"), aliases=_NO_AS_NONE), "when to evaluate")
    eval_steps: int | float | None = _events(
        None, Optional(kind=CountOrRatio(positive=True)), "evaluate every so many steps; null: logging_steps",
        unit="steps or ratio", idle_while=("eval_strategy", ("no", "epoch")))
    save_strategy: str = _events(
        "steps", Word(choices=("no", "steps", "epoch", "best"), aliases=_NO_AS_NONE), "when to write a checkpoint")
    save_steps: int | float = _events(
        500, CountOrRatio(positive=True), "write a checkpoint every so many steps", unit="steps or ratio",
        idle_while=("save_strategy", ("no", "epoch", "best")))
    save_total_limit: int | None = _events(
        None, Optional(kind=_SIZE), "newest checkpoints to keep; null: all", unit="checkpoints",
        idle_while=("save_strategy", ("no",)))
    save_async: bool = _events(
        False, _BOOLEAN, "write checkpoints while training goes on, from a copy in host memory",
        idle_while=("save_strategy", ("no",)))
    load_best_model_at_end: bool = _events(False, _BOOLEAN, "write the weights of the best evaluation at the end")
    metric_for_best_model: str | None = _events(None, Optional(kind=_TEXT), "what tells the best; null: loss")
    greater_is_better: bool | None = _events(
        None, Optional(kind=_BOOLEAN), "whether more is better; null: not for a loss")
    push_to_hub: bool = _events(
        False, _BOOLEAN, "upload the finished folder", asks=Asks(feature="push_to_hub", inert=(False,)))
    save_timeout: float = _events(
        600.0, Real(above=0.0), "longest a process waits for the others, at a save too", unit="seconds",
        asks=Asks(feature="save_timeout", inert=(600.0,)))

    # Parallelism
    data_parallel_replicate_size: int = _parallel(
        1, _SIZE, "copies of the sharded model", unit="processes", asks=Asks(feature="fsdp", inert=(1,)))
    expert_parallel_size: int = _parallel(
        1, _SIZE, "processes that share the experts of a layer", unit="processes", asks=Asks(feature="ep", inert=(1,)))
    expert_tensor_parallel_size: int = _parallel(
        1, _SIZE, "processes that share each expert", unit="processes", asks=Asks(feature="etp", inert=(1,)))
    context_parallel_size: int = _parallel(
        1, _SIZE, "processes that share each sequence", unit="processes", asks=Asks(feature="cp:ulysses", inert=(1,)))
    ep_dispatcher: str = _parallel(
        "auto", Word(choices=("auto", "all_to_all", "deepep")), "how tokens travel to their experts",
        idle_while=("expert_parallel_size", (1,)))
    fsdp_reshard_after_forward: bool = _parallel(
        False, _BOOLEAN, "free gathered weights after forward: less memory, one more gathering",
        asks=Asks(feature="fsdp_reshard_after_forward", inert=(False,)))
    fsdp_reshard_after_backward: bool = _parallel(
        True, _BOOLEAN, "free gathered weights after each backward",
        asks=Asks(feature="fsdp_reshard_after_backward", inert=(True,)))
    fsdp_defer_grad_sync: bool = _parallel(
        False, _BOOLEAN, "reduce gradients once per optimizer step",
        asks=Asks(feature="fsdp_defer_grad_sync", inert=(False,)))
    save_sharded_ep: bool = _parallel(
        False, _BOOLEAN, "each process writes its own experts", asks=Asks(feature="save_sharded_ep", inert=(False,)))

    # Experts
    use_grouped_gemm: bool = _experts(
        True, _BOOLEAN, "all experts of a layer in one grouped matrix product", reader="plan",
        asks=Asks(feature="grouped_gemm", inert=(False,)))
    fp32_router: bool = _experts(
        False, _BOOLEAN, "router weights and routing in fp32",
        reader="models", asks=Asks(feature="fp32_router", inert=(False,)))
    moe_balancing: str = _experts(
        "none", Word(choices=("none", "auto", "aux_loss", "bias_update"), aliases={"no": "none"}), reader="plan",
        meaning="how the load of experts is kept even; `auto` is bias_update where the family can, else none",
        asks=Asks(feature="balancing:{}", inert=("none", "auto")))
    router_balancing_rate: float = _experts(
        0.001, Real(low=0.0), "step of a bias update", reader="balancing",
        idle_while=("moe_balancing", ("none", "aux_loss")))
    router_aux_loss_coef: float | None = _experts(
        None, Optional(kind=Real(low=0.0)), "weight of the auxiliary loss; null: the model's", reader="balancing")

    # Adapters and quantised weights
    use_peft: bool = _lora(
        False, _BOOLEAN, "train low-rank adapters instead of all weights",
        asks=Asks(feature="lora", inert=(False,)), idle_while=None)
    lora_r: int = _lora(16, _SIZE, "rank of the adapters")
    lora_alpha: int = _lora(32, _SIZE, "scale of the adapters, divided by their rank")
    lora_dropout: float = _lora(0.05, Real(low=0.0, below=1.0), "dropout before the adapters")
    lora_target_modules: tuple[str, ...] | None = _lora(
        None, Optional(kind=_TEXTS), "modules that get adapters, or all-linear")
    lora_target_parameters: tuple[str, ...] | None = _lora(
        None, Optional(kind=_TEXTS), "parameters that get adapters, such as expert weights")
    lora_modules_to_save: tuple[str, ...] | None = _lora(
        None, Optional(kind=_TEXTS), "modules trained in full beside the adapters")
    use_rslora: bool = _lora(False, _BOOLEAN, "divide lora_alpha by the root of the rank")
    use_dora: bool = _lora(False, _BOOLEAN, "train magnitude and direction apart")
    load_in_4bit: bool = _lora(
        False, _BOOLEAN, "keep frozen weights in 4 bits", asks=Asks(feature="qlora", inert=(False,)), idle_while=None)
    load_in_8bit: bool = _lora(
        False, _BOOLEAN, "keep frozen weights in 8 bits", asks=Asks(feature="qlora", inert=(False,)), idle_while=None)
    bnb_4bit_quant_type: str = _lora(
        "nf4", Word(choices=("fp4", "nf4")), "4-bit format", idle_while=("load_in_4bit", (False,)))
    use_bnb_nested_quant: bool = _lora(
        False, _BOOLEAN, "quantise the scales as well", idle_while=("load_in_4bit", (False,)))
    bnb_4bit_quant_storage: str | None = _lora(
        None, Optional(kind=_TEXT), "dtype that holds the 4-bit values", idle_while=("load_in_4bit", (False,)))

    # Permissions
    allow_experimental: tuple[str, ...] = _allow((), _TEXTS, "experimental features that may be used")
    allow_untested_transformers: bool = _allow(
        False, _BOOLEAN, "run with a transformers release the family was not tested with")
    allow_warm_restart: bool = _allow(
        False, _BOOLEAN, "resume weights where the optimizer's state does not fit", reader="checkpoint",
        asks=Asks(feature="allow_warm_restart", inert=(False,)))


KEYS = facts_of(RunConfig)
"""Name -> facts, in the order of the documentation."""


def active_features(config: RunConfig) -> list[tuple[str, object, str]]:
    """Return (key, value, feature) for every key whose value asks for a feature."""
    asked = []
    for name, facts in KEYS.items():
        value = getattr(config, name)
        feature = facts.asks.by(value) if facts.asks is not None else None
        if feature is not None:
            asked.append((name, value, feature))
    return asked
