"""The bias update by hand: integer counts, one step of fixed size, nothing counted outside."""

from __future__ import annotations

import pytest
import torch

from halo_core.balancing.bias_update import BiasUpdate


def test_bias_moves_one_step_against_the_load_and_counts_begin_anew() -> None:
    bias = torch.tensor([0.5, 0.0, 0.0, -0.5])
    update = BiasUpdate({"layer": bias}, rate=0.25)
    heard = update.listener("layer")
    ids = torch.tensor([[0, 1], [0, 1], [0, 2], [3, 3]])  # the last token is padding
    with update.counting(torch.tensor([[True, True], [True, False]])):
        heard(ids)
    heard(ids)  # outside: a recomputation or an evaluation
    assert update.step().tolist() == [[3, 2, 1, 0]]
    # The mean is 1.5: experts 0 and 1 had more, 2 and 3 less.
    assert bias.tolist() == [0.25, -0.25, 0.25, -0.25]
    assert update.step().tolist() == [[0, 0, 0, 0]]
    assert bias.tolist() == [0.25, -0.25, 0.25, -0.25]


def test_expert_at_the_mean_stays_and_micro_batches_add_up() -> None:
    bias = torch.zeros(3)
    update = BiasUpdate({"layer": bias}, rate=1.0)
    heard = update.listener("layer")
    for chosen in (0, 0, 1):  # 2, 1 and 0 tokens; the mean is one
        with update.counting(torch.ones(1, 1, dtype=torch.bool)):
            heard(torch.tensor([[chosen]]))
    update.step()
    assert bias.tolist() == [-1.0, 0.0, 1.0]


def test_counts_of_all_ranks_decide() -> None:
    bias = torch.zeros(2)
    update = BiasUpdate({"layer": bias}, rate=1.0, total=lambda counts: counts + torch.tensor([[0, 5]]))
    with update.counting(torch.ones(1, 1, dtype=torch.bool)):
        update.listener("layer")(torch.tensor([[0]]))
    assert update.step().tolist() == [[1, 5]]
    assert bias.tolist() == [1.0, -1.0]


def test_bias_in_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="fp32"):
        BiasUpdate({"layer": torch.zeros(4, dtype=torch.bfloat16)}, rate=1.0)
