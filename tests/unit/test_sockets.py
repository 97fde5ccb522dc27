"""The experts sockets: the core's function computes what transformers' eager experts compute, on this model only."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from halo_core.errors import Refused
from halo_core.kernels.documents import Documents, find
from halo_core.kernels.experts.grouped import grouped
from halo_core.kernels.experts.reference import reference
from halo_core.kernels.experts.weights import ExpertWeights
from halo_core.models import sockets
from halo_core.models.hidden import Head, last_hidden

ALL = ("gpt_oss", "qwen3_moe", "qwen3", "qwen3_5_moe", "qwen3_5", "gemma4_moe", "gemma4", "lfm2_moe", "lfm2")
MOE = ("gpt_oss", "qwen3_moe", "qwen3_5_moe", "gemma4_moe", "lfm2_moe")
FP32 = 1e-5
"""Two kernels through a few fp32 layers, on log-probabilities of size five."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a forward reads of a batch."""

    input_ids: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    documents: Documents


def rows(*lengths: int) -> Rows:
    longest = max(lengths)
    segment_ids = torch.tensor([[1] * n + [0] * (longest - n) for n in lengths])
    torch.manual_seed(1)
    ids = torch.randint(1, 250, segment_ids.shape) * segment_ids
    return Rows(input_ids=ids, position_ids=torch.arange(longest).expand(len(lengths), -1), segment_ids=segment_ids,
                documents=find(segment_ids))


@pytest.fixture(params=ALL)
def architecture(request: pytest.FixtureRequest, sources: Any) -> Any:
    return sources.architecture(request.param)


