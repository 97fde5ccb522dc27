"""Loading plugins: every fault of a plugin is told, and no plugin keeps the others from loading."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from halo_core import plugins as loading
from halo_core import registry as facts
from halo_core import support

FAMILY = """
from halo_core.family import *
from halo_core.hookspecs import hookimpl
from halo_core.verdict import Supported, Unsupported
from halo_core import support

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
    for feature in support.FEATURES:
        if feature not in {left_out}:
            yield Answer(architecture="{name}", feature=feature, verdict=Supported(proof="cpu"))
"""


def family_file(folder: Path, name: str, *, contract: int = 1, left_out: tuple[str, ...] = (), file: str = "") -> Path:
    path = folder / f"{file or name}.py"
    path.write_text(FAMILY.format(name=name, contract=contract, left_out=left_out))
    return path


@pytest.fixture(autouse=True)
def only_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loading.ALLOW_VARIABLE, "")


def enabled(plugins: loading.Plugins) -> list[loading.PluginRow]:
    return [row for row in plugins.rows if row.enabled]


def faults_of(path: Path) -> str:
    return "\n".join(loading.load((path,)).rows[-1].faults)


def test_sound_plugin_loads_and_its_family_is_found_under_any_spelling(tmp_path: Path) -> None:
    registry = facts.load((family_file(tmp_path, "toy_1"),))
    assert registry.plugins.rows[-1].state == "loaded"
    assert registry.family("Toy-1") is not None and registry.family("toy.1") is not None
    assert registry.family("toi") is None and "toy_1" in registry.near_family("toi_1")


def test_two_misspelt_hooks_and_a_wrong_argument_are_all_told(tmp_path: Path) -> None:
    path = tmp_path / "misspelt.py"
    path.write_text(
        "from halo_core.hookspecs import hookimpl\n"
        "@hookimpl\ndef halo_familys(): return []\n"
        "@hookimpl\ndef halo_step_endet(plan): pass\n"
        "@hookimpl\ndef halo_check_run(plan, configuration): return []\n"
        "def halo_features(): return []\n"
    )
    text = faults_of(path)
    assert "halo_familys is not a hook; did you mean 'halo_families'?" in text
    assert "halo_step_endet is not a hook; did you mean 'halo_step_ended'?" in text
    assert "'configuration'" in text and "it offers plan, config" in text
    assert "halo_features is not marked with @hookimpl" in text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import not_there_at_all\n", "not_there_at_all"),
        ("raise ValueError('boom')\n", "ValueError: boom"),
        ("import sys; sys.exit(3)\n", "sys.exit(3)"),
        ("def (:\n", "SyntaxError"),
        ("x = 1\n", "implements no hook"),
        (
            "from halo_core.hookspecs import hookimpl\n@hookimpl\ndef halo_features():\n    yield 'text'\n",
            "must yield Answer",
        ),
        (
            "from halo_core.hookspecs import hookimpl\n@hookimpl\ndef halo_features():\n    raise KeyError('gone')\n",
            "KeyError",
        ),
        (
            "from halo_core.hookspecs import hookimpl\n"
            "@hookimpl(wrapper=True)\ndef halo_features():\n    return (yield)\n",
            "wrapper",
        ),
    ],
)
def test_fault_becomes_a_row_and_others_still_load(tmp_path: Path, source: str, expected: str) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(source)
    rows = enabled(facts.load((bad, family_file(tmp_path, "good"))).plugins)
    assert [row.state for row in rows] == ["broken", "loaded"]
    assert expected in "\n".join(rows[0].faults)


def test_plugin_that_imports_torch_is_broken(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")  # a stand-in, so that the check costs no real import
    path = family_file(tmp_path, "heavy")
    path.write_text("import torch\n" + path.read_text())
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from halo_core import plugins\n"
        "print(plugins.load((Path(sys.argv[2]),)).rows[-1].faults)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(path)], capture_output=True, text=True, check=True
    )
    assert "imports torch" in run.stdout


def test_family_declared_twice_is_a_fault_of_both_plugins_naming_both(tmp_path: Path) -> None:
    registry = facts.load((family_file(tmp_path, "toy", file="first"), family_file(tmp_path, "toy", file="second")))
    for row in enabled(registry.plugins):
        assert row.state == "broken"
        assert "first" in "\n".join(row.faults) and "second" in "\n".join(row.faults)


def test_current_plugin_must_answer_every_feature_and_an_older_one_reads_not_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = facts.load((family_file(tmp_path, "toy", left_out=("packing",)),))
    assert "does not answer: packing" in "\n".join(registry.plugins.rows[-1].faults)
    newer = tuple(
        support.Mechanism(feature=m.feature, what=m.what, built=m.built, since=2, instead=m.instead)
        if m.feature == "packing"
        else m
        for m in support.MECHANISMS
    )
    monkeypatch.setattr(support, "MECHANISMS", newer)
    registry = facts.load((family_file(tmp_path, "toy", left_out=("packing",)),))
    assert registry.plugins.rows[-1].state == "loaded"
    cell = registry.families["toy"].verdict("packing")
    assert cell.word == "Unsupported" and cell.decisive.reason == "not declared: plugin written for contract 1"


def test_plugin_of_a_newer_contract_is_told_to_upgrade_the_core(tmp_path: Path) -> None:
    registry = facts.load((family_file(tmp_path, "toy", contract=99),))
    assert "upgrade halo-moe" in "\n".join(registry.plugins.rows[-1].faults)


def test_two_answers_for_one_cell_name_both_plugins(tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(
        "from halo_core.family import Answer\nfrom halo_core.hookspecs import hookimpl\n"
        "from halo_core.verdict import Supported\n"
        "@hookimpl\ndef halo_features():\n"
        "    for name, feature in (('toy', 'packing'), ('toi', 'packing'), ('toy', 'pakking')):\n"
        "        yield Answer(architecture=name, feature=feature, verdict=Supported(proof='cpu'))\n"
    )
    registry = facts.load((family_file(tmp_path, "toy"), other))
    assert all("answered twice: by toy and by other" in "\n".join(row.faults) for row in enabled(registry.plugins))
    text = "\n".join(registry.plugins.rows[-1].faults)
    assert "did you mean 'toy'" in text and "did you mean 'packing'" in text


def test_allow_list_and_disable_list_and_a_name_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loading.ALLOW_VARIABLE, "no_such_plugin")
    rows = loading.load().rows
    assert [row.state for row in rows if row.distribution == "halo-moe"] == ["disabled"] * 5
    assert rows[-1].state == "broken" and "not installed" in rows[-1].faults[0]


def test_exception_in_a_behaviour_hook_names_the_plugin(tmp_path: Path) -> None:
    path = family_file(tmp_path, "toy")
    path.write_text(
        path.read_text() + "\n@hookimpl\ndef halo_step_ended(plan, step):\n    raise RuntimeError('late')\n"
    )
    plugins = loading.load((path,))
    with pytest.raises(loading.PluginFault, match=r"plugin 'toy' failed in halo_step_ended: RuntimeError: late"):
        plugins.call("halo_step_ended", family="toy", plan=None, step=None)
    assert plugins.call("halo_step_ended", family="another", plan=None, step=None) == []
