"""Binding of layers that mix tokens otherwise than by attention: on instances, with the forward that they have.

Not for numbers of whole models: see `tests/conformance/test_isolation.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_core.errors import Refused
from halo_core.kernels.documents import Documents, find
from halo_core.models import mixers
from halo_core.models.hidden import last_hidden

MIXING = ("lfm2", "lfm2_moe", "qwen3_5", "qwen3_5_moe")
OTHERS = ("qwen3", "gpt_oss")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a forward reads of a batch."""

    input_ids: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    documents: Documents


def packed(*lengths: int, pad: int = 0, seed: int = 1) -> Rows:
    """Return one row of documents of these lengths."""
    segments = torch.tensor([[n for n, length in enumerate(lengths, 1) for _ in range(length)] + [0] * pad])
    positions = torch.tensor([[place for length in lengths for place in range(length)] + [0] * pad])
    ids = torch.randint(1, 250, segments.shape, generator=torch.Generator().manual_seed(seed))
    return Rows(input_ids=ids, position_ids=positions, segment_ids=segments, documents=find(segments))


def made(sources: Any, text_class_model: Any, name: str) -> tuple[Any, Any]:
    architecture = sources.architecture(name)
    torch.manual_seed(0)
    model = text_class_model(architecture)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return architecture, model.train()


@pytest.mark.parametrize("name", [*MIXING, *OTHERS])
def test_names_do_not_move_and_detaching_restores_everything(name: str, sources: Any, text_class_model: Any) -> None:
    architecture, model = made(sources, text_class_model, name)
    classes = {type(module): type(module).forward for module in model.modules()}
    keys, attributes = list(model.state_dict()), {path: sorted(vars(m)) for path, m in model.named_modules()}
    mixers.attach(model, architecture)
    bound = mixers.of(model)
    assert bound is not None
    assert bool(bound.by_path) == (name in MIXING)
    assert list(model.state_dict()) == keys
    assert all(cls.forward is forward for cls, forward in classes.items())
    mixers.detach(model)
    assert mixers.of(model) is None
    assert {path: sorted(vars(m)) for path, m in model.named_modules()} == attributes


@pytest.mark.parametrize("name", MIXING)
def test_rows_of_one_document_are_computed_by_transformers_alone(
    name: str, sources: Any, text_class_model: Any
) -> None:
    architecture, model = made(sources, text_class_model, name)
    batches = [packed(9), packed(9, pad=4)]
    before = [last_hidden(model, batch) for batch in batches]
    mixers.attach(model, architecture, dict.fromkeys(mixers.KERNELS))  # which would fail if they were called
    for batch, wanted in zip(batches, before, strict=True):
        assert torch.equal(last_hidden(model, batch), wanted)


@pytest.mark.parametrize("name", MIXING)
def test_kernels_for_every_batch_get_its_documents(name: str, sources: Any, text_class_model: Any) -> None:
    architecture, model = made(sources, text_class_model, name)
    wanted = last_hidden(model, packed(9, pad=4))
    told: list[Documents] = []

    def listening(kernel: Any) -> Any:
        return lambda *given: (told.append(given[-1]), kernel(*given))[1]

    mixers.attach(model, architecture, {k: listening(v) for k, v in mixers.KERNELS.items()}, every_batch=True)
    batch = packed(9, pad=4)
    assert torch.allclose(last_hidden(model, batch)[:, :9], wanted[:, :9], atol=1e-5)
    bound = mixers.of(model)
    assert bound is not None
    calls = sum(len(mixer.functions) for mixer in bound.by_path.values())
    assert told == [batch.documents] * calls


def test_several_documents_in_a_model_without_bound_mixers_are_an_error(sources: Any, text_class_model: Any) -> None:
    _, model = made(sources, text_class_model, "lfm2")
    with pytest.raises(NotImplementedError, match="nothing keeps documents apart in layers of type conv"):
        last_hidden(model, packed(5, 4))


def test_recomputed_layers_see_the_documents_of_their_own_batch(sources: Any, text_class_model: Any) -> None:
    """Two forwards before the first backward: what was bound must not remember the last batch only."""
    for name in ("lfm2_moe", "qwen3_5"):
        architecture, model = made(sources, text_class_model, name)
        mixers.attach(model, architecture)
        batches = [packed(5, 4), packed(2, 3, 6, pad=2, seed=2)]
        gradients = []
        for recomputed in (False, True):
            if recomputed:
                model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
            model.zero_grad(set_to_none=True)
            losses = [last_hidden(model, batch).square().mean() for batch in batches]
            for loss in losses:
                loss.backward()
            gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_two_models_in_one_process_have_kernels_of_their_own(sources: Any, text_class_model: Any) -> None:
    architecture, first = made(sources, text_class_model, "lfm2")
    _, second = made(sources, text_class_model, "lfm2")
    mixers.attach(first, architecture)
    kernel = mixers.KERNELS["short_conv"]
    mixers.attach(second, architecture, {"short_conv": lambda *given: 2 * kernel(*given)})
    batch = packed(5, 4)
    one, other = last_hidden(first, batch), last_hidden(second, batch)
    assert not torch.allclose(one, other, atol=1e-2)
    assert torch.equal(one, last_hidden(first, batch))


def test_a_forward_that_bypasses_a_named_function_is_an_error(sources: Any, text_class_model: Any) -> None:
    architecture, model = made(sources, text_class_model, "lfm2")
    mixers.attach(model, architecture)
    bound = mixers.of(model)
    assert bound is not None
    mixer = next(iter(bound.by_path.values()))
    mixer.apart = mixer.own
    with pytest.raises(RuntimeError, match=r"layers\.0\.conv did not go through causal_conv1d_fn"):
        last_hidden(model, packed(5, 4))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"functions": {"causal_conv_2": "short_conv"}}, "does not call causal_conv_2"),
        ({"functions": {}}, "does not call any"),
        ({"functions": {"causal_conv1d_fn": "long_conv"}}, "no kernel of kind 'long_conv'"),
        ({"mixer_class": "Lfm2Attention", "functions": {"causal_conv1d_fn": "short_conv"}}, "does not call"),
        ({"layer_type": "sliding_attention"}, "0 layers of type sliding_attention and 2 modules Lfm2ShortConv"),
        ({"mixer_class": "Lfm2LongConv"}, "2 layers of type conv and 0 modules Lfm2LongConv"),
    ],
)
def test_facts_that_do_not_describe_the_model_are_refused(
    change: dict[str, Any], why: str, sources: Any, text_class_model: Any
) -> None:
    architecture, model = made(sources, text_class_model, "lfm2")
    (spec,) = architecture.mixers
    with pytest.raises(Refused, match=why):
        mixers.attach(model, replace(architecture, mixers=(replace(spec, **change),)))


def test_attaching_twice_is_an_error(sources: Any, text_class_model: Any) -> None:
    architecture, model = made(sources, text_class_model, "qwen3_5")
    mixers.attach(model, architecture)
    with pytest.raises(ValueError, match="already"):
        mixers.attach(model, architecture)


def test_every_kind_that_the_families_name_has_a_kernel(sources: Any) -> None:
    specs = [spec for a in sources.registry.architectures() for spec in a.mixers]
    kinds = {kind for spec in specs for kind in spec.functions.values()}
    assert kinds == set(mixers.KERNELS) == set(mixers.CALLED_AS)
