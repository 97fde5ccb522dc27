"""How a step's rows are split into micro-batches changes nothing: every architecture, rows of very unequal length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_core import registry
from halo_core.data.collate import collate
from halo_core.data.order import StepOrder
from halo_core.data.rows import Row
from halo_core.methods.sft import Sft
from halo_core.models.hidden import Head, last_hidden
from halo_core.testing.conformance import PLAIN, Suite
from halo_core.testing.product import CPU, build, checked
from halo_core.trainer.step import run_step

ARCHITECTURES = [architecture.name for architecture in registry.load().architectures()]
SPLITS = ((8, 1), (4, 2), (1, 8))
"""(rows of a micro-batch, micro-batches)."""
LENGTHS = (41, 3, 17, 9, 26, 5, 12, 33)
STEPS = 3
WEIGHTS = 1e-6
"""Largest difference of a weight; fp32 sums in other orders differ by some 1e-8 after these steps."""


def rows(vocabulary: int) -> list[Row]:
    """Return eight rows of which some learn one token and others nearly all."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for row_id, length in enumerate(LENGTHS):
        tokens = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
        first = length - 1 if row_id % 2 else 1
        found.append(Row(row_id=row_id, input_ids=tokens, supervised=[index >= first for index in range(length)]))
    return found


def weights_after(suite: Suite, name: str, per_device: int, accumulation: int, method: Any) -> dict[str, Tensor]:
    """Return the weights after plain SGD steps over all rows, in the order a run takes them."""
    case = suite.cases[name]
    model = build(checked(suite.registry, case, PLAIN), case)
    data = rows(model.config.vocab_size)
    order = StepOrder(num_rows=len(data), per_device=per_device, data_ranks=1, accumulation=accumulation, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(case.reference["learning_rate"]))
    for step in range(1, STEPS + 1):
        batches = [method.collate([data[index] for index in part], 0) for part in order.micro_batches(step)]
        assert len(batches) == accumulation
        run_step(model=model, model_hidden=last_hidden, head=Head(model, case.architecture), method=method,
                 batches=batches, optimizer=optimizer, max_grad_norm=None, device=CPU)
    return {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_do_not_depend_on_the_split(name: str, suite: Suite) -> None:
    whole, *others = (weights_after(suite, name, *split, Sft(collate_rows=collate)) for split in SPLITS)
    start = build(checked(suite.registry, suite.cases[name], PLAIN), suite.cases[name]).state_dict()
    assert max(float((whole[key] - start[key]).abs().max()) for key in whole) > 100 * WEIGHTS
    for found in others:
        gaps = {key: float((found[key] - whole[key]).abs().max()) for key in whole}
        assert max(gaps.values()) <= WEIGHTS, max(gaps, key=gaps.__getitem__)


def test_a_mean_of_means_would_be_seen(suite: Suite) -> None:
    class MeanOfMeans(Sft):
        """Weighs each micro-batch alike, whatever it holds."""

        def collate(self, rows: Any, pad_id: int) -> Any:
            batch = super().collate(rows, pad_id)
            return replace(batch, weights=batch.weights / batch.weights.sum())

    whole, parted = (
        weights_after(suite, "lfm2", *split, MeanOfMeans(collate_rows=collate)) for split in ((8, 1), (4, 2))
    )
    assert max(float((parted[key] - whole[key]).abs().max()) for key in whole) > 100 * WEIGHTS
