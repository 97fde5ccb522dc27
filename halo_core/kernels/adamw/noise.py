"""The random bits that weights are rounded by: a function of seed, name, step and an element's place in the tensor.

Not a generator: nothing is kept, so replicas, resumed runs and other layouts draw the same bits for the same element.
The element at row-major offset o of the whole tensor has word o % 4 of Philox4x32-10 under the key of (seed, name) at
counter (o // 4, step), each 64 bits; a word's low 16 bits round the weight, its high 16 bits the second moment.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), whose published vectors a test repeats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from halo_core.kernels.adamw.boxes import Box

WORDS = 4
"""Words of one Philox call, for as many neighbouring elements."""
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
BLOCK = 1 << 16
"""Elements drawn at once, so that what is computed with stays near the processor."""

_LOW = 0xFFFFFFFF


def key_of(seed: int, name: str) -> int:
    """Return the key of a parameter, 64 bits. name: its key in the model's state dict."""
    text = (seed % 2**64).to_bytes(8, "little") + name.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def philox(key: int, counters: Tensor, step: int) -> Tensor:
    """Return Philox4x32-10 at (counters, step): [N, 4] int64, every word from 0 to 2**32 - 1.

    key: 64 bits, the low half first. counters [N] int64: the lower 64 bits of the counter. step: the upper 64.
    """
    first, second = counters & _LOW, (counters >> 32) & _LOW
    third, fourth = torch.full_like(counters, step & _LOW), torch.full_like(counters, step >> 32 & _LOW)
    key_low, key_high = key & _LOW, key >> 32 & _LOW
    for _ in range(ROUNDS):
        high_one, low_one = _product(first, MULTIPLIERS[0])
        high_two, low_two = _product(third, MULTIPLIERS[1])
        first, second = high_two.bitwise_xor_(second).bitwise_xor_(key_low), low_two
        third, fourth = high_one.bitwise_xor_(fourth).bitwise_xor_(key_high), low_one
        key_low, key_high = (key_low + KEY_STEPS[0]) & _LOW, (key_high + KEY_STEPS[1]) & _LOW
    return torch.stack((first, second, third, fourth), dim=-1)


def words(key: int, step: int, offsets: Tensor, length: int) -> Tensor:
    """Return the words of rows of neighbouring elements: [R, length] int64.

    offsets [R] int64: where each row begins in the whole tensor. length: elements of a row.
    """
    first = offsets // WORDS
    quads = (length + 2 * (WORDS - 1)) // WORDS  # enough for a row that begins at the last word of its first call
    counters = (first.unsqueeze(-1) + torch.arange(quads)).flatten()
    drawn = philox(key, counters, step).view(len(offsets), quads * WORDS)
    if len(offsets) == 1:
        begin = int(offsets[0]) % WORDS
        return drawn[:, begin : begin + length]
    return drawn.gather(1, (offsets % WORDS).unsqueeze(-1) + torch.arange(length))


def drawn(key: int, step: int, boxes: Sequence[Box], block: int = BLOCK) -> Iterator[tuple[slice, Tensor]]:
    """Yield (which of this process's elements in row-major order, their words [n] int64), until all have some.

    block: about how many elements at once.
    """
    for box in boxes:
        for part in range(0, box.length, block):
            length = min(block, box.length - part)
            # Rows that follow one another in memory are drawn together.
            follow = length == box.length and bool((box.local.diff() == length).all())
            together = max(1, block // length) if follow else 1
            for row in range(0, len(box.local), together):
                offsets = box.offset[row : row + together] + part
                begin = int(box.local[row]) + part
                yield slice(begin, begin + len(offsets) * length), words(key, step, offsets, length).flatten()


def _product(values: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of values * multiplier, both below 2**32.

    The product itself would not fit into 63 bits. Multiplied by `multiplier - 2**32` it does, and the difference is
    `values` in the high half.
    """
    product = values * (multiplier - 2**32)
    return ((product >> 32).add_(values)).bitwise_and_(_LOW), product.bitwise_and_(_LOW)
