"""What becomes of plugins that are broken, contradict others or are older; and what sound ones add to the commands."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Halo = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]
Separately = Callable[..., subprocess.CompletedProcess[str]]


FAMILY = '''
from halo_core import support
from halo_core.family import ArchitectureSpec, ConfigNames, FamilySpec, HeadSpec, answers
from halo_core.hookspecs import hookimpl
from halo_core.verdict import Supported

NAMES = ConfigNames(hidden_size=("hidden_size",), num_layers=("num_hidden_layers",), num_heads=("num_attention_heads",),
                    num_kv_heads=("num_key_value_heads",), vocab_size=("vocab_size",))
SPEC = ArchitectureSpec(name="{name}", model_types=("{name}",), model_class="transformers:LlamaForCausalLM",
                        config_class="transformers:LlamaConfig", decoder_layer="LlamaDecoderLayer", is_moe=False,
                        names=NAMES, head=HeadSpec(softcap=None), tiny={{}}, source="a test")

@hookimpl
def halo_families():
    yield FamilySpec(name="{name}", contract={contract}, architectures=(SPEC,), transformers=">=5", source="a test")

@hookimpl
def halo_features():
    yield from answers("{name}", {{f: Supported(proof="cpu") for f in support.FEATURES if f not in {left_out}}})
'''
HOOK = "from halo_core.hookspecs import hookimpl\n@hookimpl\n"
UNSOUND = {
    "import error": ("import a_package_nobody_has\n", ["a_package_nobody_has", "install the package"]),
    "exception at import": ("1 / 0\n", ["ZeroDivisionError"]),
    "exit at import": ("raise SystemExit(0)\n", ["sys.exit(0)"]),
    "torch at import": ("import torch\n", ["imports torch"]),
    "two misspelt hooks": (
        f"{HOOK}def halo_familys(): return []\n@hookimpl\ndef halo_chek_run(plan): return []\n",
        ["halo_familys is not a hook; did you mean 'halo_families'?", "halo_chek_run is not a hook"],
    ),
    "taken family": (FAMILY.format(name="lfm2", contract=1, left_out=()), ["family 'lfm2' is declared by two plugins"]),
    "missing answer": (FAMILY.format(name="toy", contract=1, left_out=("packing",)), ["does not answer: packing"]),
    "newer contract": (FAMILY.format(name="toy", contract=99, left_out=()), ["upgrade halo-moe"]),
    "raising declaration": (f"{HOOK}def halo_families(): raise KeyError('gone')\n", ["halo_families raised KeyError"]),
}


@pytest.mark.parametrize("kind", UNSOUND)
def test_unsound_plugin_is_shown_everywhere_and_train_refuses(
    tmp_path: Path, kind: str, run_yaml: Write, separately: Separately
) -> None:
    source, expected = UNSOUND[kind]
    installed = tmp_path / "site"
    install(installed, "third_party", source)
    (installed / "torch.py").write_text("")  # a stand-in, so that importing it costs nothing
    program = (
        "import sys\nsys.path.insert(0, sys.argv[1])\nfrom halo_core.cli.main import exit_code\n"
        "for words in (['--help'], ['plugins'], ['matrix'], ['train', 'run.yaml']):\n"
        "    print('---', exit_code(words), flush=True)\n"
        "    print('---', file=sys.stderr, flush=True)\n"
        "    for name in ('third_party', 'torch'):\n        sys.modules.pop(name, None)\n"
    )
    run_yaml()
    run = separately(program, installed)
    (helped, shown, matrix, trained), errors = run.stdout.split("---")[:4], run.stderr.split("---")
    codes = re.findall(r"^--- (\d+)$", run.stdout, re.MULTILINE)
    assert codes == ["0", "0", "0", "2"], run.stderr
    assert "train" in helped and "cp:ulysses" in matrix and trained.strip() in ("0", "")
    assert "third_party  broken  (third-party 1.2.3" in shown
    assert "HALO_DISABLE_PLUGINS=third_party" in shown
    for text in expected:
        assert text in shown, shown
        assert text in errors[3], errors[3]
    assert "broken plugins: " in errors[0] and "third_party" in errors[0]
    assert "third_party" in errors[2]
    assert "plugin third_party (third-party 1.2.3)" in errors[3]
    assert "uninstall third-party, or leave it out with HALO_DISABLE_PLUGINS=third_party" in errors[3]
    assert not (tmp_path / "out").exists()


def test_broken_plugin_left_out_lets_a_run_pass(
    halo: Halo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: list[object], run_yaml: Write
) -> None:
    install(tmp_path / "site", "third_party", "1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    file = run_yaml()
    assert halo("train", file, "--dry-run")[0] == 2
    monkeypatch.setenv("HALO_DISABLE_PLUGINS", "third-party")
    code, _, err = halo("train", file, "--dry-run")
    assert code == 0, err
    assert "third_party  disabled" in halo("plugins")[1]


def test_plugin_file_is_loaded_beside_the_installed_ones(
    halo: Halo, tmp_path: Path, planned: list[object], run_yaml: Write
) -> None:
    toy = tmp_path / "toy.py"
    toy.write_text(FAMILY.format(name="toy", contract=1, left_out=()))
    assert f"toy  loaded  (file -, {toy})" in halo("plugins", "--plugin", toy)[1]
    code, out, _ = halo("matrix", "--plugin", toy, "--json")
    assert code == 0 and "toy" in {cell["family"] for cell in json.loads(out)}
    code, _, err = halo("train", run_yaml(family="toy"), "--plugin", toy, "--dry-run")
    assert code == 0, err
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    code, _, err = halo("train", run_yaml(), "--plugin", toy, "--plugin", broken, "--dry-run")
    assert code == 2
    assert "ZeroDivisionError" in err and "repair the file, or leave --plugin out" in err


def test_tracker_of_a_plugin_is_a_word_of_report_to(
    halo: Halo, tmp_path: Path, planned: list[object], run_yaml: Write
) -> None:
    file = run_yaml(report_to="pigeon")
    code, _, err = halo("train", file, "--dry-run")
    assert code == 2 and "report_to: pigeon" in err
    post = tmp_path / "post.py"
    post.write_text(
        "from halo_core.family import BackendSpec\n" + HOOK
        + "def halo_backends():\n    yield BackendSpec(kind='tracker', name='pigeon', target='loft:fly')\n"
    )
    code, _, err = halo("train", file, "--plugin", post, "--dry-run")
    assert code == 0, err
    assert "tracker pigeon: loft:fly" in halo("plugins", "--plugin", post)[1]


def test_older_plugin_trains_and_a_feature_newer_than_it_is_refused(
    halo: Halo, tmp_path: Path, planned: list[object], run_yaml: Write
) -> None:
    old = tmp_path / "old.py"
    old.write_text(FAMILY.format(name="old", contract=0, left_out=("packing",)))
    assert "family old: old (contract 0)" in halo("plugins", "--plugin", old)[1]
    cells = json.loads(halo("matrix", "--plugin", old, "--json")[1])
    cell = next(cell for cell in cells if (cell["family"], cell["feature"]) == ("old", "packing"))
    assert cell["verdict"] == "Unsupported"
    assert "not declared: plugin written for contract 0" in cell["reason"]
    assert halo("train", run_yaml(family="old"), "--plugin", old, "--dry-run")[0] == 0
    code, _, err = halo("train", run_yaml(family="old", packing="true"), "--plugin", old, "--dry-run")
    assert code == 2
    assert "not declared: plugin written for contract 0" in err


def test_check_run_of_a_plugin_stops_only_its_own_families(
    halo: Halo, tmp_path: Path, planned: list[object], run_yaml: Write
) -> None:
    strict = tmp_path / "strict.py"
    strict.write_text(
        FAMILY.format(name="strict", contract=1, left_out=())
        + "from halo_core.errors import Problem\n@hookimpl\ndef halo_check_run(plan, config):\n"
        "    yield Problem(key='seed', value=plan.family, why='a rule of ours', remedy='another')\n"
    )
    code, _, err = halo("train", run_yaml(family="strict"), "--plugin", strict, "--dry-run")
    assert code == 2
    assert "a rule of ours  (says strict)" in err
    assert halo("train", run_yaml(), "--plugin", strict, "--dry-run")[0] == 0


def test_command_of_a_plugin_is_offered_and_one_that_fails_harms_no_other(
    halo: Halo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path / "site", "greeter",
        f"{HOOK}def halo_add_commands(commands):\n    commands.command('greet-{tmp_path.name[-1]}')(greet)\n"
        "def greet(name: str) -> None:\n    print('hello', name)\n",
    )
    install(tmp_path / "site", "failing", f"{HOOK}def halo_add_commands(commands):\n    raise ValueError('no')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    code, out, err = halo(f"greet-{tmp_path.name[-1]}", "you")
    assert (code, out) == (0, "hello you\n")
    assert "plugin failing could not add its commands: ValueError: no" in err


def install(site: Path, name: str, source: str) -> None:
    """Lay down a distribution with one module and its entry point, as pip would, for a path of sys.path."""
    information = site / f"{name}-1.2.3.dist-info"
    information.mkdir(parents=True)
    (site / f"{name}.py").write_text(source)
    distribution = name.replace("_", "-")
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2.3\n")
    (information / "entry_points.txt").write_text(f"[halo]\n{name} = {name}\n")
