"""Every fact the built-in families declare, held against the live classes of the installed transformers.

Not for mechanisms: whether a model trains is tested elsewhere. Each `check_*` takes one architecture's facts and
raises AssertionError where they differ from what the classes do; `PLANTED` shows for each that it notices a lie.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.specifiers import SpecifierSet
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from halo_core import registry, support
from halo_core.family import Answer, PublishedModel, without_experts
from halo_core.registry import Architecture
from halo_core.verdict import Experimental, Supported, Unsupported

BUILT_IN = ("gpt_oss", "qwen3", "qwen3_5", "gemma4", "lfm2")
REGISTRY = registry.load()
ARCHITECTURES = {a.name: a for a in REGISTRY.architectures() if a.plugin in BUILT_IN}
PUBLISHED = {m.hub_id: m for name in BUILT_IN for m in REGISTRY.families[name].spec.published}
FIXTURES = Path(__file__).parents[1] / "fixtures"
VOCABULARY = 2048
CLOSE = 1e-5
"""fp32 sums of at most a few hundred terms, ordered differently here and in transformers."""

ACTIVATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu(gate) * up": lambda gate, up: gate * torch.sigmoid(gate) * up,
    "gelu_tanh(gate) * up": lambda gate, up: torch.nn.functional.gelu(gate, approximate="tanh") * up,
    "(up + 1) * gate * sigmoid(1.702 * gate); gate at most 7, up within -7 and 7": lambda gate, up: (
        (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7))
    ),
}
"""`ExpertLayout.activation` in words -> the formula."""
SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "softmax_of_topk": torch.exp,
}
"""Score function over [T, E]; a softmax over the chosen alone is `exp`, divided by its sum over the chosen."""

every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
every_moe = pytest.mark.parametrize(
    "architecture", [a for a in ARCHITECTURES.values() if a.spec.is_moe],
    ids=[a.name for a in ARCHITECTURES.values() if a.spec.is_moe],
)
every_published = pytest.mark.parametrize("model", PUBLISHED.values(), ids=PUBLISHED)


@pytest.fixture(autouse=True)
def _same_random_numbers_in_every_test() -> None:
    torch.manual_seed(0)


# ---- models to look at


def attribute(target: str) -> Any:
    """Return what stands at "module:attribute"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def tiny_config(architecture: Architecture, **changes: object) -> Any:
    """Return the tiny configuration, its vocabulary and special tokens filled in as the core does."""
    special = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    return attribute(architecture.spec.config_class)(**{**architecture.spec.tiny, **special, **changes})


def build(architecture: Architecture, **changes: object) -> Any:
    """Return a fresh tiny model with random weights; tests may overwrite its tensors."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return attribute(architecture.spec.model_class)(tiny_config(architecture, **changes)).eval()


@functools.cache
def tiny(name: str) -> Any:
    """Return the tiny model of an architecture, shared between tests: read only."""
    return build(ARCHITECTURES[name])


def bundled(model: PublishedModel) -> dict[str, Any]:
    """Return the config.json that travels with a published model's facts."""
    package, _, path = model.config.partition(":")
    config: dict[str, Any] = json.loads((resources.files(package) / path).read_text(encoding="utf-8"))
    return config


@functools.cache
def published_model(hub_id: str) -> Any:
    """Return a published model at its real size, without storage."""
    spec = ARCHITECTURES[PUBLISHED[hub_id].architecture].spec
    config = attribute(spec.config_class)(**registry.text_config(spec, bundled(PUBLISHED[hub_id])))
    with torch.device("meta"):
        return attribute(spec.model_class)(config)


def layers(model: Any) -> list[Any]:
    """Return the decoder layers."""
    return list(model.model.layers)


def class_names(model: Any) -> set[str]:
    """Return the class name of every module."""
    return {type(module).__name__ for module in model.modules()}


def expert_layers(architecture: Architecture, model: Any) -> list[Any]:
    """Return the decoder layers that hold the declared experts path."""
    assert architecture.moe_block is not None
    path = architecture.moe_block.experts
    return [layer for layer in layers(model) if path in dict(layer.named_modules())]


def token_ids() -> torch.Tensor:
    """Return [2, 24] token ids, the same at every call."""
    return torch.randint(2, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))


def verdict(architecture: Architecture, feature: str) -> Supported | Experimental | Unsupported:
    """Return the family's own verdict."""
    return architecture.answers[feature][0].verdict


# ---- checks: one architecture's facts against the classes


