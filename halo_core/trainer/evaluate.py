"""Evaluation: every row exactly once, without gradients, one mean over all supervised tokens of all processes.

Not for deciding when to evaluate or what is best: see `policy.py`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from halo_core.data.units import num_rows
from halo_core.methods.method import Method
from halo_core.sharding.sharded import Sharded
from halo_core.trainer.report import EvaluationReport
from halo_core.trainer.step import ModelHidden, TokenHead, batch_sums
from halo_core.trainer.stopped import StepFault


@torch.no_grad()
def evaluate(
    *,
    model: nn.Module,
    model_hidden: ModelHidden,
    head: TokenHead,
    method: Method,
    rows: Sequence[Any],
    batches: Sequence[Sequence[int]],
    pad_id: int,
    device: torch.device,
    step: int,
    epoch: float,
    abandoned: Callable[[], bool] = lambda: False,
    sharded: Sharded | None = None,
) -> EvaluationReport | None:
    """Return the loss over all rows, or None when `abandoned()` became true between two batches.

    rows: rows or packs. batches: this process's share of them by index, the same number of batches on every process.
    sharded: the model cut over processes, which all call this together. A batch without any supervised token counts as
    nothing. The model is left in the mode it was in.

    Raises:
        StepFault: no row has a supervised token, or the loss is not finite.
    """
    began = time.perf_counter()
    was_training = model.training
    model.eval()
    sums: Counter[str] = Counter()
    denominators: Counter[str] = Counter()
    tokens, supervised = 0, 0
    try:
        for part in batches:
            if abandoned():
                return None
            batch = method.collate([rows[index] for index in part], pad_id)
            tokens += batch.tokens
            supervised += batch.supervised_tokens
            shares = method.denominators(batch)
            denominators.update(shares)
            # Of several processes each takes part in every forward pass, or the others would wait for it.
            if any(shares.values()) or sharded is not None:
                terms = batch_sums(model, model_hidden, head, method, batch.to(device))
                sums.update({name: total.item() for name, total in terms.items()})
    finally:
        model.train(was_training)
        if sharded is not None:  # also when abandoned: the next step must find its parameters cut again
            sharded.settle()
    if sharded is not None:
        counts = [float(tokens), float(supervised)]
        tokens, supervised = (int(count) for count in sharded.totals(counts, device))
        names = list(denominators)
        totals = sharded.totals([denominators[name] for name in names] + [sums[name] for name in names], device)
        denominators = Counter(dict(zip(names, totals[: len(names)], strict=True)))
        sums = Counter(dict(zip(names, totals[len(names) :], strict=True)))
    if not any(denominators.values()):
        raise StepFault(what=f"none of the {num_rows(rows)} evaluation rows has a supervised token",
                        remedy="raise max_length, or set eval_strategy: no")
    loss = sum(sums[name] / denominator for name, denominator in denominators.items() if denominator)
    if not math.isfinite(loss):
        raise StepFault(what=f"the evaluation loss is {loss}",
                        remedy="lower learning_rate and resume from the last checkpoint")
    return EvaluationReport(
        step=step, epoch=epoch, eval_loss=loss, eval_rows=num_rows(rows), eval_tokens=tokens,
        eval_supervised_tokens=supervised, eval_seconds=time.perf_counter() - began,
    )
