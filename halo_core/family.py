"""The facts a family plugin declares: frozen, keyword-only data without torch.

Not for behaviour: mechanisms live in the core and read these facts. Required fields have no default, so a
plugin cannot forget one. Shapes: T tokens, H hidden, E experts, K experts per token, M expert width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from halo_core.verdict import Unsupported, Verdict

CONTRACT_LEVEL = 1
"""The contract this core speaks. It rises when a feature or a hook argument is added."""


@dataclass(frozen=True, kw_only=True)
class ConfigNames:
    """The names under which config.json keeps each size; the first that is present is read.

    For a dense architecture `num_experts`, `experts_per_token` and `expert_width` are empty.
    """

    hidden_size: tuple[str, ...]
    num_layers: tuple[str, ...]
    num_heads: tuple[str, ...]
    num_kv_heads: tuple[str, ...]
    vocab_size: tuple[str, ...]
    num_experts: tuple[str, ...] = ()
    experts_per_token: tuple[str, ...] = ()
    expert_width: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """How logits come from the last hidden state: `softcap * tanh(hidden @ W^T / softcap)` when a cap is set.

    `softcap` is the config.json name of the cap, or None when the family has none.
    """

    softcap: str | None


@dataclass(frozen=True, kw_only=True)
class ArchitectureSpec:
    """One concrete model of a family.

    name: the architecture's name, unique over all families.
    model_types: the `model_type`s of config.json that mean this architecture.
    when: (config.json key, value) that tells it apart where one `model_type` serves two architectures.
    text_config: the sub-config of config.json that holds the language model in a multimodal checkpoint, or None.
    model_class, config_class: "module:attribute" of the causal language model class and its configuration class.
    decoder_layer: class name of one decoder layer (the unit of sharding and checkpointing).
    is_moe: whether decoder layers hold routed experts.
    names: where config.json keeps the sizes.
    head: how logits come from hidden states.
    source_prefixes: (prefix in a checkpoint file, prefix in the model) pairs for checkpoints that wrap the language
        model; the first that matches a key is applied.
    untrained: regular expressions of checkpoint keys that this model does not hold; an export copies them unchanged.
        A key that the model does hold is trained even where an expression matches it.
    tiny: keyword arguments of `config_class` for a model of about one to two million parameters, every layer kind
        present. `vocab_size` and the special token ids are filled in by the core.
    source: where these facts can be read (file, paper, thread).
    """

    name: str
    model_types: tuple[str, ...]
    model_class: str
    config_class: str
    decoder_layer: str
    is_moe: bool
    names: ConfigNames
    head: HeadSpec
    tiny: Mapping[str, object]
    source: str
    when: tuple[str, object] | None = None
    text_config: str | None = None
    source_prefixes: tuple[tuple[str, str], ...] = ()
    untrained: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A published checkpoint whose config.json travels with the plugin, so that a plan needs no network.

    hub_id: its name on the hub. architecture: which architecture it is. config: "package:path" of the json file.
    guessed: the fields of that file that are not published but guessed.
    """

    hub_id: str
    architecture: str
    config: str
    guessed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FamilySpec:
    """One line of models on the hub.

    name: as typed after `--family`, lower case with underscores. aliases: other spellings people type.
    contract: the contract level the plugin was written for.
    transformers: the tested release range as a version specifier, such as ">=5.24,<5.25".
    """

    name: str
    contract: int
    architectures: tuple[ArchitectureSpec, ...]
    transformers: str
    source: str
    aliases: tuple[str, ...] = ()
    published: tuple[PublishedModel, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """How an experts module stores its weights.

    is_transposed: weights are stored [E, in, out] and not [E, out, in].
    is_concatenated: gate and up lie one after the other, not interleaved.
    has_bias: each projection has a bias per expert. has_gate: the first projection yields gate and up.
    activation: what `_apply_gate` computes, in words for people.
    """

    is_transposed: bool
    is_concatenated: bool
    has_bias: bool
    has_gate: bool
    activation: str


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How tokens choose experts, and what the router module returns.

    router_class: class name. score: which function turns logits into scores.
    first_output: what element 0 of the router's output is.
    weights_sum_to_one: whether a token's K routing weights always add up to one.
    selection_bias: the tensor (path from the decoder layer) added to scores for selection only, or None.
    """

    router_class: str
    score: Literal["softmax", "sigmoid", "softmax_of_topk"]
    first_output: Literal["logits", "probabilities"]
    weights_sum_to_one: bool
    selection_bias: str | None = None


@dataclass(frozen=True, kw_only=True)
class MoEBlockSpec:
    """Where the routed experts of an architecture sit; paths are relative to one decoder layer.

    hub_keys: patterns of the checkpoint's expert tensors below the layer, `*` for the expert number.
    shared_expert: path of an always-on expert beside the routed ones, or None.
    wrapper: "halo" for an experts module with transformers' experts socket; otherwise "module:attribute" of a
        function `bind(block, experts)` that routes through `experts` (see `halo_core.models.sockets`). `experts`
        is then the path of the block that `bind` receives.
    """

    architecture: str
    experts: str
    experts_class: str
    router: str
    router_spec: RouterSpec
    layout: ExpertLayout
    hub_keys: tuple[str, ...]
    shared_expert: str | None = None
    wrapper: str = "halo"


@dataclass(frozen=True, kw_only=True)
class SequenceMixerSpec:
    """A layer that mixes tokens along the sequence and is not attention.

    mixer_class: class name. layer_type: transformers' word for such layers in `layer_types` of config.json.
    kind: the core's word for its mathematics ("short_conv", "delta_rule").
    functions: what its forward calls by name, function -> the core's kernel that takes its place where a row holds
        several documents ("short_conv", called as `causal_conv1d_fn`; "delta_rule", as `torch_chunk_gated_delta_rule`).
    segments: how document borders reach transformers' own functions, in words. border_state: what crosses a document
        or shard border.
    kernels: module class name -> the core's kernel name, for norms, gated units and rotary embeddings nearby.
    """

    architecture: str
    mixer_class: str
    layer_type: str
    kind: str
    functions: Mapping[str, str]
    segments: str
    border_state: str
    kernels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A family's answer for one feature of one architecture, given as if the core's mechanism existed.

    facts: what the mechanism needs to know, such as {"bias": "feed_forward.expert_bias"}.
    """

    architecture: str
    feature: str
    verdict: Verdict
    facts: Mapping[str, object] = field(default_factory=dict)


BackendKind = Literal["dispatcher", "optimizer", "method", "tracker", "attention", "context_parallel", "kernel"]


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """An implementation of a core interface. `target` is "module:attribute", `needs` are importable module names."""

    kind: BackendKind
    name: str
    target: str
    needs: tuple[str, ...] = ()


_WITHOUT_EXPERTS: Mapping[str, str] = {
    "grouped_gemm": "leave use_grouped_gemm out, or set it to false",
    "balancing:bias_update": "set moe_balancing: none",
    "balancing:aux_loss": "set moe_balancing: none",
    "ep": "set expert_parallel_size: 1; more processes share a dense model by sharding it",
    "etp": "set expert_tensor_parallel_size: 1; more processes share a dense model by sharding it",
    "fp32_router": "set fp32_router: false",
}


def answers(architecture: str, verdicts: Mapping[str, Verdict]) -> tuple[Answer, ...]:
    """Return one answer per feature of {feature: verdict}, for facts that read better as a table."""
    return tuple(
        Answer(architecture=architecture, feature=feature, verdict=verdict) for feature, verdict in verdicts.items()
    )


def without_experts(architecture: str, *features: str) -> tuple[Answer, ...]:
    """Return the No of a dense architecture to features that are about experts, with the way out of each.

    Raises:
        KeyError: for a feature that a dense model can have.
    """
    return answers(
        architecture,
        {feature: Unsupported(reason="it has no experts", instead=_WITHOUT_EXPERTS[feature]) for feature in features},
    )