def check_classes(architecture: Architecture) -> None:
    """Model types lead transformers to the same classes, and decoder layers are of the declared class."""
    spec = architecture.spec
    config_class, model_class = attribute(spec.config_class), attribute(spec.model_class)
    assert config_class.model_type in spec.model_types
    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert names[config_class.model_type] == model_class.__name__
    for wrapper in set(spec.model_types) - {config_class.model_type}:
        assert spec.text_config is not None
        assert type(getattr(CONFIG_MAPPING[wrapper](), spec.text_config)) is config_class
    found = [type(layer).__name__ for layer in layers(tiny(architecture.name))]
    assert set(found) == {spec.decoder_layer}
    assert spec.decoder_layer in model_class._no_split_modules


def check_switch(architecture: Architecture) -> None:
    """config.json as transformers writes it means this architecture; without the switch, the class's default does."""
    spec = architecture.spec
    written = json.loads(tiny_config(architecture).to_json_string())
    assert registry.matches(spec, written)
    if spec.when is None:
        return
    key, value = spec.when
    default = getattr(attribute(spec.config_class)(), key)
    written.pop(key, None)
    assert registry.matches(spec, written) == (default == value)
    for wrapper in set(spec.model_types) - {written["model_type"]}:
        inside = {"model_type": wrapper, spec.text_config: {key: value}}
        assert registry.matches(spec, inside)


def check_sizes(architecture: Architecture, config: dict[str, Any], model: Any) -> None:
    """Every size read from a config.json is the size the model has."""
    spec = architecture.spec
    inner = registry.text_config(spec, config)
    read = {name: registry.size(aliases, inner) for name, aliases in vars(spec.names).items()}
    first = next(m for m in model.modules() if hasattr(m, "q_proj"))
    out = first.o_proj if hasattr(first, "o_proj") else first.out_proj
    embedding = model.get_input_embeddings().weight
    has = {
        "hidden_size": embedding.shape[1], "vocab_size": embedding.shape[0], "num_layers": len(layers(model)),
        "num_heads": out.in_features // first.head_dim, "num_kv_heads": first.k_proj.out_features // first.head_dim,
        "num_experts": None, "experts_per_token": None, "expert_width": None,
    }
    if spec.is_moe:
        assert architecture.moe_block is not None
        experts = expert_layers(architecture, model)[-1].get_submodule(architecture.moe_block.experts)
        router = expert_layers(architecture, model)[-1].get_submodule(architecture.moe_block.router)
        down = experts.down_proj.shape
        width = down[1] if architecture.moe_block.layout.is_transposed else down[2]
        top_k = router.top_k if hasattr(router, "top_k") else router.config.top_k_experts
        has |= {"num_experts": down[0], "expert_width": width, "experts_per_token": top_k}
    assert read == has


def check_aliases(architecture: Architecture) -> None:
    """Each spelling of a size is one the configuration class takes, alone, and means the same."""
    for aliases in vars(architecture.spec.names).values():
        for alias in aliases:
            others = {name: value for name, value in architecture.spec.tiny.items() if name not in aliases}
            # An unknown spelling would be kept beside the size it does not set.
            kept = attribute(architecture.spec.config_class)(**{**others, alias: 4}).to_dict()
            assert {kept[name] for name in aliases if name in kept} == {4}, alias


def check_head(architecture: Architecture) -> None:
    """Logits are softcap * tanh(hidden @ W^T / softcap), or without the cap where none is declared."""
    model = build(architecture)
    ids = token_ids()
    with torch.no_grad():
        model.lm_head.weight.mul_(100)  # large enough for a cap to show
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = hidden @ model.lm_head.weight.T
        name = architecture.spec.head.softcap
        if name is not None:
            cap = getattr(model.config, name, None)
            assert isinstance(cap, float)
            logits = cap * torch.tanh(logits / cap)
        expected = model(input_ids=ids, use_cache=False).logits
    assert logits.abs().max() > 10
    torch.testing.assert_close(logits, expected, rtol=CLOSE, atol=1e-3)


def check_tiny(architecture: Architecture) -> None:
    """The tiny model has one to two million parameters, every layer kind, and gives a finite loss near chance."""
    model = tiny(architecture.name)
    assert 1_000_000 <= sum(p.numel() for p in model.parameters()) <= 2_000_000
    ids = token_ids()
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert loss.item() == pytest.approx(math.log(VOCABULARY), abs=0.3)
    kinds = set(getattr(model.config, "layer_types", None) or ())
    real = [published_model(m.hub_id).config for m in PUBLISHED.values() if m.architecture == architecture.name]
    assert kinds >= {kind for config in real for kind in (getattr(config, "layer_types", None) or ())}
    if architecture.spec.is_moe:
        router = expert_layers(architecture, model)[-1]
        assert router is layers(model)[-1]
        assert registry.size(architecture.spec.names.num_experts, architecture.spec.tiny) == 8
        assert registry.size(architecture.spec.names.experts_per_token, architecture.spec.tiny) == 2
        can_be_dense = {"num_dense_layers", "mlp_only_layers"} & set(model.config.to_dict())
        assert len(expert_layers(architecture, model)) == len(layers(model)) - bool(can_be_dense)


