"""The gated delta rule: a state per head that every token decays, corrects and reads, and every document starts anew.

`reference.py` specifies it token by token, `chunked.py` computes the same in matrix products.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from halo_core.kernels.documents import Documents


class DeltaRuleKernel(Protocol):
    """What every delta rule is; `reference.delta_rule` specifies it."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, documents: Documents
    ) -> Tensor:
        """Return what each token reads from the state, [B, S, hv, dv] in the dtype of `query`."""
        ...
