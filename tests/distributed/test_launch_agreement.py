"""How processes join and agree: facts, refusals, a wish to stop, places. Not for starting them (`test_launch.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halo_core import process_group
from halo_core.errors import Problem, Refused
from halo_core.ranks import Ranks, first_host, local_world_from, ranks_from, spans
from halo_core.trainer import run
from tests.distributed import launchers, ranks
from tests.distributed.launchers import Forked

PROBLEM = Problem(key="seed", value=1, why="odd", remedy="seed: 2")
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
            "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77",
         "SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "node[007-008]", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}


def refusal(act: Any, *arguments: Any) -> tuple[str, bool] | None:
    """Return the text of the refusal that an act raises, and whether every rank raises it."""
    try:
        act(*arguments)
    except Refused as refused:
        return refused.text(), refused.everywhere
    return None


def test_in_one_process_everything_passes_and_no_torch_is_imported() -> None:
    program = (
        "import sys; from halo_core import process_group as p; from halo_core.ranks import ranks_from\n"
        "with p.joined(ranks_from({})) as ranks, p.together():\n"
        "    p.agree('a', 1); p.collect_problems([]); p.barrier(); p.leave()\n"
        "    assert (ranks.world, p.world(), p.rank(), p.any_rank(True), p.any_rank(False)) == (1, 1, 0, True, False)\n"
        "    assert p.from_rank_0('x') == 'x'\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(Refused, match="seed: 1"), process_group.together():
        raise Refused(PROBLEM)


def differing() -> list[Any]:
    rank = dist.get_rank()
    return [
        refusal(process_group.agree, "same", {"a": 1, "b": {"c": [1, Path("x")]}}),
        refusal(process_group.agree, "run", {"seed": rank // 2, "inner": {"rate": 1e-4 if rank else 2e-4}, "same": 0}),
        refusal(process_group.agree, "plugins", {"a": "1"} if rank == 2 else {}, "install the same"),
        refusal(process_group.agree, "plan", "x" * (100 + rank % 2)),
    ]


def test_facts_that_differ_are_refused_everywhere_with_the_ranks_that_have_them() -> None:
    answers = ranks.run(4, differing)
    assert answers[0] == answers[1] == answers[2] == answers[3]
    same, run, plugins, plan = answers[0]
    assert same is None and run[1] and plugins[1] and plan[1]
    head = "    why: the processes of this run differ:"
    assert f"1. run.inner.rate:\n{head} 0.0002 on rank 0; 0.0001 on ranks 1-3" in run[0]
    assert f"2. run.seed:\n{head} 0 on ranks 0-1; 1 on ranks 2-3" in run[0]
    assert "same" not in run[0].replace("give every process the same", "")
    assert "plugins.a:" in plugins[0] and "nothing on ranks 0-1, 3; 1 on rank 2" in plugins[0]
    assert "do:  install the same" in plugins[0]
    assert f"{'x' * 80}... on ranks 0, 2; {'x' * 80}... on ranks 1, 3" in plan[0]


def refusing() -> list[Any]:
    rank = dist.get_rank()

    def block(problems: list[Problem]) -> None:
        with process_group.together():
            if problems:
                raise Refused(problems)

    own = Problem(where="rows.jsonl:7", why=f"broken on {rank}", remedy="mend it")
    return [
        refusal(block, []),
        refusal(block, [PROBLEM]),
        refusal(block, [PROBLEM] if rank else []),
        refusal(block, [PROBLEM, own] if rank == 1 else [PROBLEM]),
    ]


def test_a_refusal_of_some_ranks_is_raised_by_all_with_their_numbers() -> None:
    answers = ranks.run(3, refusing)
    assert answers[0] == answers[1] == answers[2]
    none, all_ranks, two, one_more = answers[0]
    assert none is None
    assert all_ranks == ("seed: 1\n    why: odd\n    do:  seed: 2", True)
    assert two == ("ranks 1-2: seed: 1\n    why: odd\n    do:  seed: 2", True)
    assert one_more[0].splitlines()[3] == "2. rank 1, rows.jsonl:7:"


def waiting_for_a_slow_rank() -> list[Any]:
    impatient, patient = process_group.side_group(0.3), process_group.side_group(60.0)

    def block(group: Any, problems: list[Problem]) -> None:
        with process_group.together(group):
            if dist.get_rank() == 1:
                time.sleep(1.0)  # it is the time itself that is in question
            if problems:
                raise Refused(problems)

    found = [refusal(block, patient, []), refusal(block, patient, [PROBLEM] if dist.get_rank() == 1 else [])]
    try:
        block(impatient, [])
        gave_up = False
    except RuntimeError:
        gave_up = True
    return [*found, gave_up]


def test_a_rank_that_takes_longer_than_the_others_is_waited_for_as_long_as_its_group_says() -> None:
    answers = ranks.run(2, waiting_for_a_slow_rank)
    told = ("rank 1: seed: 1\n    why: odd\n    do:  seed: 2", True)
    assert [answer[:2] for answer in answers] == [[None, told]] * 2, "a slow rank's refusal still is everybody's"
    assert answers[0][2], "otherwise nothing was waited for above"


def test_rows_are_waited_for_longer_than_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Any] = []

    @contextmanager
    def heard(group: Any = None) -> Iterator[None]:
        groups.append(group)
        yield

    def refused(*_: Any) -> Any:
        raise Refused(PROBLEM)

    monkeypatch.setattr(process_group, "side_group", lambda timeout: f"waits {timeout:.0f} s")
    monkeypatch.setattr(process_group, "together", heard)
    monkeypatch.setattr(run.preflight, "start", lambda config: None)
    monkeypatch.setattr(run, "folder_or_id", refused)
    config = SimpleNamespace(model_name_or_path="m")
    with pytest.raises(Refused):
        run.train(SimpleNamespace(config=config, plan=SimpleNamespace(notes=()), architecture=None))  # type: ignore[arg-type]
    assert groups == ["waits 86400 s"]


def talking() -> list[Any]:
    rank = dist.get_rank()
    found = [process_group.any_rank(rank == 1), process_group.any_rank(False)]
    process_group.barrier()
    return [*found, process_group.from_rank_0({"moment": rank}), process_group.world(), process_group.rank()]


def test_a_flag_of_one_rank_is_seen_by_all_and_rank_0_can_tell() -> None:
    answers = ranks.run(3, talking)
    assert [answer[:4] for answer in answers] == [[True, False, {"moment": 0}, 3]] * 3
    assert [answer[4] for answer in answers] == [0, 1, 2]


def test_the_processes_of_this_machine_are_told_without_the_others_address() -> None:
    assert local_world_from({}) == 1
    assert local_world_from({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}) == 4
    assert local_world_from(SLURM) == 8
    assert local_world_from({**SLURM, **TORCHRUN}) == 2


def test_a_launchers_and_slurms_variables_tell_the_place() -> None:
    assert ranks_from({}) == ranks_from({"WORLD_SIZE": "1"}) == ranks_from({"RANK": "0", "WORLD_SIZE": "1"}) == Ranks()
    assert ranks_from(TORCHRUN) == Ranks(rank=3, local_rank=1, world=4, local_world=2, started_by="the launcher",
                                         address="a", port=29500)
    found = ranks_from(SLURM)
    assert (found.rank, found.local_rank, found.world, found.local_world) == (9, 1, 16, 8)
    assert (found.started_by, found.address, found.port) == ("SLURM", "node007", 20000 + 77 * 16 + 2)
    assert ranks_from({**SLURM, "MASTER_ADDR": "b", "MASTER_PORT": "5"}).address == "b"
    assert ranks_from({**SLURM, "MASTER_ADDR": "b", "MASTER_PORT": "5"}).port == 5
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "77"}
    assert ranks_from(batch_script) == Ranks(), "a batch script is one process"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_place_is_refused_with_the_variable(name: str) -> None:
    with pytest.raises(Refused, match=rf"\${name}: not set"):
        ranks_from({key: value for key, value in TORCHRUN.items() if key != name})
    with pytest.raises(Refused, match=rf"\${name}: "):
        ranks_from({**TORCHRUN, name: ""})


def test_a_place_that_is_no_number_is_refused() -> None:
    with pytest.raises(Refused, match=r"\$RANK: first\s+why: it is not a number"):
        ranks_from({**TORCHRUN, "RANK": "first"})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a", "a"), ("a,b", "a"), ("n[03-05,9]-x,b2", "n03-x"), ("r[1-2]n[07,9],c", "r1n07"), ("a-1.site", "a-1.site")],
)
def test_the_first_host_of_slurms_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_ranks_in_words() -> None:
    assert [spans(some) for some in ([3], [0, 1], [0, 1, 2, 5], [1, 3])] == ["rank 3", "ranks 0-1", "ranks 0-2, 5",
                                                                            "ranks 1, 3"]


def test_scattered_ranks_and_shared_gpus_are_refused() -> None:
    assert process_group.placement_problems([("a", "1"), ("a", "2"), ("b", "1"), ("b", "2")]) == []
    assert process_group.placement_problems([("a", ""), ("a", "")]) == []
    [cyclic] = process_group.placement_problems([("a", "1"), ("b", "1"), ("a", "2"), ("b", "2")])
    assert "ranks 0, 2, which are not neighbours" in cyclic.why and "--distribution=block" in cyclic.remedy
    [shared] = process_group.placement_problems([("a", "1"), ("a", "1"), ("b", "1"), ("b", "2")])
    assert (shared.where, shared.why) == ("host a", "ranks 0-1 would share one GPU")


@dataclass
class Gpu:
    uuid: str


def joined_by(environ: dict[str, str], gpus: int, timeout: float) -> int:
    """Join as a process of this environment does on a machine with so many GPUs, and sum the ranks over all."""
    torch.set_num_threads(1)
    torch.cuda.is_available = lambda: gpus > 0
    torch.cuda.device_count = lambda: gpus
    torch.cuda.get_device_properties = lambda index: Gpu(f"gpu {index}")  # type: ignore[assignment]
    os.environ.update(environ, GLOO_SOCKET_IFNAME="lo")
    with process_group.joined(ranks_from(os.environ), timeout=timeout) as own:
        total = torch.tensor([own.rank])
        dist.all_reduce(total)
        print(f"{own.rank} of {own.world}: {total.item()}")
    return 0


def slurm(rank: int, port: int, world: int = 2) -> dict[str, str]:
    return {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(world), "SLURM_LOCALID": str(rank),
            "SLURM_JOB_ID": "5", "SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(port)}


def test_processes_that_slurm_started_join() -> None:
    port = launchers.free_port()
    both = [Forked(lambda rank=rank: joined_by(slurm(rank, port), 0, 60)) for rank in range(2)]
    ended = [one.ended() for one in both]
    assert [(one.code, one.out) for one in ended] == [(0, "0 of 2: 1\n"), (0, "1 of 2: 1\n")], ended


def test_processes_that_would_share_a_gpu_are_refused_before_they_meet_on_it() -> None:
    port = launchers.free_port()
    both = [Forked(lambda rank=rank: joined_by(slurm(rank, port), 1, 60)) for rank in range(2)]
    for ended in [one.ended() for one in both]:
        assert ended.code == 2 and "ranks 0-1 would share one GPU" in ended.err


def test_a_rank_that_never_comes_is_named() -> None:
    port = launchers.free_port()
    both = [Forked(lambda rank=rank: joined_by(slurm(rank, port, 3), 0, 2)) for rank in (0, 2)]
    for ended in [one.ended() for one in both]:
        assert ended.code == 2 and "rank 1 of 3 did not come within 2 seconds" in ended.err, ended


def test_a_place_where_nobody_listens_is_refused_with_its_name() -> None:
    port = launchers.free_port()
    ended = Forked(lambda: joined_by(slurm(1, port), 0, 1)).ended()
    assert ended.code == 2 and f"cannot meet at localhost:{port}" in ended.err and "Traceback" not in ended.err
