"""The quickstart script: two steps of it, and its counting of right answers. What it learns is shown by running it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / "quickstart" / "run.py"))


def questions(script: dict[str, Any]) -> list[Any]:
    one = script["Question"]
    return [
        one(task="sort digits", prompt="Sort these numbers: 3 1", answer="1 3"),
        one(task="sort digits", prompt="Sort these numbers: 9 2", answer="2 9"),
        one(task="opposites", prompt="The opposite of up is what?", answer="down"),
        one(task="reverse words", prompt="Reverse this list: a b", answer="b a"),
    ]


def test_exact_match_counts_whole_answers_alone(script: dict[str, Any]) -> None:
    said = ["1 3", "2 9 ...", "Down", "b a"]
    counts = script["matches"](questions(script), said)
    assert counts == {"opposites": (0, 1), "reverse words": (1, 1), "sort digits": (1, 2)}
    assert script["share"](counts) == 0.5


def test_report_shows_three_answers_before_and_after(script: dict[str, Any]) -> None:
    text = script["report"](questions(script), ["x\n" * 99] * 4, ["1 3", "2 9", "down", "b a"], 40.2)
    assert text.count("before:") == text.count("after:") == 3
    assert "0% -> 100%" in text
    assert "after:  down" in text
    assert max(map(len, text.splitlines())) < 90


def test_two_steps_leave_a_model_a_picture_and_a_summary(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    config = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text(encoding="utf-8"))
    folder = script["main"]({**config, "max_steps": 2, "output_dir": str(tmp_path / "run")})
    assert folder == tmp_path / "run"
    assert {"config.json", "model.safetensors", "metrics.jsonl", "loss.png"} <= {path.name for path in folder.iterdir()}
    summary = json.loads((folder / "quickstart.json").read_text(encoding="utf-8"))
    assert len(summary["answers"]) == 120
    assert summary["exact_match_before"] == 0.0
    said = capsys.readouterr().out
    assert f"halo sample {folder}" in said
    assert said.count("before:") == 3
