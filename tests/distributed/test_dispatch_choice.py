"""Which dispatcher is taken and what is said of it; the first exchange of tokens. Not for what one sends."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from halo_core.arithmetic import dispatcher_problems
from halo_core.config import read
from halo_core.errors import Refused
from halo_core.expert_parallel import choose as choosing
from halo_core.expert_parallel import deepep_start, preflight
from halo_core.expert_parallel.all_to_all import AllToAll
from halo_core.expert_parallel.choose import Choice, agreed, choose, neighbours, open_dispatcher
from halo_core.expert_parallel.dispatcher import Exchange
from tests.distributed import fake_deep_ep, ranks

GPU = Exchange(
    ep=2, per_machine=8, num_experts=32, num_slots=4, hidden_size=2880, dtype=torch.bfloat16,
    device=torch.device("cuda"),
)  # fmt: skip
CPU = replace(GPU, device=torch.device("cpu"), num_experts=8, num_slots=2, hidden_size=24)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Let a stand-in for DeepEP be imported."""
    module = fake_deep_ep.module()
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    return module


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let DeepEP be absent also where it is installed."""

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(deepep_start.importlib, "import_module", missing)


def refusal(asked: str, exchange: Exchange) -> str:
    with pytest.raises(Refused) as caught:
        choose(asked, exchange)
    return str(caught.value)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": torch.device("cpu")}, "this run is on cpu"),
        ({"dtype": torch.float32}, "this run computes in float32"),
        ({"ep": 16, "per_machine": 16}, "made for 2, 4, 8 processes that share experts, not 16"),
        ({"ep": 4, "per_machine": 2}, "on several machines"),
        ({"ep": 2, "per_machine": 3}, "on several machines"),
        ({"hidden_size": 8192}, "a hidden size of 8192 is above the 7936"),
        ({"num_slots": 64}, "64 experts per token are above the 32"),
    ],
)
def test_what_deepep_cannot_carry_is_refused_and_auto_says_it(change: dict[str, Any], said: str) -> None:
    assert choose("deepep", GPU) == Choice("deepep", "asked for")
    assert choose("auto", GPU).name == "deepep"
    text = refusal("deepep", replace(GPU, **change))
    assert "ep_dispatcher: deepep" in text and said in text and "ep_dispatcher: all_to_all" in text
    choice = choose("auto", replace(GPU, **change))
    assert choice.name == "all_to_all" and said in choice.why
    assert choose("all_to_all", replace(GPU, **change)) == Choice("all_to_all", "asked for")


@pytest.mark.usefixtures("absent")
def test_deepep_asked_for_and_absent_is_refused_with_how_to_get_it() -> None:
    text = refusal("deepep", GPU)
    assert "not installed" in text and "from source" in text and "deep-ep on PyPI is 1.0, too old" in text
    assert choose("auto", GPU) == Choice("all_to_all", "DeepEP is not installed")


def said_by_the_plan(ep: int, **given: object) -> str:
    config = read(None, given={"ep_dispatcher": "deepep", "expert_parallel_size": ep, **given}).config
    return "\n".join(problem.text() for problem in dispatcher_problems(config, ep))


def test_the_plan_refuses_without_torch_what_no_machine_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = said_by_the_plan(3, dtype="float32")
    assert "not installed" in text and "from source" in text
    assert "this run computes in float32" in text and "dtype: bfloat16" in text
    assert "made for 2, 4, 8 processes that share experts, not 3" in text
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert not said_by_the_plan(2, dtype="bfloat16") and not said_by_the_plan(1)
    assert not said_by_the_plan(2, dtype="float32", ep_dispatcher="auto")


def test_elastic_buffers_are_refused_as_unproven(installed: ModuleType) -> None:
    installed.ElasticBuffer = object  # type: ignore[attr-defined]
    assert "no run has proven" in refusal("deepep", GPU)
    assert choose("auto", GPU).name == "all_to_all"


def test_another_package_of_the_same_name_is_refused(installed: ModuleType) -> None:
    del installed.Buffer
    assert "another package of that name" in refusal("deepep", GPU)


def test_a_deepep_that_cannot_be_imported_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ImportError("libnvshmem_host.so.3: cannot open shared object file")

    monkeypatch.setattr(deepep_start.importlib, "import_module", broken)
    assert "libnvshmem_host.so.3" in refusal("deepep", GPU)


def test_one_process_that_cannot_decides_for_all() -> None:
    def asked() -> Choice:
        return agreed(Choice("all_to_all", "no") if dist.get_rank() == 1 else Choice("deepep", "yes"))

    assert ranks.run(3, asked) == [Choice("all_to_all", "no (rank 1)")] * 3


def test_machines_of_different_sizes_share_what_divides_both() -> None:
    def counted() -> int:
        choosing.socket.gethostname = lambda: "a" if dist.get_rank() < 4 else "b"
        return neighbours()

    assert ranks.run(6, counted) == [2] * 6


def opened(asked: str = "auto", exchange: Exchange = CPU) -> tuple[str, str]:
    assert dist.group.WORLD is not None
    exchange = replace(exchange, ep=dist.get_world_size())
    dispatcher, choice = open_dispatcher(asked, exchange, dist.group.WORLD, timeout=60)
    dispatcher.close()
    assert dispatcher.name == choice.name
    return tuple(choice)


def test_on_a_cpu_auto_takes_torchs_collectives_and_says_why() -> None:
    why = "DeepEP moves tokens between GPUs, and this run is on cpu"
    assert ranks.run(4, opened) == [("all_to_all", why)] * 4
    assert ranks.run(2, opened, "all_to_all", replace(CPU, dtype=torch.float32)) == [("all_to_all", "asked for")] * 2


def with_stand_in(spoil: str = "") -> Any:
    """Start the stand-in as DeepEP would be, with what a rank can have wrong."""
    module, sums = fake_deep_ep.module(), fake_deep_ep.Buffer._sums
    if dist.get_rank() == 1 and spoil == "combine":
        module.Buffer._sums = lambda self, rows, handle: sums(self, rows, handle) * 0
    if dist.get_rank() == 1 and spoil == "open":
        module.Buffer.__init__ = lambda *_, **__: importlib.import_module("peer access is not supported")
    if dist.get_rank() == 1 and spoil == "version":
        module.__version__ = "1.1"
    if dist.get_rank() == 1 and spoil == "absent":
        dist.barrier()  # somewhere else
    assert dist.group.WORLD is not None
    exchange = replace(CPU, ep=dist.get_world_size())
    return deepep_start.start(module, exchange, dist.group.WORLD, timeout=0.5 if spoil == "absent" else 60).name


def test_deepep_starts_with_an_exchange_that_must_arrive() -> None:
    assert ranks.run(2, with_stand_in) == ["deepep"] * 2


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("combine", "sums came back wrong"),
        ("open", "cannot exchange rows on rank 1: No module named 'peer access is not supported'"),
        ("version", "1.1 on rank 1"),
        ("absent", "rank 1 did not come to the first exchange of tokens"),
    ],
)
def test_a_process_where_deepep_does_not_work_is_named_before_training(spoil: str, said: str) -> None:
    with pytest.raises(ranks.RankFailed) as caught:
        ranks.run(2, with_stand_in, spoil)
    text = str(caught.value)
    assert "Refused:" in text and said in text
    assert "version" in text or spoil == "combine"


def test_a_transport_that_loses_rows_is_found_before_training() -> None:
    class Forgetful(AllToAll):
        def combine(self, partial: Tensor, ticket: Any) -> Tensor:
            return super().combine(partial * (0 if dist.get_rank() == 1 else 1), ticket)

    def first() -> None:
        assert dist.group.WORLD is not None
        preflight.exchange_once(Forgetful(group=dist.group.WORLD, num_experts=8), CPU, dist.get_rank())

    with pytest.raises(ranks.RankFailed, match="sums came back wrong"):
        ranks.run(2, first)
