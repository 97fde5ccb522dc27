"""The short convolution in one pass over its input forward, and in two backward, as Triton kernels.

Not for the CPU, unless Triton interprets. Shapes: B rows, C channels, S positions, T = B*S, K taps.

A position and its channels lie together in memory, as they do after a projection. Sums are fp32; the gradients of
weight and bias are summed in a fixed order, first within stretches of positions, then over stretches, so that they
are the same in every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halo_core.kernels.documents import Documents

BLOCK_POSITIONS, BLOCK_CHANNELS = 32, 128
"""What one program holds at a time."""

STRETCHES = 64
"""The most parts into which positions are cut for the sums over them."""


def short_conv(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, documents: Documents
) -> Tensor:
    """Return what the reference returns, [B, C, S]; see there for the arguments. At most 7 taps."""
    if activation not in (None, "silu"):
        raise NotImplementedError(f"the fused short convolution has no activation {activation!r}")
    rows, channels, width = inputs.shape
    flat = inputs.transpose(1, 2).reshape(rows * width, channels)
    numbers = documents.numbers.reshape(-1)
    out: Tensor = _ShortConv.apply(flat, weight, bias, numbers, activation == "silu")
    return out.view(rows, width, channels).transpose(1, 2)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor, silu: bool
    ) -> Tensor:
        inputs, weight = inputs.contiguous(), weight.contiguous()
        tokens, channels = inputs.shape
        out = torch.empty_like(inputs)
        if out.numel():
            _forward[_grid(tokens, channels)](
                inputs, weight, weight if bias is None else bias, numbers, out, tokens, channels,
                TAPS=weight.shape[1], HAS_BIAS=bias is not None, SILU=silu, **_blocks(),
            )  # fmt: skip
        context.save_for_backward(inputs, weight, bias, numbers)
        context.silu = silu
        return out

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, bias, numbers = context.saved_tensors
        (tokens, channels), taps = inputs.shape, weight.shape[1]
        gradient = gradients[0].contiguous()
        to_inputs = torch.empty_like(inputs)
        if not inputs.numel():
            return to_inputs, torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias), None, None
        before = torch.empty_like(inputs) if context.silu else gradient  # the gradient before the activation
        # A row for each tap, then one for the bias: a power of two for Triton.
        slots = triton.next_power_of_2(taps + 1)
        tiles = triton.cdiv(tokens, BLOCK_POSITIONS)
        stretch = triton.cdiv(tiles, STRETCHES) * BLOCK_POSITIONS
        stretches = triton.cdiv(tokens, stretch)
        parts = torch.empty(stretches, slots, channels, dtype=torch.float32, device=inputs.device)
        _backward_weight[(stretches, triton.cdiv(channels, BLOCK_CHANNELS))](
            inputs, weight, weight if bias is None else bias, numbers, gradient, before, parts, tokens, channels,
            stretch, TAPS=taps, SLOTS=slots, HAS_BIAS=bias is not None, SILU=context.silu, **_blocks(),
        )  # fmt: skip
        _backward_inputs[_grid(tokens, channels)](
            before, weight, numbers, to_inputs, tokens, channels, TAPS=taps, **_blocks()
        )
        total = parts.sum(dim=0)
        to_bias = None if bias is None else total[taps].to(bias.dtype)
        return to_inputs, total[:taps].t().to(weight.dtype), to_bias, None, None


def _grid(tokens: int, channels: int) -> tuple[int, int]:
    return triton.cdiv(tokens, BLOCK_POSITIONS), triton.cdiv(channels, BLOCK_CHANNELS)


def _blocks() -> dict[str, int]:
    return {"BLOCK_T": BLOCK_POSITIONS, "BLOCK_C": BLOCK_CHANNELS}


@triton.jit
def _tap(inputs, numbers, place, own, inside, channel, wide, channels, back: tl.constexpr):
    """Return the inputs `back` positions earlier [BLOCK_T, BLOCK_C] fp32, zero where that is another document."""
    there = inside & (place >= back)
    document = tl.load(numbers + place - back, mask=there, other=-1)
    there = there & (document == own)
    found = tl.load(
        inputs + (place - back)[:, None] * channels + channel[None, :], mask=there[:, None] & wide[None, :], other=0.0
    )
    return found.to(tl.float32)


@triton.jit
def _sum(
    inputs, weight, bias, numbers, place, own, inside, channel, wide, channels,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Return the convolution before its activation, [BLOCK_T, BLOCK_C] fp32."""
    total = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for back in tl.static_range(TAPS):
        tap = tl.load(weight + channel * TAPS + (TAPS - 1 - back), mask=wide, other=0.0).to(tl.float32)
        total += _tap(inputs, numbers, place, own, inside, channel, wide, channels, back) * tap[None, :]
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=wide, other=0.0).to(tl.float32)[None, :]
    return total