def randomised(architecture: Any, text_class_model: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = text_class_model(architecture)
    with torch.no_grad():
        for tensor in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values():
            tensor.add_(torch.randn_like(tensor), alpha=0.05)
    return model.train()


def eager_log_probabilities(model: Any, batch: Rows, targets: Tensor) -> Tensor:
    """Return log-probabilities from transformers' own logits, with its own eager experts."""
    model.set_experts_implementation("eager")
    mask = None if bool((batch.segment_ids != 0).all()) else batch.segment_ids
    logits = model(
        input_ids=batch.input_ids, attention_mask=mask, position_ids=batch.position_ids, use_cache=False
    ).logits
    return logits.float().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("lengths", [(9, 9), (11, 4)], ids=["whole", "padded"])
def test_head_and_sockets_equal_transformers_eager_logits_and_gradients(
    architecture: Any, text_class_model: Any, lengths: tuple[int, ...]
) -> None:
    model = randomised(architecture, text_class_model)
    batch = rows(*lengths)
    targets = torch.randint(0, 250, batch.input_ids.shape)
    real = (batch.segment_ids != 0).float()
    theirs = eager_log_probabilities(model, batch, targets)
    (theirs * real).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for experts in (reference, grouped):
        model.zero_grad(set_to_none=True)
        sockets.attach(model, architecture, experts)
        ours = Head(model, architecture)(last_hidden(model, batch), targets)
        sockets.check_called(model)
        assert float(((ours - theirs) * real).detach().abs().max()) < FP32
        (ours * real).sum().backward()
        for name, parameter in model.named_parameters():
            wanted = expected[name]
            if wanted is None:
                assert parameter.grad is None, name
                continue
            assert float((parameter.grad - wanted).abs().max()) < FP32 * float(wanted.abs().max().clamp(min=1)), name
        sockets.detach(model)


def test_parameter_names_and_state_keys_do_not_move(architecture: Any, text_class_model: Any) -> None:
    model = randomised(architecture, text_class_model)
    before = list(model.state_dict()), [name for name, _ in model.named_modules()]
    sockets.attach(model, architecture, reference)
    assert (list(model.state_dict()), [name for name, _ in model.named_modules()]) == before


def test_two_models_under_different_kernels_live_in_one_process(sources: Any, text_class_model: Any) -> None:
    architecture = sources.architecture("lfm2_moe")
    first, second, plain = (randomised(architecture, text_class_model, seed) for seed in (0, 0, 0))
    used: list[str] = []

    def first_experts(*given: Any) -> Tensor:
        used.append("first")
        return reference(*given)

    def second_experts(*given: Any) -> Tensor:
        used.append("second")
        return 2 * reference(*given)

    sockets.attach(first, architecture, first_experts)
    sockets.attach(second, architecture, second_experts)
    batch = rows(5, 5)
    outputs = [last_hidden(model, batch) for model in (first, second, plain)]
    assert used == ["first"] * 3 + ["second"] * 3
    assert torch.allclose(outputs[0], outputs[2], atol=1e-6)
    assert not torch.allclose(outputs[1], outputs[2], atol=1e-2)


def test_detach_leaves_a_model_as_transformers_made_it(sources: Any, text_class_model: Any) -> None:
    for name in MOE:
        architecture = sources.architecture(name)
        model = randomised(architecture, text_class_model)
        implementation = model.get_experts_implementation()
        attributes = {path: sorted(vars(module)) for path, module in model.named_modules()}
        sockets.attach(model, architecture, reference)
        assert attributes != {path: sorted(vars(module)) for path, module in model.named_modules()}
        sockets.detach(model)
        assert model.get_experts_implementation() == implementation
        assert attributes == {path: sorted(vars(module)) for path, module in model.named_modules()}
        model(input_ids=rows(4).input_ids, use_cache=False)


def test_only_one_function_is_registered_however_many_models_attach(sources: Any, text_class_model: Any) -> None:
    architecture = sources.architecture("qwen3_moe")
    sockets.attach(randomised(architecture, text_class_model), architecture, reference)
    registered = ALL_EXPERTS_FUNCTIONS["halo"]
    keys = list(ALL_EXPERTS_FUNCTIONS.valid_keys())
    sockets.attach(randomised(architecture, text_class_model), architecture, grouped)
    assert ALL_EXPERTS_FUNCTIONS["halo"] is registered
    assert list(ALL_EXPERTS_FUNCTIONS.valid_keys()) == keys


def test_a_model_that_shares_its_configuration_with_an_attached_one_is_told_so(
    sources: Any, text_class_model: Any
) -> None:
    architecture = sources.architecture("qwen3_moe")
    model = randomised(architecture, text_class_model)
    sharing = type(model)(model.config)
    sockets.attach(model, architecture, reference)
    with pytest.raises(RuntimeError, match="shares a configuration object"):
        sharing(input_ids=rows(4).input_ids)


def test_a_layer_whose_experts_were_not_called_is_named(sources: Any, text_class_model: Any) -> None:
    architecture = sources.architecture("lfm2_moe")
    model = randomised(architecture, text_class_model)
    sockets.attach(model, architecture, reference)
    block = model.model.layers[2].feed_forward
    block.forward = lambda hidden: hidden
    last_hidden(model, rows(4))
    with pytest.raises(RuntimeError, match=r"layers\.2\.feed_forward\.experts \(0 calls\)"):
        sockets.check_called(model)


def test_more_than_one_call_is_right_only_under_recomputation(sources: Any, text_class_model: Any) -> None:
    architecture = sources.architecture("qwen3_moe")
    model = randomised(architecture, text_class_model)
    sockets.attach(model, architecture, reference)
    model.activation_checkpointing_enable()
    last_hidden(model, rows(4)).sum().backward()
    calls = [socket.calls for socket in model.halo_sockets.by_path.values()]
    assert min(calls) > 1
    sockets.check_called(model, recomputed=True)
    last_hidden(model, rows(4)).sum().backward()
    with pytest.raises(RuntimeError, match="calls"):
        sockets.check_called(model)


def test_an_moe_architecture_without_any_moe_layer_is_refused(sources: Any, text_class_model: Any) -> None:
    architecture = sources.architecture("qwen3_moe")
    dense = copy.deepcopy(architecture.spec.tiny) | {"mlp_only_layers": list(range(99))}
    model = text_class_model(replace(architecture, spec=replace(architecture.spec, tiny=dense)))
    with pytest.raises(Refused, match=r"no Qwen3MoeDecoderLayer of this model holds a Qwen3MoeExperts at mlp\.experts"):
        sockets.attach(model, architecture, reference)


def test_experts_that_the_facts_do_not_reach_are_refused(sources: Any, text_class_model: Any) -> None:
    architecture = sources.architecture("qwen3_moe")
    model = text_class_model(architecture)
    model.extra = copy.deepcopy(model.model.layers[-1].mlp.experts)
    with pytest.raises(Refused, match="also stands at extra"):
        sockets.attach(model, architecture, reference)


def test_attaching_twice_and_detaching_what_is_not_attached_are_errors(sources: Any, text_class_model: Any) -> None:
    architecture = sources.architecture("qwen3_moe")
    model = text_class_model(architecture)
    with pytest.raises(ValueError, match="no sockets"):
        sockets.detach(model)
    sockets.attach(model, architecture, reference)
    with pytest.raises(ValueError, match="already"):
        sockets.attach(model, architecture, reference)


@pytest.fixture
def odd_wrapper() -> Iterator[str]:
    """Yield the address of a `bind` for a block that is treated as if it had no socket: its router and all."""
    module = types.ModuleType("a_plugins_module")

    def bind(block: Any, experts: Any) -> None:
        def forward(hidden: Tensor) -> Tensor:
            flat = hidden.reshape(-1, hidden.shape[-1])
            _, routing, ids = block.gate(flat)
            held = block.experts
            weights = ExpertWeights(
                gate_up=held.gate_up_proj, down=held.down_proj, activation=held._apply_gate, is_transposed=False,
                is_concatenated=True, has_bias=False, has_gate=True,
            )
            return experts(weights, flat, ids, routing).view(hidden.shape)

        block.forward = forward

    module.bind = bind  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield f"{module.__name__}:bind"
    del sys.modules[module.__name__]


def test_a_wrapper_binds_each_block_counts_and_lets_go(odd_wrapper: str, sources: Any, text_class_model: Any) -> None:
    architecture = sources.architecture("qwen3_moe")
    block = replace(
        architecture.moe_block, experts="mlp", experts_class="Qwen3MoeSparseMoeBlock", wrapper=odd_wrapper
    )
    wrapped = replace(architecture, moe_block=block)
    model = randomised(architecture, text_class_model)
    batch = rows(6, 6)
    expected = last_hidden(model, batch)
    sockets.attach(model, wrapped, lambda *given: 1.0 * reference(*given))
    assert torch.allclose(last_hidden(model, batch), expected, atol=1e-6)
    sockets.check_called(model)
    sockets.detach(model)
    with_socket = [m for m in model.modules() if "forward" in vars(m)]
    assert with_socket == []
    assert torch.equal(last_hidden(model, batch), expected)


def test_a_row_of_padding_alone_gives_finite_states_and_gradients(architecture: Any, text_class_model: Any) -> None:
    model = randomised(architecture, text_class_model)
    batch = rows(6, 6)
    segment_ids = torch.tensor([[1] * 6, [0] * 6])
    empty = replace(batch, segment_ids=segment_ids, documents=find(segment_ids))
    hidden = last_hidden(model, empty)
    assert bool(hidden.isfinite().all())
    first = {name: value[:1] for name, value in vars(batch).items() if isinstance(value, Tensor)}
    alone = last_hidden(model, Rows(**first, documents=find(first["segment_ids"])))
    assert torch.allclose(hidden[:1], alone, atol=1e-5)
