"""One optimizer step over its micro-batches: terms over one global denominator, clipping, the update.

With several processes each has its own rows of the same step; what is divided by, reported and clipped is of them all.
Not for choosing rows, rates or what follows a step: see `loop.py`. Shapes: B rows, S tokens, T = B*S, H hidden.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from halo_core.methods.method import Method, TokenBatch
from halo_core.optim.update import update
from halo_core.trainer import gradients
from halo_core.trainer.stopped import StepFault

if TYPE_CHECKING:
    from halo_core.sharding.sharded import Sharded

ModelHidden: TypeAlias = Callable[[nn.Module, TokenBatch], Tensor]
"""(model, batch) -> last hidden states [B, S, H]."""
TokenHead: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(hidden [T, H], targets [T]) -> log-probability of each target [T] fp32, 0 where the target is ignored."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What one step did: `loss` is the mean over the global batch, `grad_norm` the norm before clipping.

    tokens, supervised_tokens, documents and padding_tokens count the global batch; row_ids are this process's share.
    """

    loss: float
    grad_norm: float
    tokens: int
    supervised_tokens: int
    documents: int
    padding_tokens: int
    row_ids: tuple[int, ...]


def run_step(
    *,
    model: nn.Module,
    model_hidden: ModelHidden,
    head: TokenHead,
    method: Method,
    batches: Sequence[TokenBatch],
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float | None,
    device: torch.device,
    sharded: Sharded | None = None,
    sums_in_fp32: bool = True,
) -> StepOutcome:
    """Train on `batches` as one global batch and return what happened.

    `max_grad_norm` of 0 or None clips nothing; the norm is reported all the same.
    sharded: the model cut over processes, which all call this together, with the same number of batches.
    sums_in_fp32: whether narrower gradients of several batches add up in fp32, or in their own dtype.

    Raises:
        StepFault: no target is supervised, or loss or gradients are not finite; the optimizer was not stepped.
    """
    counted = _counted(method, batches, sharded, device)
    denominators = counted.denominators
    parameters = dict(model.named_parameters())
    loss = torch.zeros((), dtype=torch.float64, device=device)
    with gradients.fp32_accumulation(parameters, len(batches) if sums_in_fp32 else 1) as sums:
        for number, batch in enumerate(batches, start=1):
            if sharded is not None:
                sharded.micro_batch(is_last=number == len(batches))
            terms = batch_sums(model, model_hidden, head, method, batch.to(device))
            shares = [total / denominators[name] for name, total in terms.items() if denominators[name]]
            part = torch.stack(shares).sum()
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
    found = gradients.gathered(parameters, sums)
    if sharded is None:
        norm = gradients.global_norm(found).to(device)
    else:
        loss, norm = sharded.loss_and_norm(loss, found.values())
    loss_value, norm_value = torch.stack([loss, norm.to(loss.dtype)]).tolist()  # waits for the device, once for both
    if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
        fault = _not_finite(parameters, found, loss_value, sharded)
        optimizer.zero_grad(set_to_none=True)
        raise fault
    scale = gradients.clip_coefficient(norm, max_grad_norm) if max_grad_norm else None
    update(optimizer, parameters, found, scale)
    optimizer.zero_grad(set_to_none=True)
    return StepOutcome(
        loss=loss_value,
        grad_norm=norm_value,
        tokens=counted.tokens,
        supervised_tokens=counted.supervised_tokens,
        documents=counted.documents,
        padding_tokens=counted.padding_tokens,
        row_ids=tuple(row for batch in batches for row in batch.row_ids),
    )


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """The global batch in numbers: each term's denominator, real tokens, targets to be learnt, rows or pieces of rows,
    positions that only fill."""

    denominators: dict[str, float]
    tokens: int
    supervised_tokens: int
    documents: int
    padding_tokens: int


def _counted(
    method: Method, batches: Sequence[TokenBatch], sharded: Sharded | None, device: torch.device
) -> _Counted:
    """Return the counts over all batches of all processes.

    Raises:
        StepFault: every denominator is zero, so nothing could be learnt; on every process or on none.
    """
    totals: Counter[str] = Counter()
    for batch in batches:
        totals.update(method.denominators(batch))
    rows = [row for batch in batches for row in batch.row_ids]
    counts = [
        float(sum(batch.tokens for batch in batches)), float(sum(batch.supervised_tokens for batch in batches)),
        float(len(rows)), float(sum(batch.padding_tokens for batch in batches)), *totals.values(),
    ]  # fmt: skip
    if sharded is not None:
        counts = sharded.totals(counts, device)
    tokens, supervised_tokens, num_rows, padding_tokens, *denominators = counts
    if not any(denominators):
        longest = max(batch.targets.shape[1] for batch in batches)
        about = f" (the first is row {rows[0]}, the longest has {longest} tokens)" if rows else ""
        raise StepFault(
            what=f"none of the {num_rows:.0f} rows of this step has a supervised token{about}",
            remedy="raise max_length, or set overlong: drop, or check which turns are supervised",
        )
    return _Counted(
        denominators=dict(zip(totals, denominators, strict=True)), tokens=int(tokens),
        supervised_tokens=int(supervised_tokens), documents=int(num_rows), padding_tokens=int(padding_tokens),
    )  # fmt: skip


def batch_sums(
    model: nn.Module, model_hidden: ModelHidden, head: TokenHead, method: Method, batch: TokenBatch
) -> dict[str, Tensor]:
    """Return each of the method's terms summed over one batch, fp32 scalars."""
    hidden = model_hidden(model, batch)

    def log_probabilities(targets: Tensor) -> Tensor:
        return head(hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)).view(targets.shape)

    return method.sums(batch, log_probabilities)


def _not_finite(
    parameters: dict[str, nn.Parameter], found: dict[str, Tensor], loss: float, sharded: Sharded | None
) -> StepFault:
    search = gradients.first_not_finite if sharded is None else sharded.first_not_finite
    weight = search(parameters)
    if weight is not None:
        return StepFault(
            what=f"the weight {weight} holds a value that is not finite (loss {loss})",
            remedy="resume from the last checkpoint with a lower learning_rate, or check the model's files",
        )
    gradient = search(found)
    place = f"first in the gradient of {gradient}" if gradient else "every single gradient is finite, their norm is not"
    return StepFault(
        what=f"loss {loss} or its gradient is not finite ({place})",
        remedy="lower learning_rate or max_grad_norm, or add warmup_steps, and resume from the last checkpoint",
    )
