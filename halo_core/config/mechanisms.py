"""Mechanisms of a whole run that are asked for by a key and do not depend on the architecture.

Not for features that a family answers: those stand in `halo_core.support`.
"""

from __future__ import annotations

from halo_core.support import Mechanism

RUN_MECHANISMS: tuple[Mechanism, ...] = (
    Mechanism(
        feature="save_sharded_ep",
        what="each process writes its own experts into ep-shards",
        built=True,
    ),
    Mechanism(
        feature="push_to_hub",
        what="upload of the finished folder",
        built=False,
        instead="set push_to_hub: false and run `hf upload` on output_dir afterwards",
    ),
    Mechanism(
        feature="fp32_grad_reduce",
        what="gradients summed over processes in fp32",
        built=True,
        instead="set fp32_grad_reduce: false",
    ),
    Mechanism(
        feature="fsdp_reshard_after_forward",
        what="weights gathered again for backward",
        built=True,
    ),
    Mechanism(
        feature="fsdp_reshard_after_backward",
        what="weights kept gathered over an accumulation window",
        built=True,
    ),
    Mechanism(
        feature="fsdp_defer_grad_sync",
        what="gradients reduced once per optimizer step",
        built=True,
    ),
    Mechanism(
        feature="enable_efficiency_metrics",
        what="tokens per second per device, and use of the hardware",
        built=False,
        instead="set enable_efficiency_metrics: false; metrics.jsonl has tokens and seconds of each step",
    ),
    Mechanism(
        feature="enable_moe_metrics",
        what="load and choice of experts as metrics",
        built=False,
        instead="set enable_moe_metrics: false",
    ),
    Mechanism(
        feature="use_chunked_grpo_logprobs",
        what="log-probabilities of a policy in chunks",
        built=False,
        instead="set use_chunked_grpo_logprobs: false",
    ),
    Mechanism(
        feature="dequantize_source",
        what="a quantised checkpoint read as bf16",
        built=True,
    ),
    Mechanism(
        feature="special_tokens",
        what="another end or padding token than the tokenizer's",
        built=True,
    ),
    Mechanism(
        feature="export_text_only",
        what="the text model alone written from a multimodal source",
        built=True,
    ),
    Mechanism(
        feature="allow_warm_restart",
        what="weights resumed without the optimizer's state",
        built=True,
    ),
    Mechanism(
        feature="save_timeout",
        what="a limit on how long processes wait for each other at a save",
        built=True,
    ),
    Mechanism(
        feature="trust_remote_code",
        what="a tokenizer that brings its own Python",
        built=True,
    ),
)
