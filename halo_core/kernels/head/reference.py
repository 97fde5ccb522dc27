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
    rows = torch.nonzero(targets != ignored).squeeze(-1)  # [N], for which the device is waited for
    chosen = of_supervised(hidden[rows], weight, targets[rows], softcap)
    return torch.zeros(targets.shape, dtype=chosen.dtype, device=hidden.device).index_put((rows,), chosen)


def of_supervised(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    """Return log p(target) of rows that all have a target: hidden [N, H], targets [N], result [N]."""
    logits = capped_logits(hidden, weight, softcap)
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)


def capped_logits(hidden: Tensor, weight: Tensor, softcap: float | None) -> Tensor:
    """Return the logits [N, V] of hidden [N, H], multiplied in its dtype, then at least fp32."""
    logits = hidden @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
