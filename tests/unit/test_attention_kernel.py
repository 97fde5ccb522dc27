"""Attention within documents: the specification by hand, sinks by rescaling, and what says where flash kernels run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_core.kernels import documents as borders
from halo_core.kernels.attention import choice, flash, reference, wide

EXACT = 1e-12
"""fp64, the same sums in another order."""
SEGMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 0], [1] * 11])
DOCUMENTS = borders.find(SEGMENTS)
TOKENS, HEADS, KEY_HEADS, SIZE = SEGMENTS.numel(), 4, 2, 8


def drawn(sinks: bool) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    shapes = {"query": (TOKENS, HEADS, SIZE), "key": (TOKENS, KEY_HEADS, SIZE), "value": (TOKENS, KEY_HEADS, SIZE)}
    given = {name: torch.randn(shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}
    return {**given, "sinks": torch.randn(HEADS, dtype=torch.float64, requires_grad=True) if sinks else None}


def with_gradients(kernel: Any, given: Mapping[str, Tensor | None], window: int | None) -> dict[str, Tensor]:
    out = kernel(**given, documents=DOCUMENTS, scale=0.3, window=window)
    torch.manual_seed(1)
    wanted = {name: tensor for name, tensor in given.items() if tensor is not None}
    gradients = torch.autograd.grad(out, list(wanted.values()), torch.randn(out.shape, dtype=out.dtype))
    return {"out": out, **dict(zip(wanted, gradients, strict=True))}


def assert_equal(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        torch.testing.assert_close(found[name], tensor, rtol=EXACT, atol=EXACT, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 2])
def test_a_token_reads_its_own_document_up_to_itself(sinks: bool, window: int | None) -> None:
    given = drawn(sinks)
    query, key, value, sink = (given[name] for name in ("query", "key", "value", "sinks"))
    assert query is not None and key is not None and value is not None
    query, key, value, sink = (None if t is None else t.detach() for t in (query, key, value, sink))
    out = reference.attend(query, key, value, DOCUMENTS, scale=0.3, window=window, sinks=sink)
    for row, segments in enumerate(SEGMENTS.tolist()):
        for position, segment in enumerate(segments):
            first = segments.index(segment) if segment else (0 if position < 2 else 10)
            first = max(first, position - (window or 99) + 1)
            token, seen = row * 11 + position, range(row * 11 + first, row * 11 + position + 1)
            for head in range(HEADS):
                weights = [math.exp(0.3 * float(query[token, head] @ key[other, head // 2])) for other in seen]
                total = sum(weights) + (math.exp(float(sink[head])) if sink is not None else 0.0)
                by_hand = sum(w / total * value[other, head // 2] for w, other in zip(weights, seen, strict=True))
                torch.testing.assert_close(out[token, head], by_hand, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 2, 50])
def test_document_by_document_is_the_same(sinks: bool, window: int | None) -> None:
    given = drawn(sinks)
    assert_equal(with_gradients(wide.attend, given, window), with_gradients(reference.attend, given, window))


class TextbookFlash:
    """torch's two operators as a paper has them, on the CPU in fp64; `asked` holds what they were called with."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def _scores(self, query: Tensor, key: Tensor, cuts: Tensor, scale: float, left: int | None) -> Tensor:
        window = None if left is None else left + 1
        scores = torch.einsum("thd,shd->hts", query, key.repeat_interleave(HEADS // KEY_HEADS, 1)) * scale
        place = torch.arange(TOKENS)
        document = torch.searchsorted(cuts, place.to(cuts.dtype), right=True)
        back = place.unsqueeze(1) - place
        visible = (document.unsqueeze(1) == document) & (back >= 0) & (back < (window or TOKENS))
        return scores.masked_fill(~visible, float("-inf"))

    def _flash_attention_forward(
        self, query: Tensor, key: Tensor, value: Tensor, cuts: Tensor, cuts_of_keys: Tensor, longest: int,
        longest_of_keys: int, dropout: float, is_causal: bool, debug: bool, *, scale: float,
        window_size_left: int | None, window_size_right: int | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.asked.append((longest, longest_of_keys, dropout, is_causal, debug, window_size_left, window_size_right))
        assert torch.equal(cuts, DOCUMENTS.borders) and torch.equal(cuts, cuts_of_keys)
        scores = self._scores(query, key, cuts, scale, window_size_left)
        out = torch.einsum("hts,shd->thd", scores.softmax(-1), value.repeat_interleave(HEADS // KEY_HEADS, 1))
        return out, scores.logsumexp(-1), torch.zeros(1), torch.ones(1), torch.empty(0)

    def _flash_attention_backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sums: Tensor, cuts: Tensor,
        cuts_of_keys: Tensor, longest: int, longest_of_keys: int, dropout: float, is_causal: bool, state: Tensor,
        unused: Tensor, *, scale: float, window_size_left: int | None, window_size_right: int | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.asked.append((longest, longest_of_keys, dropout, is_causal, False, window_size_left, window_size_right))
        assert (float(state), float(unused)) == (0.0, 1.0)
        keys, values = (tensor.repeat_interleave(HEADS // KEY_HEADS, 1) for tensor in (key, value))
        weights = (self._scores(query, key, cuts, scale, window_size_left) - log_sums.unsqueeze(-1)).exp()
        slope = torch.einsum("thd,shd->hts", gradient, values) - (gradient * out).sum(-1).t().unsqueeze(-1)
        slope = weights * slope * scale
        served = (KEY_HEADS, HEADS // KEY_HEADS)
        return (
            torch.einsum("hts,shd->thd", slope, keys),
            torch.einsum("hts,thd->shd", slope, query).unflatten(1, served).sum(2),
            torch.einsum("hts,thd->shd", weights, gradient).unflatten(1, served).sum(2),
        )


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 3])
def test_flash_with_sinks_is_exact_over_a_kernel_that_knows_none(
    sinks: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, textbook = drawn(sinks), TextbookFlash()
    right = with_gradients(reference.attend, given, window)
    fake = SimpleNamespace(ops=SimpleNamespace(aten=textbook), autograd=torch.autograd, logaddexp=torch.logaddexp,
                           exp=torch.exp, __version__="0")  # fmt: skip
    monkeypatch.setattr(flash, "torch", fake)
    assert_equal(with_gradients(flash.attend, given, window), right)
    left, to_the_right = (None, None) if window is None else (window - 1, 0)
    assert textbook.asked == [(11, 11, 0.0, True, False, left, to_the_right)] * 2


def test_flash_says_when_torch_returns_its_log_sums_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    class Padded(TextbookFlash):
        def _flash_attention_forward(self, *arguments: Any, **named: Any) -> tuple[Tensor, ...]:
            out, log_sums, *others = super()._flash_attention_forward(*arguments, **named)
            return out, log_sums.unsqueeze(0), *others

    fake = SimpleNamespace(ops=SimpleNamespace(aten=Padded()), autograd=torch.autograd, __version__="0")
    monkeypatch.setattr(flash, "torch", fake)
    with pytest.raises(NotImplementedError, match=r"shape \(1, 4, 22\) for packed rows, where \(4, 22\)"):
        flash.attend(**drawn(False), documents=DOCUMENTS, scale=1.0)  # type: ignore[arg-type]


def test_documents_of_one_token_are_not_said_to_be_that_short(monkeypatch: pytest.MonkeyPatch) -> None:
    singles = borders.find(torch.arange(1, TOKENS + 1).unsqueeze(0))
    assert singles.longest == 1
    seen: list[int] = []
    monkeypatch.setattr(flash._Flash, "apply", lambda *given: seen.append(given[5]))
    flash.attend(**drawn(False), documents=singles, scale=1.0)  # type: ignore[arg-type]
    assert seen == [2]


def test_the_rule_says_why_and_what_else() -> None:
    why, remedy = choice.flash_obstacle(dtype=torch.bfloat16, device=torch.device("cpu")) or ("", "")
    assert "CUDA" in why and remedy == choice.ELSEWHERE
    assert choice.head_obstacle(256) is None
    assert choice.head_obstacle(512) == "heads of 512 are wider than the 256 that flash kernels take"
    assert choice.head_obstacle(20) == "heads of 20 are no whole multiple of 8"
    assert choice.kernel("flash", 256) is flash.attend and choice.kernel("flash", 512) is wide.attend
    assert choice.kernel("reference", 512) is reference.attend
