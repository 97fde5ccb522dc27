"""`halo bench` with several processes, started as a person starts it: one result, one receipt. No times."""

from __future__ import annotations

import json
from pathlib import Path

from halo_core.cli.main import exit_code
from tests.distributed.launchers import Forked


def test_two_processes_share_the_experts_and_one_tells_the_result(tmp_path: Path) -> None:
    out = tmp_path / "receipt.json"
    words = ["--model", "tiny", "--family", "gpt_oss", "--layers", "1", "--seq", "9", "--batch", "1", "--steps", "2",
             "--warmup", "1", "--nproc", "2", "--out", str(out), "expert_parallel_size=2", "seed=7"]  # fmt: skip
    ended = Forked(lambda: exit_code(["bench", *words])).ended()
    assert ended.code == 0, ended.err
    found = json.loads(out.read_text())
    assert found["layout"] == {"processes": 2, "replicate": 1, "shard": 1, "cp": 1, "ep": 2, "etp": 1}
    assert found["plan"]["dispatcher"] == "all_to_all"
    assert found["fixture"]["seed"] == 7 and found["fixture"]["layers"] == 1
    assert found["result"]["tokens_per_step"] == 18
    assert {"all_gather", "all_to_all", "reduce_scatter"} <= set(found["result"]["wire"])
    assert ended.out.count("tokens/s of each process") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["receipt.json"]


def test_what_cannot_be_is_refused_before_processes_are_started() -> None:
    words = ["bench", "--model", "tiny", "--family", "qwen3", "--seq", "9", "--nproc", "3", "expert_parallel_size=2"]
    ended = Forked(lambda: exit_code(words)).ended()
    assert ended.code == 2
    assert "a multiple of 2 processes" in ended.err
    assert ended.out == ""
