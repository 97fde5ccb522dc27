"""AdamW over many parameters in one launch and one pass over memory, in Triton; the same bits as `reference.py`.

Not for devices without Triton: `choice.py` says where it runs. Memory read and written is 14 bytes an element where
all is bf16. No multiplication is fused with an addition, roots and quotients are rounded as IEEE 754 says, and small
numbers are not flushed to zero: those are the conditions for the same bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from halo_core.kernels.adamw.boxes import Box
from halo_core.kernels.adamw.chunks import Chunks, chunks
from halo_core.kernels.adamw.noise import KEY_STEPS, MULTIPLIERS, ROUNDS
from halo_core.kernels.adamw.parts import Part
from halo_core.kernels.adamw.rates import Rates

BLOCK = 1024
"""Elements of a program. With four warps the fastest of eight pairs: receipts/optimizer/h200-blocks.json."""
WARPS = 4
ALIGNMENT = 16
"""Bytes that one thread reads at once."""
KEPT_CHUNKS = 64_000_000
"""Chunks that are kept for later steps, over all choices of parameters: 65 billion elements at 32 bytes a chunk.

Several times what fits on one device, so that a step never makes anew what the step before it made: on an H200 a step
of 4.1 billion parameters took 14 ms with its chunks at hand, 1,338 ms when it made them (the same receipt).
"""

_EXACT, _ROUNDED, _MASTER = 0, 1, 2
_RULES = {"exact": _EXACT, "rounded": _ROUNDED, "master": _MASTER}
# Columns of a parameter's row: addresses of weight, moments, master and gradient, then the key of its noise.
_COLUMNS, _GRADIENT = 6, 4

_A, _B = (tl.constexpr(value) for value in MULTIPLIERS)
_KEY_A, _KEY_B = (tl.constexpr(value) for value in KEY_STEPS)
_PHILOX_ROUNDS = tl.constexpr(ROUNDS)
_ROW = tl.constexpr(_COLUMNS)
_IS_EXACT, _IS_ROUNDED, _IS_MASTER = tl.constexpr(_EXACT), tl.constexpr(_ROUNDED), tl.constexpr(_MASTER)


class Fused:
    """The kernel with what it keeps from step to step: how parameters are divided among programs.

    block: elements of a program. warps: of a program.
    """

    def __init__(self, *, block: int = BLOCK, warps: int = WARPS) -> None:
        self.block = block
        self.warps = warps
        self._tables: OrderedDict[tuple[Any, ...], tuple[Chunks, list[Sequence[Box]]]] = OrderedDict()
        self._ones: dict[torch.device, Tensor] = {}

    def __call__(self, parts: Sequence[Part], scale: Tensor | None) -> None:
        """Step every part in place: one launch for those of a rule, and one for what is left over at their ends."""
        alike: dict[tuple[Any, ...], list[Part]] = {}
        for part in parts:  # by identity, which costs the host less than to compare eight numbers each
            alike.setdefault((part.rule, part.gradient.dtype, part.step, id(part.rates)), []).append(part)
        for (rule, dtype, step, _), own in alike.items():
            device = own[0].weight.device
            if scale is None:
                if device not in self._ones:
                    self._ones[device] = torch.ones((), dtype=torch.float32, device=device)
                scale = self._ones[device]
            with torch.cuda.device_of(own[0].weight):  # programs start on the current device
                self._launch(own, scale, step, own[0].rates, _RULES[rule], dtype == torch.bfloat16)

    def _launch(
        self, parts: list[Part], scale: Tensor, step: int, rates: Rates, rule: int, short_gradient: bool
    ) -> None:
        device = parts[0].weight.device
        rows = _rows(parts)
        straight = (rows[:, :_GRADIENT] % ALIGNMENT == 0).all(axis=1)
        gradients_aligned = bool((rows[:, _GRADIENT] % ALIGNMENT == 0).all())
        found = self._chunks(parts, straight.tolist(), device)
        table = _sent(rows, device)
        for own, is_whole in ((found.whole, True), (found.ragged, False)):
            if len(own):
                _adamw[(len(own),)](
                    own, table, scale, step, **vars(rates), RULE=rule, SHORT_GRADIENT=short_gradient, WHOLE=is_whole,
                    GRADIENT_ALIGNED=is_whole and gradients_aligned, BLOCK=self.block,
                    num_warps=self.warps, enable_fp_fusion=False, enable_reflect_ftz=False,
                )  # fmt: skip

    def _chunks(self, parts: list[Part], straight: list[bool], device: torch.device) -> Chunks:
        # Boxes are told apart by identity, so they are kept beside what was made of them.
        boxes = [part.boxes for part in parts]
        wanted = (device, tuple(map(id, boxes)), tuple(straight))
        if wanted not in self._tables:
            self._tables[wanted] = chunks(boxes, straight, self.block).to(device), boxes
            sizes = [table.count for table, _ in self._tables.values()]
            while sum(sizes) > KEPT_CHUNKS and len(sizes) > 1:
                self._tables.popitem(last=False)
                sizes.pop(0)
        self._tables.move_to_end(wanted)
        return self._tables[wanted][0]


def _rows(parts: Sequence[Part]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a row per part: addresses of weight, moments, master and gradient, and the key of its noise."""
    rows = np.empty((len(parts), _COLUMNS), dtype=np.int64)
    for row, part in zip(rows, parts, strict=True):
        master = 0 if part.master is None else part.master.data_ptr()
        key = part.key - (1 << 64) if part.key >> 63 else part.key
        row[:] = (
            part.weight.data_ptr(), part.first.data_ptr(), part.second.data_ptr(), master, part.gradient.data_ptr(), key
        )  # fmt: skip
    return rows