def check_prefixes(architecture: Architecture) -> None:
    """A multimodal checkpoint's keys, prefixes applied, are this model's keys; the rest is declared untrained."""
    spec = architecture.spec
    held = set(tiny(architecture.name).state_dict())
    ignored = list(attribute(spec.model_class)._keys_to_ignore_on_load_unexpected or ())
    inner = tiny(architecture.name).model._keys_to_ignore_on_load_unexpected or ()
    ignored += [p if p.startswith("^") else f"model.{p}" for p in inner]
    for expression in ignored:
        key = re.sub(r"\^|\.\*$", "", expression) + ".weight"
        assert any(re.search(pattern, key) for pattern in spec.untrained), key
    wrappers = set(spec.model_types) - {attribute(spec.config_class).model_type}
    assert bool(wrappers) == (spec.text_config is not None)
    assert bool(spec.source_prefixes) <= bool(wrappers)
    for wrapper in wrappers:
        assert spec.text_config is not None
        config_class = CONFIG_MAPPING[wrapper]
        parts = {
            name: {} for name, part in config_class.sub_configs_defaults.items() if name != spec.text_config and part
        }
        config = config_class(**{spec.text_config: tiny_config(architecture).to_dict()}, **parts)
        with torch.device("meta"):
            whole = transformers.AutoModelForImageTextToText.from_config(config)
        renamed = set()
        for key in whole.state_dict():
            prefix = next((pair for pair in spec.source_prefixes if key.startswith(pair[0])), ("", ""))
            renamed.add(prefix[1] + key.removeprefix(prefix[0]))
        assert held <= renamed
        left = {key for key in renamed - held if not any(re.search(pattern, key) for pattern in spec.untrained)}
        assert not left
        assert not any(key.startswith(old) for old, _ in spec.source_prefixes for key in held)


def check_experts(architecture: Architecture) -> None:
    """Experts and router sit where declared, and the layout and activation give what the experts module gives."""
    block = architecture.moe_block
    assert block is not None
    model = build(architecture)
    found = expert_layers(architecture, model)
    assert found
    layer = found[-1]
    experts, router = layer.get_submodule(block.experts), layer.get_submodule(block.router)
    assert type(experts).__name__ == block.experts_class
    assert type(router).__name__ == block.router_spec.router_class
    assert sum(type(m).__name__ == block.experts_class for m in model.modules()) == len(found)
    assert block.shared_expert is None or block.shared_expert in dict(layer.named_modules())
    shared = [name for name, _ in layer.named_modules() if re.fullmatch(r".*\bshared_experts?", name)]
    assert block.shared_expert or not shared
    layout = block.layout
    for flag in ("is_transposed", "is_concatenated", "has_bias", "has_gate"):
        assert getattr(experts, flag) == getattr(layout, flag), flag
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.3)
        tokens = torch.randn(5, model.config.hidden_size)
        weights = torch.rand(5, 1) + 0.5
        chosen = torch.tensor([[3]] * 5)
        up_matrix, down_matrix = experts.gate_up_proj[3], experts.down_proj[3]
        if not layout.is_transposed:
            up_matrix, down_matrix = up_matrix.T, down_matrix.T
        both = tokens @ up_matrix + (experts.gate_up_proj_bias[3] if layout.has_bias else 0)
        halves = both.chunk(2, dim=-1) if layout.is_concatenated else (both[:, ::2], both[:, 1::2])
        out = ACTIVATIONS[layout.activation](*halves) @ down_matrix
        out = (out + (experts.down_proj_bias[3] if layout.has_bias else 0)) * weights
        torch.testing.assert_close(experts(tokens, chosen, weights), out, rtol=1e-4, atol=1e-4)


