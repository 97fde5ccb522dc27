"""Mistakes with folders, files, rows and flags: refused with the way out, without a traceback. Not for the plan."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import halo_core
from halo_core.errors import Refused

Halo = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small model folder that trains."""
    from halo_core import registry as facts
    from halo_core.models.tiny import write_tiny

    family = facts.load().family("lfm2")
    assert family is not None
    architecture = family.tiny(dense=False)
    assert architecture is not None
    folder = tmp_path_factory.mktemp("models") / "sound"
    write_tiny(architecture, folder)
    return folder


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    """Return a copy of the model folder that a test may spoil."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


def train(halo: Halo, model: Path, *words: str) -> tuple[int, str, str]:
    given = ("dataset_name=rows.jsonl", "output_dir=out", "max_steps=1", "save_strategy=no")
    return halo("train", f"model_name_or_path={model}", *(word for word in given if not _replaced(word, words)), *words)


def _replaced(word: str, words: tuple[str, ...]) -> bool:
    return any(other.startswith(word.partition("=")[0] + "=") for other in words)


def edit(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def test_the_model_that_the_mistakes_are_made_with_trains(halo: Halo, model: Path) -> None:
    assert train(halo, model)[0] == 0


@pytest.mark.parametrize("output_dir", ["rows.jsonl", "rows.jsonl/out", "/proc/halo/out", "x" * 300])
def test_output_dir_that_cannot_be_made_is_refused(halo: Halo, model: Path, output_dir: str) -> None:
    code, _, err = train(halo, model, f"output_dir={output_dir}")
    assert code == 2 and f"output_dir: {output_dir}" in err


@pytest.mark.parametrize("spoil", ["missing", "broken"])
def test_tokenizer_that_cannot_be_read_is_refused(halo: Halo, model: Path, spoil: str) -> None:
    if spoil == "missing":
        (model / "tokenizer.json").unlink()
    else:
        (model / "tokenizer.json").write_text("{")
    code, _, err = train(halo, model)
    assert code == 2 and f"model_name_or_path: {model}" in err and "its tokenizer cannot be read" in err
    code, _, err = halo("sample", model, "hello")
    assert code == 2 and f"DIR: {model}" in err and "its tokenizer cannot be read" in err


@pytest.mark.parametrize("entries", [{"num_hidden_layers": 40}, {"num_hidden_layers": "four"}])
@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_config_json_that_transformers_refuses_is_refused(
    halo: Halo, model: Path, entries: dict[str, Any], words: tuple[str, ...]
) -> None:
    edit(model / "config.json", **entries)
    code, _, err = train(halo, model, *words)
    assert code == 2 and "config.json is not valid" in err and "num_hidden_layers" in err


def shrink_embedding(model: Path, rows: int) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    name = "model.embed_tokens.weight"
    save_file({**tensors, name: tensors[name][:rows].contiguous()}, model / "model.safetensors", {"format": "pt"})
    edit(model / "config.json", vocab_size=rows)


def test_token_beyond_the_embedding_is_named_before_weights_are_read(halo: Halo, model: Path, tmp_path: Path) -> None:
    shrink_embedding(model, 300)
    (tmp_path / "rows.jsonl").write_text('{"text": "a b"}\n{"text": "a thousand"}\n')
    code, _, err = train(halo, model)
    assert code == 2 and "training row 2 holds the token" in err and "below 300 (vocab_size" in err
    assert "resize_token_embeddings" in err and not (tmp_path / "out").exists()


def test_padding_token_beyond_the_embedding_pads_all_the_same(halo: Halo, model: Path, tmp_path: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    added = {**tokenizer["added_tokens"][0], "id": 2048, "content": "<|new pad|>"}
    tokenizer["added_tokens"].append(added)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "rows.jsonl").write_text('{"text": "a b"}\n{"text": "a b c d e f"}\n')
    losses = []
    for pad_token, output_dir in (("<|pad|>", "old"), ("<|new pad|>", "new")):
        edit(model / "tokenizer_config.json", pad_token=pad_token)
        code, _, err = train(halo, model, f"output_dir={output_dir}")
        assert code == 0, err
        losses.append(json.loads((tmp_path / output_dir / "metrics.jsonl").read_text())["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--out", "/proc/halo"), "--out: /proc/halo"),
        (("--out", "rows.jsonl/new"), "the folder cannot be made"),
        (("--out", "new", "--seed", "-1"), "--seed: -1"),
        (("--out", "new", "--seed", str(2**70)), "give a whole number, 0 to 4294967295"),
    ],
)
def test_init_tiny_refuses_folders_and_seeds_that_cannot_be(
    halo: Halo, words: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    code, _, err = halo("init-tiny", "--family", "lfm2", *words)
    assert code == 2 and expected in err and not (tmp_path / "new").exists()


def test_sample_refuses_what_it_cannot_answer_from(halo: Halo, model: Path) -> None:
    code, _, err = halo("sample", model, "hello", "--max-new-tokens", "0")
    assert code == 2 and "--max-new-tokens: 0" in err
    (model / "chat_template.jinja").write_text("{% for message in messages %}")
    code, _, err = halo("sample", model, "hello")
    assert code == 2 and "the prompt cannot be written" in err
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-100])
    code, _, err = halo("sample", model, "hello")
    assert code == 2 and "the model cannot be loaded" in err
    (model / "config.json").write_text("{")
    code, _, err = halo("sample", model, "hello")
    assert code == 2 and "DIR: " in err


def test_sample_does_not_answer_from_weights_that_are_made_up(halo: Halo, model: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.2" not in name}
    save_file(kept, model / "model.safetensors", {"format": "pt"})
    code, out, err = halo("sample", model, "hello")
    assert (code, out) == (2, "") and "lack weights of the model" in err and "layers.2" in err


@pytest.mark.parametrize(
    "words",
    [("--json", "--markdown"), ("--why", "lfm2", "ep", "--json"), ("--config", "run.yaml", "--why", "lfm2", "ep")],
)
def test_matrix_refuses_two_outputs_instead_of_choosing_one(halo: Halo, words: tuple[str, ...]) -> None:
    code, out, err = halo("matrix", *words)
    assert (code, out) == (2, "") and "each asks for another output" in err


def test_matrix_names_the_family_once(halo: Halo) -> None:
    code, _, err = halo("matrix", "--family", "qwen3", "--why", "lfm2", "ep")
    assert code == 2 and "--family: qwen3" in err


def test_plugin_that_exits_while_it_declares_is_broken_like_any_other(halo: Halo, tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(
        "from halo_core.hookspecs import hookimpl\n\n\n@hookimpl\ndef halo_families():\n    raise SystemExit(3)\n"
    )
    code, out, _ = halo("plugins", "--plugin", "leaves.py")
    assert code == 0 and "halo_families raised SystemExit: 3" in out


def test_a_wrong_variable_is_to_be_corrected_and_not_disabled(halo: Halo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALO_DISABLE_PLUGINS", "nonsense")
    code, out, _ = halo("plugins")
    assert code == 0 and "correct $HALO_DISABLE_PLUGINS" in out and "HALO_DISABLE_PLUGINS=nonsense" not in out


def test_no_family_at_all_points_to_what_leaves_them_out(
    halo: Halo, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALO_PLUGINS", "")
    code, _, err = train(halo, model)
    assert code == 2 and "HALO_PLUGINS" in err and "one of: ;" not in err


def test_model_of_another_family_is_named_when_a_run_is_resumed(halo: Halo, model: Path, tmp_path: Path) -> None:
    assert train(halo, model, "save_strategy=steps")[0] == 0
    assert halo("init-tiny", "--family", "qwen3", "--out", "other")[0] == 0
    code, _, err = train(halo, Path("other"), "save_strategy=steps", "resume_from_checkpoint=true", "max_steps=2")
    assert code == 2 and "model_name_or_path: other" in err and f"set model_name_or_path: {model}" in err


def test_rows_from_python_need_no_data_set_and_replace_the_one_that_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": "one two three"}]
    file = tmp_path / "run.yaml"
    file.write_text(f"model_name_or_path: {model}\nmax_steps: 1\noutput_dir: {tmp_path / 'first'}\n")
    assert halo_core.train(file, rows=iter(rows)).fit.step == 1
    assert "is not read" not in capsys.readouterr().out
    given = {"model_name_or_path": str(model), "max_steps": 1}
    for number, named in enumerate(({"dataset_name": "nowhere.jsonl"}, {"dataset": "a.jsonl"}, {"datasets": ["b"]})):
        folder = tmp_path / f"run{number}"
        halo_core.train({**given, **named, "output_dir": folder}, rows=rows)
        assert "is not read, because rows are given in Python" in capsys.readouterr().out
        assert "dataset_name: rows given in Python" in (folder / "halo" / "run.yaml").read_text()


@pytest.mark.parametrize("rows", ["rows.jsonl", {"text": "a row"}])
def test_what_is_no_list_of_rows_is_told_as_that(rows: Any, tmp_path: Path) -> None:
    given = {"model_name_or_path": "tiny", "output_dir": tmp_path / "out"}
    with pytest.raises(Refused, match="texts instead of rows"):
        halo_core.train(given, rows=rows, family="lfm2")


@pytest.mark.parametrize("chosen", [0, 9])
def test_more_choices_than_experts_in_config_json_are_refused(halo: Halo, model: Path, chosen: int) -> None:
    edit(model / "config.json", num_experts_per_tok=chosen)
    code, _, err = train(halo, model)
    assert code == 2 and f"a token goes to {chosen} experts (num_experts_per_tok), and a layer has 8" in err
