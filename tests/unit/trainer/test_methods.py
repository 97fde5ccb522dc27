"""Supervised fine-tuning as terms. Not for which tokens are supervised."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from halo_core.data.batch import IGNORED
from halo_core.data.collate import collate
from halo_core.data.rows import Row
from halo_core.methods.method import Method
from halo_core.methods.sft import Sft

SFT: Method = Sft(collate_rows=collate)


def batch_of_two() -> Any:
    return SFT.collate([Row(row_id=4, input_ids=[5, 6, 7, 8], supervised=[True, True, False, True]),
                        Row(row_id=9, input_ids=[1, 2], supervised=[False, True])], 0)


def test_terms_by_hand() -> None:
    batch = batch_of_two()
    assert batch.targets.tolist() == [[6, IGNORED, 8, IGNORED], [2, IGNORED, IGNORED, IGNORED]]
    assert SFT.denominators(batch) == {"token_loss": 3.0}
    # A head that gives the token t the probability 1 / (t + 1).
    sums = SFT.sums(batch, lambda targets: torch.where(targets == IGNORED, 0.0, -torch.log(targets.clamp(0) + 1.0)))
    assert math.isclose(float(sums["token_loss"]), math.log(7) + math.log(9) + math.log(3), rel_tol=1e-6)


def test_token_weights_multiply_the_loss_and_the_denominator() -> None:
    batch = batch_of_two()
    weighted = replace(batch, weights=batch.weights * torch.tensor([[0.5], [2.0]]))
    assert SFT.denominators(weighted) == {"token_loss": 3.0}  # 0.5 + 0.5 + 2
    sums = SFT.sums(weighted, lambda targets: torch.where(targets == IGNORED, 0.0, -1.0 * targets))
    assert float(sums["token_loss"]) == 0.5 * 6 + 0.5 * 8 + 2 * 2


def test_batch_without_rows_adds_nothing() -> None:
    assert SFT.denominators(SFT.collate([], 0)) == {"token_loss": 0.0}