# How many positions there are changes from batch to batch, so no kernel is compiled anew for kinds of that number.
@triton.jit(do_not_specialize=["tokens"])
def _forward(
    inputs, weight, bias, numbers, out, tokens, channels,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside, wide = place < tokens, channel < channels
    own = tl.load(numbers + place, mask=inside, other=-1)
    total = _sum(
        inputs, weight, bias, numbers, place, own, inside, channel, wide, channels, TAPS, HAS_BIAS, BLOCK_T, BLOCK_C
    )
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(
        out + place[:, None] * channels + channel[None, :], total.to(out.dtype.element_ty),
        mask=inside[:, None] & wide[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "stretch"])
def _backward_weight(
    inputs, weight, bias, numbers, gradient, before, parts, tokens, channels, stretch,
    TAPS: tl.constexpr, SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of weight and bias over one stretch of positions into `parts` [stretch, SLOTS, C].

    With an activation, the gradient before it goes to `before` [T, C].
    """
    part = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    wide = channel < channels
    slot = tl.arange(0, SLOTS)
    sums = tl.zeros((SLOTS, BLOCK_C), dtype=tl.float32)
    for begin in range(0, stretch, BLOCK_T):
        place = part * stretch + begin + tl.arange(0, BLOCK_T)
        inside = place < tokens
        own = tl.load(numbers + place, mask=inside, other=-1)
        where = place[:, None] * channels + channel[None, :]
        both = inside[:, None] & wide[None, :]
        slope = tl.load(gradient + where, mask=both, other=0.0).to(tl.float32)
        if SILU:
            total = _sum(
                inputs, weight, bias, numbers, place, own, inside, channel, wide, channels,
                TAPS, HAS_BIAS, BLOCK_T, BLOCK_C,
            )  # fmt: skip
            gate = 1.0 / (1.0 + tl.exp(-total))
            slope = slope * gate * (1.0 + total * (1.0 - gate))
            tl.store(before + where, slope.to(before.dtype.element_ty), mask=both)
        for back in tl.static_range(TAPS):
            found = _tap(inputs, numbers, place, own, inside, channel, wide, channels, back)
            one = tl.sum(slope * found, axis=0)
            sums += tl.where((slot == TAPS - 1 - back)[:, None], one[None, :], 0.0)
        if HAS_BIAS:
            sums += tl.where((slot == TAPS)[:, None], tl.sum(slope, axis=0)[None, :], 0.0)
    tl.store(parts + (part * SLOTS + slot)[:, None] * channels + channel[None, :], sums, mask=wide[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _backward_inputs(
    before, weight, numbers, to_inputs, tokens, channels,
    TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gather the gradient of each input from the positions of its document that read it."""
    place = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside, wide = place < tokens, channel < channels
    own = tl.load(numbers + place, mask=inside, other=-1)
    total = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for ahead in tl.static_range(TAPS):
        there = place + ahead < tokens
        document = tl.load(numbers + place + ahead, mask=there, other=-1)
        there = there & (document == own)
        tap = tl.load(weight + channel * TAPS + (TAPS - 1 - ahead), mask=wide, other=0.0).to(tl.float32)
        found = tl.load(
            before + (place + ahead)[:, None] * channels + channel[None, :],
            mask=there[:, None] & wide[None, :], other=0.0,
        )  # fmt: skip
        total += found.to(tl.float32) * tap[None, :]
    tl.store(
        to_inputs + place[:, None] * channels + channel[None, :], total.to(to_inputs.dtype.element_ty),
        mask=inside[:, None] & wide[None, :],
    )  # fmt: skip
