"""The values of tensors that are stored packed, made bf16 for the part that is asked for, one expert at a time.

Not for finding which tensors those are (`packed.py`), nor for packing: a trained model is written as bf16.
Source: OCP Microscaling Formats (MX) 1.0: elements E2M1, one E8M0 scale for 32 of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BIAS = 127
"""Of a scale: byte b stands for 2 ** (b - 127)."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of an element by its lower three bits; the fourth is its sign."""


class DequantisedSlice:
    """A packed tensor [E, C, R] as safetensors gives a slice of a file: indexing reads and returns bf16.

    Every index of the first dimension is read, made bf16 and let go by itself, so that beside the result no more than
    one expert is in memory.
    """

    def __init__(self, blocks: Any, scales: Any) -> None:
        """Take the slices of the two stored tensors, or the tensors: [E, R, G, 16] and [E, R, G] uint8."""
        self.blocks, self.scales = blocks, scales
        experts, rows, groups, width = _shape(blocks)
        self.shape = (experts, groups * 2 * width, rows)

    def get_shape(self) -> list[int]:
        """Return the shape as bf16."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the format's word for what indexing returns."""
        return "BF16"

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part at `index`: `...`, a slice, or a tuple of slices without steps."""
        experts, columns, rows = self._bounds(index)
        found = torch.empty(len(experts), len(columns), len(rows), dtype=torch.bfloat16)
        if found.numel() == 0:
            return found
        for number, expert in enumerate(experts):
            place = (slice(expert, expert + 1), slice(rows.start, rows.stop))
            whole = dequantised(self.blocks[place][0], self.scales[place][0])
            found[number] = whole[columns.start : columns.stop]
        return found

    def _bounds(self, index: Any) -> list[range]:
        given = () if index is ... else index if isinstance(index, tuple) else (index,)
        if not all(isinstance(part, slice) and part.step in (None, 1) for part in given) or len(given) > 3:
            raise NotImplementedError(f"a packed tensor cannot be read at {index}")
        given = (*given, *(slice(None) for _ in range(3 - len(given))))
        return [range(*part.indices(size)) for part, size in zip(given, self.shape, strict=True)]


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values [C, R] of one expert: blocks [R, G, 16] uint8, scales [R, G] uint8. Exact in bf16."""
    # Twice an element times half its scale: the largest scale itself is no bf16 number, and half of it is.
    magnitudes = 2 * torch.tensor(MAGNITUDES, dtype=torch.bfloat16)
    elements = torch.cat([magnitudes, -magnitudes])
    every_byte = torch.arange(256)
    pairs = torch.stack([elements[every_byte & 15], elements[every_byte >> 4]], dim=-1)
    powers = torch.ldexp(torch.ones(256), every_byte - BIAS - 1).to(torch.bfloat16)
    rows, groups, width = blocks.shape
    values = pairs[blocks.int()].view(rows, groups, 2 * width)
    values *= powers[scales.int()].unsqueeze(-1)
    return values.view(rows, groups * 2 * width).t()


def _shape(stored: Any) -> tuple[int, ...]:
    return tuple(stored.shape) if isinstance(stored, Tensor) else tuple(stored.get_shape())