def _sent(rows: np.ndarray[Any, np.dtype[np.int64]], device: torch.device) -> Tensor:
    """Return the rows on the device; they travel while the host goes on."""
    table = torch.from_numpy(rows)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@triton.jit
def _from_bf16(bits):  # type: ignore[no-untyped-def]
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _cut(value, up):  # type: ignore[no-untyped-def]
    """Return the upper half of an fp32 number's bits plus `up`; what is no number is left alone."""
    bits = value.to(tl.uint32, bitcast=True)
    return (tl.where(value == value, bits + up, bits) >> 16).to(tl.uint16)


@triton.jit
def _nearest(value):  # type: ignore[no-untyped-def]
    bits = value.to(tl.uint32, bitcast=True)
    return _cut(value, 0x7FFF + ((bits >> 16) & 1))


@triton.jit
def _product(value, factor):  # type: ignore[no-untyped-def]
    product = value.to(tl.uint64) * factor
    return (product >> 32).to(tl.uint32), (product & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _words(key, step, quads):  # type: ignore[no-untyped-def]
    """Return Philox's four words for each of `quads` [Q] int64, in the order of elements: [4 * Q] uint32."""
    c0, c1 = (quads & 0xFFFFFFFF).to(tl.uint32), (quads >> 32).to(tl.uint32)
    c2 = (quads * 0 + (step & 0xFFFFFFFF)).to(tl.uint32)
    c3 = (quads * 0 + (step >> 32)).to(tl.uint32)
    k0, k1 = (key & 0xFFFFFFFF).to(tl.uint32), ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(_PHILOX_ROUNDS):
        high0, low0 = _product(c0, _A)
        high1, low1 = _product(c2, _B)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = (k0.to(tl.uint64) + _KEY_A).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + _KEY_B).to(tl.uint32)
    return tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))


@triton.jit(do_not_specialize=["step"])
def _adamw(  # type: ignore[no-untyped-def]
    chunks, table, scale, step, decay, beta1, rest1, beta2, rest2, step_size, second_root, eps,
    RULE: tl.constexpr, SHORT_GRADIENT: tl.constexpr, WHOLE: tl.constexpr, GRADIENT_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Step one chunk. SHORT_GRADIENT: it is bf16. WHOLE: see `Chunks`."""
    chunk = chunks + tl.program_id(0).to(tl.int64) * 4
    row = table + tl.load(chunk) * _ROW
    local = tl.load(chunk + 1)
    offset = tl.load(chunk + 2)
    short = tl.uint16 if RULE == _IS_ROUNDED else tl.float32
    weight = tl.load(row).to(tl.pointer_type(tl.float32 if RULE == _IS_EXACT else tl.uint16))
    first = tl.load(row + 1).to(tl.pointer_type(short))
    second = tl.load(row + 2).to(tl.pointer_type(short))
    master = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    gradient = tl.load(row + 4).to(tl.pointer_type(tl.uint16 if SHORT_GRADIENT else tl.float32))
    if WHOLE:
        local = tl.multiple_of(local, 8)
        weight = tl.multiple_of(weight, 16)
        first = tl.multiple_of(first, 16)
        second = tl.multiple_of(second, 16)
        master = tl.multiple_of(master, 16)
        if GRADIENT_ALIGNED:
            gradient = tl.multiple_of(gradient, 16)
        index = tl.arange(0, BLOCK)
        inside = None
    else:
        # The block begins at the element before, so that four neighbours always share one call.
        lead = (offset & 3).to(tl.int32)
        local -= lead
        index = tl.arange(0, BLOCK)
        inside = (index >= lead) & (index < lead + tl.load(chunk + 3).to(tl.int32))
    weight += local
    first += local
    second += local
    master += local
    gradient += local

    g = tl.load(gradient + index, mask=inside)
    m = tl.load(first + index, mask=inside)
    v = tl.load(second + index, mask=inside)
    if RULE == _IS_MASTER:
        p = tl.load(master + index, mask=inside)
    else:
        p = tl.load(weight + index, mask=inside)
    if SHORT_GRADIENT:
        g = _from_bf16(g)
    if RULE == _IS_ROUNDED:
        p = _from_bf16(p)
        m = _from_bf16(m)
        v = _from_bf16(v)
    g = g * tl.load(scale)
    m = m * beta1 + g * rest1
    v = v * beta2 + g * g * rest2
    root = tl.math.sqrt_rn(v) * second_root + eps
    p = p * decay - tl.math.div_rn(m, root) * step_size
    if RULE == _IS_ROUNDED:
        words = _words(tl.load(row + 5), step.to(tl.int64), (offset >> 2) + tl.arange(0, BLOCK // 4))
        tl.store(weight + index, _cut(p, words & 0xFFFF), mask=inside)
        tl.store(first + index, _nearest(m), mask=inside)
        tl.store(second + index, _cut(v, words >> 16), mask=inside)
    else:
        tl.store(first + index, m, mask=inside)
        tl.store(second + index, v, mask=inside)
        if RULE == _IS_MASTER:
            tl.store(master + index, p, mask=inside)
            tl.store(weight + index, _nearest(p), mask=inside)
        else:
            tl.store(weight + index, p, mask=inside)
