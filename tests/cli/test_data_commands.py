"""`halo data`: what people see of their rows, what lengths mean for a run, and rows prepared once."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halo_core.cli import data as command
from halo_core.data import statistics
from halo_core.data.preview import Document, Run
from halo_core.data.rows import Row, Rows

Halo = Callable[..., tuple[int, str, str]]


def chat(number: int, words: int = 3) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"answer {number}" + " and more" * words},
        ]
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model without weights: nothing here may read them."""
    from halo_core.cli.main import exit_code

    folder = tmp_path_factory.mktemp("model") / "tiny"
    assert exit_code(["init-tiny", "--family", "lfm2", "--out", str(folder)]) == 0
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture
def words(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that writes rows and returns the settings of a run over them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HALO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_COLOR", "1")

    def write(rows: list[Any], **given: object) -> list[str]:
        Path("rows.jsonl").write_text(
            "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        )
        settings = {"model_name_or_path": model, "dataset_name": "rows.jsonl", **given}
        return [f"{key}={value}" for key, value in settings.items()]

    return write


def test_preview_marks_what_is_learnt_and_tells_where_rows_stand(halo: Halo, words: Callable[..., list[str]]) -> None:
    code, out, _ = halo("data", "preview", "-n", "2", *words([chat(0), "", chat(1), chat(2)]))
    assert code == 0
    assert "row 0 (rows.jsonl:1): " in out and "row 1 (rows.jsonl:3): " in out and "rows.jsonl:4" not in out
    assert "<|user|>question 1<|end|><|assistant|>[[answer 1 and more and more and more<|end|>]]" in out


def test_preview_reads_no_more_than_it_shows(halo: Halo, words: Callable[..., list[str]]) -> None:
    rows = [*[chat(number) for number in range(300)], "{broken"]
    assert halo("data", "preview", "-n", "1", *words(rows))[0] == 0
    code, _, err = halo("data", "preview", "-n", "299", *words(rows))
    assert (code, "rows.jsonl:301: broken JSON" in err) == (2, True)


def test_preview_of_one_row(halo: Halo, words: Callable[..., list[str]]) -> None:
    settings = words([chat(0), chat(1, 90), chat(2)], max_length=60)
    code, out, _ = halo("data", "preview", "--row", "2", *settings)
    assert (code, "row 2 (rows.jsonl:3)" in out, "question 0" in out) == (0, True, False)
    code, _, err = halo("data", "preview", "--row", "1", *settings)
    assert (code, "longer than max_length 60 (first: rows.jsonl:2" in err) == (2, True)
    code, _, err = halo("data", "preview", "--row", "9", *settings)
    assert code == 2 and "there is no such row" in err


def test_preview_of_packs_shows_their_documents(halo: Halo, words: Callable[..., list[str]]) -> None:
    settings = words([chat(number) for number in range(6)], packing="true", max_length=64)
    code, out, _ = halo("data", "preview", "-n", "1", *settings)
    assert code == 0
    assert "pack 0: " in out and "-- document 1 of " in out and "(rows.jsonl:" in out
    code, one, _ = halo("data", "preview", "--row", "3", *settings)
    assert (code, "row 3 (rows.jsonl:4)" in one) == (0, True)


def test_preview_of_a_prepared_folder(halo: Halo, words: Callable[..., list[str]]) -> None:
    settings = words([chat(0), chat(1)])
    assert halo("data", "prepare", "out", *settings)[0] == 0
    Path("rows.jsonl").unlink()
    folder = [word for word in settings if not word.startswith("dataset_name")]
    code, out, err = halo("data", "preview", *folder, "dataset_name=out")
    assert code == 0, err
    assert "row 1: " in out and "[[answer 1" in out


def test_colours_stand_for_marks_on_a_terminal() -> None:
    runs = (Run(text="a", is_learnt=False, is_special=False), Run(text="b\x1b[2J", is_learnt=True, is_special=False))
    document = Document(row_id=0, place="", start=0, tokens=2, supervised=1, runs=runs)
    coloured = command._document(document, coloured=True)
    assert [(span.start, span.style) for span in coloured.spans] == [(1, command.LEARNT)]
    plain = command._document(document, coloured=False).plain
    assert plain == "a[[b\\x1b[2J]]", "what a terminal would obey is written out"


@pytest.mark.parametrize("name", ["preview", "stats", "prepare"])
def test_mistakes_are_those_of_train(name: str, halo: Halo, words: Callable[..., list[str]]) -> None:
    out = ["out"] if name == "prepare" else []
    settings = words([chat(0), {"messages": [{"role": "asistant", "content": "a"}]}])
    code, _, err = halo("data", name, *out, *settings)
    assert (code, "rows.jsonl:2: unknown role" in err) == (2, True)
    code, _, err = halo("data", name, *out, *settings, "max_lenght=3")
    assert (code, "did you mean max_length" in err) == (2, True)
    assert not Path("out").exists()


def test_stats_tell_lengths_packing_padding_and_steps(halo: Halo, words: Callable[..., list[str]]) -> None:
    settings = words([chat(number, number % 5) for number in range(20)], max_length=18, per_device_train_batch_size=3)
    code, out, err = halo("data", "stats", *settings, "--png", "lengths.png")
    assert code == 0, err
    assert "training data: 20 rows read" in out
    for word in ("tokens of a row: mean", "packing (bfd) by max_length:", "(this run's)", "over max_length",
                 "padding_free: true", "packing: true", "steps an epoch"):  # fmt: skip
        assert word in out, word
    assert Path("lengths.png").read_bytes().startswith(b"\x89PNG")


def test_picture_that_cannot_be_drawn_is_refused_first(
    halo: Halo, words: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = words(["{broken"])
    code, _, err = halo("data", "stats", *settings, "--png", "nowhere/a.png")
    assert code == 2 and "there is no folder nowhere" in err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = halo("data", "stats", *settings, "--png", "a.png")
    assert code == 2 and "pip install 'halo-moe[plot]'" in err


def test_prepared_folder_trains_as_its_rows_do(
    halo: Halo, words: Callable[..., list[str]], tmp_path: Path
) -> None:
    settings = [
        *words([chat(number) for number in range(6)], max_length=64)[1:],
        "model_name_or_path=tiny", "family=lfm2",
    ]  # fmt: skip
    code, out, err = halo("data", "prepare", "out", *settings)
    assert code == 0, err
    assert "a run takes it by dataset_name: out" in out
    common = [*settings, "max_steps=2", "per_device_train_batch_size=2", "save_strategy=no"]
    losses = []
    for run, more in (("files", []), ("folder", ["dataset_name=out"])):
        kept = [word for word in common if not (more and word.startswith("dataset_name"))]
        code, _, err = halo("train", *kept, *more, f"output_dir={run}")
        assert code == 0, err
        losses.append([json.loads(line)["loss"] for line in (tmp_path / run / "metrics.jsonl").open()])
    assert losses[0] == losses[1]
    code, _, err = halo("train", *[w for w in common if "max_length" not in w], "output_dir=b", "dataset_name=out")
    assert code == 2


def test_no_folder_to_write_is_told(halo: Halo, words: Callable[..., list[str]]) -> None:
    code, _, err = halo("data", "prepare", *words([chat(0)]))
    assert (code, "the folder to write is missing" in err) == (2, True)
    Path("out").mkdir()
    (Path("out") / "a").write_text("mine")
    code, _, err = halo("data", "prepare", "out", *words([chat(0)]))
    assert (code, "something is there already" in err) == (2, True)


def test_help_names_the_commands_without_torch(without_torch: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    run = without_torch("data", "--help")
    assert run.returncode == 0, run.stderr
    assert all(word in run.stdout for word in ("preview", "stats", "prepare"))


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_histogram_counts_every_row_once() -> None:
    lengths = np.array([5, 5, 6, 17, 40])
    found = statistics.histogram(lengths, bins=4)
    assert sum(one.rows for one in found) == 5
    for one in found:
        assert one.rows == sum(one.low <= length <= one.high for length in lengths)
    assert statistics.histogram(np.array([3])) == [statistics.Bin(low=3, high=3, rows=1)]


def test_padding_share_by_hand() -> None:
    # Batches of two: (4, 2) and (3,): 8 + 3 positions for 9 tokens.
    assert statistics.padding_share(np.array([4, 2, 3]), 2) == pytest.approx(1 - 9 / 11)
    assert statistics.padding_share(np.array([4, 4]), 2) == 0.0


def test_packing_at_a_length_by_hand() -> None:
    packed = statistics.packed(rows_of(6, 4, 5, 30), 10, "bfd")
    assert (packed.packs, packed.too_long, packed.filled) == (2, 1, 15 / 20)
    assert statistics.packed(rows_of(6, 4, 5, 30), 10, "wrapped").packs == 5
    assert statistics.packed(rows_of(30), 10, "bfd").packs == 0


def rows_of(*lengths: int, learnt: bool = True) -> Rows:
    rows = Rows()
    for number, length in enumerate(lengths):
        rows.add(Row(row_id=number, input_ids=range(length), supervised=[learnt] * length))
    return rows


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_packs_and_steps_are_those_of_a_run_where_rows_are_cut(
    strategy: str, halo: Callable[..., tuple[int, str, str]]
) -> None:
    """Pieces from which nothing is learnt are no part of a run, so they are none of what is told of it."""
    file = Path(__file__).parents[2] / "docs" / "files" / "messages.jsonl"
    code, out, err = halo(
        "data", "stats", f"dataset_name={file}", "model_name_or_path=tiny", "family=lfm2", "max_length=10",
        "packing=true", f"packing_strategy={strategy}", "per_device_train_batch_size=2",
    )  # fmt: skip
    assert code == 0, err
    (packs,) = re.findall(r"documents in (\d+) packs", out)
    assert f"{packs} packs" in next(line for line in out.splitlines() if "(this run's)" in line)
    steps = -(-int(packs) // 2)
    assert re.search(rf"packing: true .* {steps} steps? an epoch \({packs} packs\)", out)
