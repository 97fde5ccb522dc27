"""What the documentation says about measurements: the page of receipts, and tables computed from shapes."""

from __future__ import annotations

import json
from math import comb
from pathlib import Path
from typing import Any

import pytest

from halo_core import registry
from halo_core.bench import page, receipt, tables
from halo_core.bench.tables import even_choice

ROOT = Path(__file__).resolve().parents[2]
REGISTRY = registry.load()
SHAPE = "openai/gpt-oss-20b"
HIDDEN, EXPERTS, CHOSEN, TOKENS = 2880, 32, 4, 4096
SAMPLING = 0.01
"""Relative. Of some ten thousand random rows the mean is this near to what is expected."""


def made(ep: int, losses: list[float], **fixture: Any) -> dict[str, Any]:
    return {
        "kind": receipt.KIND, "format": receipt.FORMAT, "date": "2030-01-02T03:04:05+00:00",
        "fixture": {
            "model": "org/name", "layers": 3, "seed": 1, "sequence_length": 64, "rows_per_step": 4, "optim": "sgd",
            "dtype": "float32", "learning_rate": 0.1, "parameters": 1_500_000, **fixture,
        },
        "layout": {"processes": 2, "replicate": 1, "shard": 2 // ep, "cp": 1, "ep": ep, "etp": 1},
        "plan": {"attention": "sdpa", "kernels": {"experts": "grouped"},
                 "dispatcher": "all_to_all" if ep > 1 else None},
        "environment": {"device": "a device", "torch": "9.9", "transformers": "8.8",
                        "commit": "0123456789abcdef-dirty"},
        "result": {
            "tokens_per_second_per_process": 1234.4, "step_seconds": 0.5, "tokens_per_step": 256, "warmup_steps": 1,
            "timed_step_seconds": [0.5], "peak_bytes": 3 * 2**30, "peak_of": "GPU memory", "losses": losses,
            "wire": {"all_gather": {"calls": 1, "handed": 9, "sent": 2**30}, "all_to_all": {"sent": 2**29}},
        },
    }  # fmt: skip


def test_a_receipt_is_one_row_with_its_figures() -> None:
    text = page.markdown({"one": made(2, [3.0, 2.5])})
    (row,) = [line for line in text.splitlines() if line.startswith("| [one]")]
    assert row == (
        "| [one](../receipts/one.json) | org/name, 3 layers | 64 x 2 | 2 (ep 2) | all_to_all | float32, sgd | "
        "sdpa, grouped | 1,234 | 0.500 s | 3.00 GiB | 1.50 GiB | a device | "
        "2030-01-02, torch 9.9, transformers 8.8, at 0123456789 with changes |"
    )
    assert "## One training" not in text


def test_losses_of_one_training_stand_side_by_side() -> None:
    receipts = {
        "a": made(2, [3.0, 2.75, 2.0]), "b": made(1, [3.0, 2.5, 2.25]), "c": made(1, [3.0, 2.5], seed=2),
        "d": made(1, [3.0, 2.625], rows_per_step=8),
    }  # fmt: skip
    rows = page.markdown(receipts).partition("## One training")[2].splitlines()
    rows = [row for row in rows if row.startswith(("| a", "| b", "| c", "| d"))]
    assert rows == [
        "| b | 2 (shard 2) | - | 3 | 3.000000 | 2.250000 | 0.000000 |",
        "| a | 2 (ep 2) | all_to_all | 3 | 3.000000 | 2.000000 | 0.250000 |",
    ]


def test_the_page_without_receipts_says_so() -> None:
    assert "no receipt yet" in page.markdown({})


def test_a_file_that_is_no_receipt_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"kind": "something else"}))
    with pytest.raises(ValueError, match=r"other\.json is not a receipt"):
        receipt.read(tmp_path)


def test_the_repositorys_receipts_can_be_read() -> None:
    for name, found in receipt.read(ROOT / "receipts").items():
        assert len(found["result"]["losses"]) >= len(found["result"]["timed_step_seconds"]) > 0, name


@pytest.mark.parametrize(("column", "rows_there_and_back"), [
    # Expected of an even choice, for each other process: whether any of 4 of 32 experts is one of its 32 / EP.
    (1, lambda ep: (ep - 1) * (1 - comb(EXPERTS - EXPERTS // ep, CHOSEN) / comb(EXPERTS, CHOSEN))),
    (2, lambda ep: CHOSEN * (1 - 1 / ep)),
    # A ring sends each token's sum (EP - 1) / EP times of all processes' tokens, twice; there and back is twice too.
    (3, lambda ep: ep - 1),
])  # fmt: skip
def test_bytes_of_exchanges_are_those_expected_of_an_even_choice(column: int, rows_there_and_back: Any) -> None:
    for line in tables.layer_bytes(REGISTRY, SHAPE, degrees=(2, 8), tokens=TOKENS).splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found = float(cells[column].split(" MiB")[0]) * 2**20
        each = 2 * 2 * HIDDEN + (CHOSEN * 8 if column == 1 else 0)
        assert found == pytest.approx(TOKENS * rows_there_and_back(int(cells[0])) * each, rel=SAMPLING)


def test_a_choice_names_different_experts_and_all_of_them() -> None:
    ids = even_choice(500, 32, 4, seed=0)
    assert ids.shape == (500, 4)
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert set(ids.flatten().tolist()) == set(range(32))


def test_memory_falls_with_the_degree_and_is_that_of_the_parameters() -> None:
    (line,) = tables.memory(REGISTRY, [SHAPE], world=8, degrees=(1, 8)).splitlines()[2:]
    _, total, experts, one, eight, _ = [cell.strip() for cell in line.strip("|").split("|")]
    # 24 layers of 32 experts: gate and up, down, and their biases.
    by_hand = 24 * 32 * (2880 * 5760 + 5760 + 2880 * 2880 + 2880)
    assert float(experts) == round(by_hand / 1e9, 1)
    whole = float(total) * 1e9
    assert one == f"{2 * (4 * whole / 8 + whole) / 2**30:.0f} GiB"
    assert eight == f"{2 * (4 * whole / 8 + whole - by_hand) / 2**30:.0f} GiB"