def routed(architecture: Architecture, *, shake: bool, **changes: object) -> tuple[torch.Tensor, ...]:
    """Run a tiny model and return (first output, weights, ids, selection bias [E]) of its last router.

    `shake` gives every router parameter a random value. Buffers of one number per expert, which can only be
    selection biases, are random in both cases.
    """
    block = architecture.moe_block
    assert block is not None
    model = build(architecture, **changes)
    layer = expert_layers(architecture, model)[-1]
    router = layer.get_submodule(block.router)
    experts = registry.size(architecture.spec.names.num_experts, architecture.spec.tiny)
    random = torch.Generator().manual_seed(2)
    seen: list[Any] = []
    router.register_forward_hook(lambda module, arguments, output: seen.append(output))
    with torch.no_grad():
        for buffer in layer.buffers():
            if buffer.shape == (experts,):
                buffer.copy_(torch.rand(experts, generator=random))
        for parameter in router.parameters() if shake else ():
            parameter.copy_(torch.rand(parameter.shape, generator=random) - 0.5)
        model(input_ids=token_ids(), use_cache=False)
    declared = block.router_spec.selection_bias
    bias = layer.get_buffer(declared) if declared is not None else torch.zeros(experts)
    first, weights, ids = seen[-1]
    return first.float(), weights.float(), ids, bias


def check_router(architecture: Architecture) -> None:
    """The router's first output, score function, selection and normalisation are as declared."""
    block = architecture.moe_block
    assert block is not None
    spec = block.router_spec
    first, weights, ids, bias = routed(architecture, shake=False)
    is_distribution = bool((first >= 0).all()) and torch.allclose(first.sum(-1), torch.ones(len(first)), atol=CLOSE)
    assert is_distribution == (spec.first_output == "probabilities")
    scores = first if is_distribution else SCORES[spec.score](first)
    assert not is_distribution or spec.score == "softmax"
    expected = (scores + bias).topk(ids.shape[-1], dim=-1).indices
    assert torch.equal(ids.sort(-1).values, expected.sort(-1).values)
    gathered = scores.gather(-1, ids)
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), gathered / gathered.sum(-1, keepdim=True),
                               rtol=CLOSE, atol=CLOSE)
    switches = [{"norm_topk_prob": False}] if hasattr(tiny(architecture.name).config, "norm_topk_prob") else []
    sums = [weights] + [routed(architecture, shake=True, **change)[1] for change in ({}, *switches)]
    always = all(torch.allclose(w.sum(-1), torch.ones(len(w)), atol=CLOSE) for w in sums)
    assert always == spec.weights_sum_to_one


def check_selection_bias(architecture: Architecture) -> None:
    """A declared selection bias is an fp32 buffer of the state dict; bias updates are offered exactly where one is."""
    block = architecture.moe_block
    assert block is not None
    declared = block.router_spec.selection_bias
    answer = architecture.answers["balancing:bias_update"][0]
    assert isinstance(answer.verdict, Supported) == (declared is not None)
    assert answer.facts.get("bias") == declared
    if declared is not None:
        layer = expert_layers(architecture, tiny(architecture.name))[-1]
        bias = dict(layer.named_buffers())[declared]
        assert bias.dtype == torch.float32
        assert not bias.requires_grad
        assert declared in layer.state_dict()


def check_auxiliary_loss(architecture: Architecture) -> None:
    """The auxiliary loss is offered exactly where transformers itself computes one."""
    model = build(architecture, output_router_logits=True)
    with torch.no_grad():
        output = model(input_ids=token_ids(), labels=token_ids(), use_cache=False)
    offered = isinstance(verdict(architecture, "balancing:aux_loss"), Supported)
    assert offered == (getattr(output, "aux_loss", None) is not None)
    assert offered == hasattr(model.config, "router_aux_loss_coef")


def check_attention(architecture: Architecture) -> None:
    """No is said where transformers refuses the implementation, and nowhere else."""
    model_class = attribute(architecture.spec.model_class)
    for name, allowed in (("sdpa", model_class._supports_sdpa), ("flex_attention", model_class._supports_flex_attn)):
        refused = isinstance(verdict(architecture, f"attention:{name}"), Unsupported)
        assert refused == (not allowed), name
        if refused:
            with pytest.raises(ValueError, match="does not support"):
                model_class._from_config(tiny_config(architecture), attn_implementation=name)
        else:
            model_class._from_config(tiny_config(architecture), attn_implementation=name)
    refused = isinstance(verdict(architecture, "attention:flash_attention_2"), Unsupported)
    assert refused == (not model_class._supports_flash_attn)
    for feature in ("attention:flex_attention", "attention:flash_attention_2"):
        answer = verdict(architecture, feature)
        assert not isinstance(answer, Supported) or answer.proof == "gpu", f"{feature} has no backward on a CPU"


