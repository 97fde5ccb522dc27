"""Documents that share a row are what they are alone, in every architecture and under each attention of a CPU.

Not for whole runs on packs. Each way of leaking is shown to be noticed.
"""

from __future__ import annotations

import pytest
import torch

from halo_core import registry
from halo_core.models import masks
from halo_core.testing.conformance import Suite
from halo_core.testing.isolation import PADDINGS, assert_documents_apart, assert_packs_equal_reference, plans
from halo_core.testing.product import build
from tests.leaking import LEAKS, breaks

ARCHITECTURES = [architecture.name for architecture in registry.load().architectures()]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_documents_of_one_row_are_what_they_are_alone(name: str, suite: Suite) -> None:
    case = suite.cases[name]
    backends = list(plans(suite.registry, case, {}))
    assert backends
    for ready in backends:
        assert_documents_apart(build(ready, case), case, PADDINGS)
        assert_packs_equal_reference(ready, case, [slice(0, 3)], [slice(0, 2), slice(2, 3)])


@pytest.mark.parametrize(("name", "way"), LEAKS)
def test_broken_isolation_is_noticed(name: str, way: str, suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    case = suite.cases[name]
    ready = next(plans(suite.registry, case, {}))
    model = build(ready, case)
    breaks(way, model, case.architecture, monkeypatch)
    with pytest.raises(AssertionError, match="log_probabilities"):
        assert_documents_apart(model, case, PADDINGS[:1])


def test_a_window_that_is_not_kept_is_noticed(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    case = suite.cases["gpt_oss"]
    kept = masks.seen_positions
    monkeypatch.setattr(masks, "seen_positions", lambda numbers, window=None: kept(numbers))
    with pytest.raises(AssertionError, match="against transformers alone"):
        assert_packs_equal_reference(next(plans(suite.registry, case, {})), case, [slice(0, 3)])


def test_transformers_leaks_where_the_core_does_not(suite: Suite) -> None:
    """Show what this is for: the same rows through transformers' own handling of positions that start again."""
    for name in ("gpt_oss", "lfm2", "qwen3_5"):
        case = suite.cases[name]
        model = build(next(plans(suite.registry, case, {})), case).eval()
        first, second = case.rows[1].input_ids, case.rows[2].input_ids
        positions = torch.tensor([[*range(len(first)), *range(len(second))]])
        with torch.no_grad():
            packed = model.model(input_ids=torch.tensor([[*first, *second]]), position_ids=positions, use_cache=False)
            alone = model.model(input_ids=torch.tensor([second]), use_cache=False)
        gap = (packed.last_hidden_state[0, len(first) :] - alone.last_hidden_state[0]).abs().max()
        assert float(gap) > 1e-3, f"{name}: transformers keeps documents apart by itself now"
