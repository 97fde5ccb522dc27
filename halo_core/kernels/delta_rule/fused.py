"""The gated delta rule by flash-linear-attention's kernels, told where documents begin by their borders.

Not for the CPU: that package's import already wants a GPU, so it is imported where its kernel is chosen and not before.
"""

from __future__ import annotations

from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from torch import Tensor

from halo_core.kernels.documents import Documents


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, documents: Documents) -> Tensor:
    """Return what the reference returns, [B, S, hv, dv]; see there for the arguments."""
    rows = value.shape[0]
    query, key, value, decay, beta = (
        tensor.flatten(0, 1).unsqueeze(0).contiguous() for tensor in (query, key, value, decay, beta)
    )  # its kernels take borders for one row; what they derive from them they keep for the same tensor
    read, _ = chunk_gated_delta_rule(
        query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True, output_final_state=False,
        cu_seqlens=documents.borders,
    )  # fmt: skip
    out: Tensor = read.squeeze(0).unflatten(0, (rows, -1)).to(query.dtype)
    return out