def _needed_layer_types(architecture: Architecture) -> dict[str, Any]:
    """Return `layer_types` for a configuration class that has no default for it."""
    tiny_types = architecture.spec.tiny.get("layer_types")
    return {"layer_types": [*tiny_types, *tiny_types][:6]} if isinstance(tiny_types, list) else {}


def check_hub_keys(architecture: Architecture, folder: Path) -> None:
    """Expert tensors are named as transformers saves, loads or quantises them, and none is left out."""
    block = architecture.moe_block
    assert block is not None
    model = tiny(architecture.name)
    model.save_pretrained(folder)
    index = json.loads(_safetensors_header(folder / "model.safetensors"))
    below = rf"model\.layers\.\d+\.({re.escape(block.experts)}\..*)"
    saved = {m[1] for key in index if (m := re.fullmatch(below, key))}
    held = {m[1] for key in model.state_dict() if (m := re.fullmatch(below, key))}
    packed = {
        f"{block.experts}.{name}" for whole, names in Mxfp4HfQuantizer.serialized_names.items() for name in names
        if f"{block.experts}.{whole}" in saved
    }
    assert saved
    patterns = {pattern: re.escape(pattern).replace(r"\*", r"\d+") for pattern in block.hub_keys}
    assert all(any(re.fullmatch(p, key) for p in patterns.values()) for key in saved)
    for pattern, expression in patterns.items():
        assert any(re.fullmatch(expression, key) for key in saved | held | packed), pattern


