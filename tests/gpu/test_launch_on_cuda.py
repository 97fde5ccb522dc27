"""The launcher and the process group on two CUDA devices. Not for training on them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from halo_core.cli import launch
from tests.distributed import launchers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_ranks_take_a_device_each_and_exchange_on_it_and_on_the_host(tmp_path: Path) -> None:
    ended = launchers.run("works_on_gpus", tmp_path)
    assert ended.code == 0 and "halo:" not in ended.err, ended.err  # torch itself warns about its groups
    heard = [json.loads((tmp_path / f"heard-{rank}").read_text()) for rank in range(2)]
    assert [one["device"] for one in heard] == [0, 1]
    assert all(one["sums"] == [3.0] * 8 and one["any"] for one in heard)


def test_a_killed_rank_ends_one_that_waits_for_it_on_the_device() -> None:
    ended = launchers.run("one_is_killed_beside_a_gpu")
    assert ended.code == 137 and ended.err.startswith("halo: rank 1 of 2 was killed by SIGKILL"), ended.err


def test_more_processes_than_devices_are_refused() -> None:
    seen = torch.cuda.device_count()
    [problem] = launch.gpu_problems(seen + 1)
    assert problem.key == "--nproc" and problem.remedy.startswith(f"--nproc {seen},")
    assert launch.gpu_problems(seen) == []
