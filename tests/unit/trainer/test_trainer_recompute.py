"""Recomputed layers: the same bits as kept ones, and the first pass's experts under noise. Not for memory or speed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halo_core import registry
from halo_core.trainer.recompute import enable_recompute, replayed_choices

ARCHITECTURES = {architecture.name: architecture for architecture in registry.load().architectures()}
MOE = sorted(name for name, architecture in ARCHITECTURES.items() if architecture.spec.is_moe)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 250, (2, 9), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_gradients_are_the_same_bits(name: str, text_class_model: Any) -> None:
    torch.manual_seed(0)
    model = text_class_model(ARCHITECTURES[name]).train()
    plain = gradients(model)
    calls: list[int] = []
    layer = next(m for m in model.modules() if type(m).__name__ == ARCHITECTURES[name].spec.decoder_layer)
    next(layer.children()).register_forward_pre_hook(lambda *_: calls.append(1))
    enable_recompute(model, routes=ARCHITECTURES[name].spec.is_moe)
    recomputed = gradients(model)
    assert len(calls) == 2, "the layer was computed again"
    assert plain.keys() == recomputed.keys()
    for key in plain:
        assert torch.equal(plain[key], recomputed[key]), key


def test_every_spelling_of_top_k_is_replayed_in_order_with_fresh_scores_and_gradients() -> None:
    first = torch.tensor([[1.0, 4.0, 2.0, 3.0], [8.0, 5.0, 7.0, 6.0]])
    second = (-first).requires_grad_()

    def choose(scores: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.topk(scores, 2), scores.topk(3, dim=-1), torch.topk(input=scores, k=1, dim=0),
                 scores.topk(2, 1, False), torch.topk(scores, 2, sorted=False)]
        assert all(values is pair.values and indices is pair.indices for pair in found for values, indices in [pair])
        return [tensor for pair in found for tensor in pair]

    expected = choose(first)
    keeping, replaying = replayed_choices()
    with keeping:
        kept = choose(first)
    with replaying:
        again = choose(second)
    assert all(torch.equal(*pair) for pair in zip(kept, expected, strict=True)), "the first pass is torch's own"
    assert all(torch.equal(*pair) for pair in zip(again[1::2], expected[1::2], strict=True))
    assert all(torch.equal(*pair) for pair in zip(again[::2], [-scores for scores in expected[::2]], strict=True))
    again[0].sum().backward()
    assert torch.equal(second.grad, torch.tensor([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]))


def chosen_experts(name: str, text_class_model: Any, *, replay: bool) -> list[bool]:
    """Return, per MoE layer, whether both passes chose the same experts although the second saw a noisy input."""
    torch.manual_seed(0)
    model = text_class_model(ARCHITECTURES[name]).train()
    experts = [m for m in model.modules() if type(m).__name__ == ARCHITECTURES[name].moe_block.experts_class]
    routers = [m for m in model.modules() if type(m).__name__ == ARCHITECTURES[name].moe_block.router_spec.router_class]
    seen: dict[int, list[torch.Tensor]] = {index: [] for index in range(len(experts))}
    for index, module in enumerate(experts):
        module.register_forward_pre_hook(lambda _, args, index=index: seen[index].append(args[1].clone()))
    for module in routers:
        passes = [0]

        def noisy(_: Any, args: Any, passes: list[int] = passes) -> Any:
            passes[0] += 1
            return (args[0] + torch.randn_like(args[0]), *args[1:]) if passes[0] % 2 == 0 else args

        module.register_forward_pre_hook(noisy)
    if replay:
        enable_recompute(model, routes=True)
    else:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    gradients(model)
    assert routers and all(len(passes) == 2 for passes in seen.values())
    return [torch.equal(first, second) for first, second in seen.values()]


@pytest.mark.parametrize("name", MOE[:2])
def test_recomputation_sends_tokens_to_the_experts_of_the_first_pass(name: str, text_class_model: Any) -> None:
    assert all(chosen_experts(name, text_class_model, replay=True))
    assert not all(chosen_experts(name, text_class_model, replay=False)), "the noise changes the choice without replay"