def _safetensors_header(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(int.from_bytes(stream.read(8), "little"))


def check_because(architecture: Architecture) -> None:
    """Every class that stands in the way of a feature is there."""
    present = class_names(tiny(architecture.name))
    for answer, _ in architecture.answers.values():
        if isinstance(answer.verdict, Unsupported):
            assert set(answer.verdict.because) <= present, answer.feature
            assert answer.verdict.reason
            assert answer.verdict.instead


def check_mixers(architecture: Architecture) -> None:
    """Exactly the modules that convolve along the sequence are declared, and their kind is what a nudge shows."""
    model = build(architecture)
    convolving = {
        type(module).__name__ for module in model.modules()
        if any(isinstance(child, torch.nn.Conv1d) for child in module.children())
    }
    assert {mixer.mixer_class for mixer in architecture.mixers} == convolving
    for mixer in architecture.mixers:
        module = next(m for m in model.modules() if type(m).__name__ == mixer.mixer_class)
        taps = next(child for child in module.children() if isinstance(child, torch.nn.Conv1d)).kernel_size[0]
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.fill_(-3) if name == "A_log" else parameter.normal_(std=0.3)  # a state that lasts
            hidden = torch.randn(1, 16, model.config.hidden_size)
            nudged = hidden.clone()
            nudged[:, 0] += 1
            moved = (module(hidden_states=hidden) - module(hidden_states=nudged)).abs().amax(dim=(0, 2)) > 0
        reach = {"short_conv": taps, "delta_rule": len(moved)}[mixer.kind]
        assert moved.nonzero().flatten().tolist() == list(range(reach))


def check_parallel_cuts(architecture: Architecture) -> None:
    """Context parallelism by heads is refused exactly where a mixer that is not attention sits in the way."""
    answer = verdict(architecture, "cp:ulysses")
    because = set(answer.because) if isinstance(answer, Unsupported) else set()
    assert because == {mixer.mixer_class for mixer in architecture.mixers}


CHECKS: tuple[Callable[[Architecture], None], ...] = (
    check_classes, check_switch, check_aliases, check_head, check_tiny, check_prefixes, check_attention,
    check_because, check_mixers, check_parallel_cuts,
)
MOE_CHECKS: tuple[Callable[[Architecture], None], ...] = (
    check_experts, check_router, check_selection_bias, check_auxiliary_loss,
)


@every_architecture
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_declared_fact_is_what_transformers_does(
    architecture: Architecture, check: Callable[[Architecture], None]
) -> None:
    check(architecture)


@every_moe
@pytest.mark.parametrize("check", MOE_CHECKS, ids=lambda check: check.__name__)
def test_declared_expert_fact_is_what_transformers_does(
    architecture: Architecture, check: Callable[[Architecture], None]
) -> None:
    check(architecture)


@every_moe
def test_hub_keys_are_the_keys_transformers_reads_and_writes(architecture: Architecture, tmp_path: Path) -> None:
    check_hub_keys(architecture, tmp_path)


@every_architecture
def test_sizes_are_found_in_the_file_transformers_writes(architecture: Architecture, tmp_path: Path) -> None:
    model = tiny(architecture.name)
    model.config.save_pretrained(tmp_path)
    check_sizes(architecture, json.loads((tmp_path / "config.json").read_text()), model)


@every_published
def test_sizes_are_found_in_the_published_file(model: PublishedModel) -> None:
    check_sizes(ARCHITECTURES[model.architecture], bundled(model), published_model(model.hub_id))


# ---- each check notices a lie


def spec(**changes: Any) -> Callable[[Architecture], Architecture]:
    """Return a change of the architecture's own facts."""
    return lambda a: replace(a, spec=replace(a.spec, **changes))


def names(**changes: Any) -> Callable[[Architecture], Architecture]:
    """Return a change of where the sizes are kept."""
    return lambda a: replace(a, spec=replace(a.spec, names=replace(a.spec.names, **changes)))


def block(**changes: Any) -> Callable[[Architecture], Architecture]:
    """Return a change of where the experts are."""
    return lambda a: replace(a, moe_block=replace(a.moe_block, **changes))


def layout(**changes: Any) -> Callable[[Architecture], Architecture]:
    """Return a change of how the experts are stored."""
    return lambda a: replace(a, moe_block=replace(a.moe_block, layout=replace(a.moe_block.layout, **changes)))


def router(**changes: Any) -> Callable[[Architecture], Architecture]:
    """Return a change of how tokens choose experts."""
    return lambda a: replace(a, moe_block=replace(a.moe_block, router_spec=replace(a.moe_block.router_spec, **changes)))


def answer(feature: str, planted: Any, **facts: Any) -> Callable[[Architecture], Architecture]:
    """Return a change of one answer."""
    def change(a: Architecture) -> Architecture:
        entry = Answer(architecture=a.name, feature=feature, verdict=planted, facts=facts)
        return replace(a, answers=MappingProxyType({**a.answers, feature: (entry, a.plugin)}))
    return change


def check_written_sizes(architecture: Architecture) -> None:
    """The sizes of the file transformers writes."""
    model = tiny(architecture.name)
    check_sizes(architecture, json.loads(model.config.to_json_string()), model)


CPU, NO = Supported(proof="cpu"), Unsupported(reason="-", instead="-")
PLANTED = [
    (check_classes, "lfm2", spec(decoder_layer="Lfm2MoeDecoderLayer")),
    (check_classes, "qwen3", spec(model_types=("qwen2",))),
    (check_classes, "qwen3_5", spec(text_config="vision_config")),
    (check_classes, "qwen3_5_moe", spec(model_class="transformers:Qwen3_5ForCausalLM")),
    (check_switch, "gemma4", spec(when=("enable_moe_block", True))),
    (check_switch, "gemma4_moe", spec(when=("enable_moe_block", False))),
    (check_written_sizes, "qwen3_moe", names(num_experts=("num_experts",))),
    (check_written_sizes, "gemma4_moe", names(experts_per_token=("num_experts_per_tok",))),
    (check_written_sizes, "lfm2_moe", names(expert_width=("intermediate_size",))),
    (check_written_sizes, "gpt_oss", names(num_heads=("num_key_value_heads",))),
    (check_written_sizes, "qwen3", names(num_experts=("num_hidden_layers",))),
    (check_aliases, "lfm2_moe", names(num_experts=("num_experts", "num_local_experts"))),
    (check_aliases, "gpt_oss", names(hidden_size=("hidden_size", "intermediate_size"))),
    (check_head, "gemma4", lambda a: spec(head=replace(a.spec.head, softcap=None))(a)),
    (check_head, "qwen3", lambda a: spec(head=replace(a.spec.head, softcap="final_logit_softcapping"))(a)),
    (check_tiny, "lfm2_moe", lambda a: spec(tiny={**a.spec.tiny, "num_experts": 4})(a)),
    (check_prefixes, "gemma4_moe", spec(source_prefixes=())),
    (check_prefixes, "gemma4_moe", spec(untrained=(r"^model\.vision_tower\.",))),
    (check_prefixes, "gemma4", lambda a: spec(untrained=a.spec.untrained[:1])(a)),
    (check_prefixes, "qwen3_5", spec(untrained=(r"^model\.visual\.",))),
    (check_prefixes, "qwen3_5_moe", spec(text_config=None)),
    (check_attention, "gpt_oss", answer("attention:sdpa", CPU)),
    (check_attention, "qwen3_5_moe", answer("attention:flex_attention", Supported(proof="gpu"))),
    (check_attention, "qwen3", answer("attention:sdpa", NO)),
    (check_attention, "qwen3", answer("attention:flex_attention", CPU)),
    (check_attention, "gemma4_moe", answer("attention:flash_attention_2", NO)),
    (check_attention, "lfm2", answer("attention:flash_attention_2", NO)),
    (check_because, "lfm2", answer("cp:ulysses", replace(NO, because=("Lfm2MoeShortConv",)))),
    (check_mixers, "lfm2", lambda a: replace(a, mixers=())),
    (check_mixers, "lfm2_moe", lambda a: replace(a, mixers=(replace(a.mixers[0], kind="delta_rule"),))),
    (check_mixers, "qwen3_5", lambda a: replace(a, mixers=(replace(a.mixers[0], kind="short_conv"),))),
    (check_parallel_cuts, "lfm2_moe", answer("cp:ulysses", CPU)),
    (check_parallel_cuts, "qwen3", answer("cp:ulysses", replace(NO, because=("Qwen3Attention",)))),
    (check_experts, "lfm2_moe", block(experts="mlp.experts")),
    (check_experts, "qwen3_moe", block(experts_class="Qwen3_5MoeExperts")),
    (check_experts, "gemma4_moe", router(router_class="Gemma4Router")),
    (check_experts, "qwen3_5_moe", block(shared_expert=None)),
    (check_experts, "gpt_oss", layout(is_concatenated=True)),
    (check_experts, "gpt_oss", layout(is_transposed=False)),
    (check_experts, "gpt_oss", layout(has_bias=False)),
    (check_experts, "qwen3_moe", layout(has_gate=False)),
    (check_experts, "gemma4_moe", layout(activation="silu(gate) * up")),
    (check_router, "gemma4_moe", router(first_output="logits")),
    (check_router, "qwen3_5_moe", router(first_output="probabilities")),
    (check_router, "lfm2_moe", router(score="softmax")),
    (check_router, "gpt_oss", router(score="sigmoid")),
    (check_router, "lfm2_moe", router(selection_bias=None)),
    (check_router, "gemma4_moe", router(weights_sum_to_one=True)),
    (check_router, "qwen3_moe", router(weights_sum_to_one=True)),
    (check_router, "qwen3_5_moe", router(weights_sum_to_one=False)),
    (check_selection_bias, "lfm2_moe", answer("balancing:bias_update", CPU, bias="expert_bias")),
    (check_selection_bias, "qwen3_moe", answer("balancing:bias_update", CPU)),
    (check_auxiliary_loss, "gemma4_moe", answer("balancing:aux_loss", CPU)),
    (check_auxiliary_loss, "qwen3_moe", answer("balancing:aux_loss", NO)),
]


@pytest.mark.parametrize(
    ("check", "name", "plant"), PLANTED,
    ids=[f"{number}-{check.__name__}-{name}" for number, (check, name, _) in enumerate(PLANTED)],
)
def test_wrong_fact_is_noticed(
    check: Callable[[Architecture], None], name: str, plant: Callable[[Architecture], Architecture]
) -> None:
    planted = plant(ARCHITECTURES[name])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(planted)


@pytest.mark.parametrize("lie", [
    block(hub_keys=("feed_forward.experts.*.w1.weight", "feed_forward.experts.*.w2.weight")),
    lambda a: block(hub_keys=(*a.moe_block.hub_keys, "feed_forward.experts.*.gate_proj.weight"))(a),
], ids=["one left out", "one too many"])
def test_wrong_hub_keys_are_noticed(lie: Callable[[Architecture], Architecture], tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check_hub_keys(lie(ARCHITECTURES["lfm2_moe"]), tmp_path)


# ---- the files themselves


def test_built_in_families_load_without_fault() -> None:
    rows = {row.name: row.faults for row in REGISTRY.plugins.rows if row.name in BUILT_IN}
    assert rows == dict.fromkeys(BUILT_IN, ())


def test_every_feature_is_answered_exactly_once_by_the_hook_that_asks_for_it() -> None:
    hooks = {"balancing": "halo_balancing_modes", "attention": "halo_attention_backends", "cp": "halo_context_parallel"}
    given = Counter(
        (hook, entry.architecture, entry.feature)
        for row in REGISTRY.plugins.rows if row.name in BUILT_IN
        for hook, entries in row.declared.items()
        for entry in entries if isinstance(entry, Answer)
    )
    due = {(hooks.get(f.split(":")[0], "halo_features"), name, f) for name in ARCHITECTURES for f in support.FEATURES}
    assert given == Counter(due)


def test_there_is_a_moe_architecture_in_every_family_and_a_dense_one_in_all_but_one() -> None:
    kinds = {name: sorted(a.spec.is_moe for a in REGISTRY.families[name].architectures) for name in BUILT_IN}
    assert kinds == {name: [True] if name == "gpt_oss" else [False, True] for name in BUILT_IN}


@every_architecture
def test_dense_architecture_refuses_what_is_about_experts(architecture: Architecture) -> None:
    about_experts = ("grouped_gemm", "ep", "etp", "fp32_router", "balancing:bias_update", "balancing:aux_loss")
    refused = {f for f in about_experts if getattr(verdict(architecture, f), "reason", "") == "it has no experts"}
    assert refused == (set() if architecture.spec.is_moe else set(about_experts))
    assert isinstance(verdict(architecture, "balancing:none"), Supported)


def test_dense_no_is_not_given_to_a_feature_that_needs_no_experts() -> None:
    with pytest.raises(KeyError):
        without_experts("qwen3", "sft")


@pytest.mark.parametrize(("typed", "family"), [
    ("gpt-oss", "gpt_oss"), ("GPTOSS", "gpt_oss"), ("qwen3", "qwen3"), ("Qwen3.5", "qwen3_5"), ("qwen3.6", "qwen3_5"),
    ("qwen-3.5", "qwen3_5"), ("gemma-4", "gemma4"), ("Gemma4", "gemma4"), ("lfm2.5", "lfm2"), ("LFM2", "lfm2"),
])
def test_family_is_found_as_people_type_it(typed: str, family: str) -> None:
    found = REGISTRY.family(typed)
    assert found is not None
    assert found.name == family


def test_aliases_are_written_as_the_core_compares_them() -> None:
    aliases = [alias for name in BUILT_IN for alias in REGISTRY.families[name].spec.aliases]
    assert [registry.plain(alias) for alias in aliases] == aliases


@pytest.mark.parametrize("name", BUILT_IN)
def test_installed_transformers_is_in_the_tested_range(name: str) -> None:
    assert transformers.__version__ in SpecifierSet(REGISTRY.families[name].spec.transformers)


@every_published
def test_published_model_builds_with_the_number_of_parameters_it_is_known_for(model: PublishedModel) -> None:
    expected = json.loads((FIXTURES / "published.json").read_text())[model.hub_id]
    count = sum(parameter.numel() for parameter in published_model(model.hub_id).parameters())
    assert count / 1e9 == pytest.approx(expected, rel=0.01)


@every_published
def test_published_config_means_its_architecture_and_names_its_guesses(model: PublishedModel) -> None:
    config = bundled(model)
    found = REGISTRY.match(config)
    assert found is not None
    assert found.name == model.architecture
    text = attribute(found.spec.model_class).__name__
    assert config["architectures"] == [text] or config["model_type"] != attribute(found.spec.config_class).model_type
    assert set(model.guessed) <= set(registry.text_config(found.spec, config))


def test_every_known_parameter_count_belongs_to_a_published_model() -> None:
    assert set(json.loads((FIXTURES / "published.json").read_text())) == set(PUBLISHED)


def test_the_only_guessed_field_is_the_layer_order_of_the_largest_lfm2() -> None:
    guesses = {hub_id: model.guessed for hub_id, model in PUBLISHED.items() if model.guessed}
    assert guesses == {"LiquidAI/LFM2-24B-A2B": ("layer_types",)}


def test_model_without_its_selection_bias_refuses_bias_updates() -> None:
    found = ARCHITECTURES["lfm2_moe"]
    assert found.moe_block is not None
    without = build(found, use_expert_bias=False)
    assert not any(key.endswith(str(found.moe_block.router_spec.selection_bias)) for key in without.state_dict())
    plan: Any = SimpleNamespace(family="lfm2", features=("sft", "balancing:bias_update"))
    for value, problems in ((False, 1), (True, 0)):
        [(_, answered)] = REGISTRY.plugins.call(
            "halo_check_run", family="lfm2", plan=plan, config={"use_expert_bias": value}
        )
        assert len(answered) == problems


@pytest.mark.parametrize("name", BUILT_IN)
def test_family_file_is_small(name: str) -> None:
    assert len((resources.files("halo_families") / f"{name}.py").read_bytes()) < 12_000


def test_family_files_load_without_torch() -> None:
    script = "import sys; import {}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    modules = ", ".join(f"halo_families.{name}" for name in BUILT_IN)
    assert subprocess.run([sys.executable, "-c", script.format(modules)], check=False).returncode == 0
    assert subprocess.run([sys.executable, "-c", script.format("torch")], check=False).returncode == 1
