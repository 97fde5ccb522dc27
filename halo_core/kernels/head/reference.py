"""Log-probabilities of target tokens in plain torch: the specification of the head kernel.

Not for whole logits: only rows with a target are multiplied with the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED = -100
"""The target that asks for nothing. Source: torch.nn.functional.cross_entropy's `ignore_index`."""


def log_probabilities(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None, ignored: int = IGNORED
) -> Tensor:
    """Return log p(target) per row, [T] fp32, and 0 where the target is `ignored`.

    hidden [T, H]; weight [V, H] of the same dtype; targets [T] int64.
    softcap: logits become `softcap * tanh(logits / softcap)`. Everything after the multiplication is fp32 (fp64 for
        fp64 input, so that the specification can be checked more precisely than it is used).

    With no supervised row at all the result is zeros that still depend on `hidden` and `weight`.
    """
    rows = torch.nonzero(targets != ignored).squeeze(-1)  # [N]
    logits = hidden[rows] @ weight.T  # [N, V]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    chosen = logits.gather(-1, targets[rows].unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)  # [N]
    return torch.zeros(targets.shape, dtype=chosen.dtype, device=hidden.device).index_put((rows,), chosen)
