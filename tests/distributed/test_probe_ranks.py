"""The start-up probe of a model that is cut over processes: it passes, leaves shards, and refuses on every rank alike.

Not for what it finds: see `tests/unit/trainer/test_probe.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from halo_core import config as configuration
from halo_core import plan, process_group
from halo_core import registry as facts
from halo_core.errors import Refused
from halo_core.models import masks
from halo_core.testing import ranks
from halo_core.trainer import probe
from halo_core.trainer import run as training
from tests.leaking import no_documents

ROWS = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c d"}]}] * 8


def checked(folder: Path, **keys: Any) -> plan.Checked:
    given = {
        "model_name_or_path": "tiny", "family": "lfm2", "dataset_name": "rows given in Python", "max_length": 40,
        "output_dir": str(folder), "optim": "sgd", "max_steps": 1, "save_strategy": "no", "packing": True, **keys,
    }  # fmt: skip
    return plan.build(configuration.read(None, given=given), facts.load(), nproc=2)


@pytest.mark.parametrize("keys", [{"expert_parallel_size": 2}, {}], ids=["ep", "shard"])
def test_probe_passes_where_the_model_is_cut_and_refuses_on_every_rank(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, leaking = checked(tmp_path / "whole", **keys), checked(tmp_path / "leaking", **keys)
    cut: list[bool] = []

    def look(**given: Any) -> Any:
        model = given["model"]
        cut.append(all(isinstance(p, DTensor) for m in model.modules() if isinstance(m, FSDPModule)
                       for p in m.parameters()))  # fmt: skip
        raise Refused(plan.Problem(why="seen enough", remedy="none"))

    def run() -> tuple[list[bool], list[str]]:
        said: list[str] = []
        monkeypatch.setattr(training, "fit", look)
        for ready, seen in ((whole, masks.seen_positions), (leaking, no_documents)):
            monkeypatch.setattr(masks, "seen_positions", seen)
            try:
                training.train(ready, rows=ROWS, say=lambda text: None)
            except Refused as refusal:
                said += [problem.why for problem in refusal.problems]
        return cut, said

    first, second = ranks.run(2, run)
    assert first == second
    shards, (passed, leaked) = first
    assert shards == [True]
    assert passed == "seen enough"
    assert "a document changes when another one in its row does, first in model.layers.1.self_attn" in leaked


@pytest.mark.parametrize(
    "keys", [{"expert_parallel_size": 2}, {"fsdp_reshard_after_forward": True}], ids=["ep", "shard"]
)
@pytest.mark.parametrize("call", [1, 2], ids=["leak", "no token"])
def test_what_one_rank_alone_sees_ends_the_run_on_every_rank(
    keys: dict[str, Any], call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = checked(tmp_path, **keys)
    real, calls = probe._Trial.first_moved, []

    def first_moved(trial: Any, found: Any, expected: Any, *given: Any, **named: Any) -> str | None:
        calls.append(1)
        if process_group.rank() == 1 and len(calls) == call:
            return next(iter(expected)) if call == 1 else None
        return real(trial, found, expected, *given, **named)

    def run() -> str:
        monkeypatch.setattr(probe._Trial, "first_moved", first_moved)
        with pytest.raises((Refused, RuntimeError)) as fault:
            training.train(ready, rows=ROWS, say=lambda text: None)
        return str(fault.value)

    first, second = ranks.run(2, run, timeout=60)
    assert first == second
    assert ("rank 1" in first and probe.LATER in first) if call == 1 else "sees no token of its own" in first
