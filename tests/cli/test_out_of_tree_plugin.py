"""A package that nothing in Halo knows, installed with pip into a fresh environment: found, trained, removed, gone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors import safe_open

PACKAGE = Path(__file__).parents[2] / "plugins" / "halo-mosaic"
STEPS = 12
COLOURS = ("red", "green", "blue", "white")


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees the project's packages, and a folder to work in."""

    python: Path
    folder: Path

    def halo(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run the command line in this environment."""
        return self.run(self.python, "-c", "from halo_core.cli.main import main; main()", *words)

    def pip(self, *words: str | Path) -> None:
        """Run the project's pip on this environment; it has none of its own, and no network is touched."""
        done = self.run(sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check", *words)
        assert done.returncode == 0, done.stderr

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command in the folder, with no plugin chosen by the variables of whoever runs the tests."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HALO_", "PYTHONPATH"))}
        return subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, cwd=self.folder, env=inherited, check=False
        )


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Make the environment, with the package built from a copy so that nothing is left in the tree."""
    folder = tmp_path_factory.mktemp("out_of_tree")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    found = Environment(python=folder / "venv" / "bin" / "python", folder=folder)
    paths = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    site = Path(sysconfig.get_path("purelib", scheme="venv", vars=paths))
    # addsitedir, and not the bare path: the project itself may be installed by a .pth file of its own.
    project = sysconfig.get_path("purelib")
    (site / "project.pth").write_text(f"import site; site.addsitedir({project!r})\n")
    shutil.copytree(PACKAGE, folder / "source", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    return found


@pytest.fixture(scope="module")
def installed(environment: Environment) -> Environment:
    """Install the package."""
    environment.pip("install", "--no-index", "--no-deps", "--no-build-isolation", environment.folder / "source")
    return environment


@pytest.fixture(scope="module")
def trained(installed: Environment) -> Environment:
    """Train its tiny model on a few rows, by the command alone."""
    folder = installed.folder
    rows = [{"text": f"the tile of number {number % 4} is {COLOURS[number % 4]}"} for number in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(
        f"model_name_or_path: tiny\ndataset_name: rows.jsonl\noutput_dir: out\nmax_steps: {STEPS}\n"
        "per_device_train_batch_size: 8\nlearning_rate: 3e-3\nsave_strategy: \"no\"\n"
    )
    done = installed.halo("train", "--family", "mosaic", "run.yaml")
    assert done.returncode == 0, done.stderr
    return installed


def test_package_is_found_by_its_entry_point(installed: Environment) -> None:
    done = installed.halo("plugins")
    assert done.returncode == 0, done.stderr
    assert "mosaic  loaded  (halo-mosaic 0.1.0, halo_mosaic.facts)" in done.stdout
    assert "family mosaic: mosaic (contract 1)" in done.stdout
    assert "lfm2  loaded" in done.stdout


def test_matrix_shows_its_answers_with_their_author(installed: Environment) -> None:
    done = installed.halo("matrix", "--family", "mosaic", "--json")
    cells = {cell["feature"]: cell for cell in json.loads(done.stdout)}
    assert cells["grouped_gemm"]["verdict"] == "Supported"
    assert (cells["ep"]["verdict"], cells["ep"]["by"]) == ("Unsupported", "mosaic")
    why = installed.halo("matrix", "--why", "mosaic", "ep").stdout
    assert "every expert is a module of its own" in why and "(MosaicTile)" in why and "halo_core: Supported" in why


def test_its_rule_and_its_answers_refuse_a_run_without_torch(installed: Environment) -> None:
    folder = installed.folder / "single"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "mosaic", "tiles_per_token": 1, "num_tiles": 8}')
    program = (
        "import sys; from halo_core.cli.main import exit_code; code = exit_code(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    words = ("train", "--dry-run", "model_name_or_path=single/", "dataset_name=rows.jsonl", "output_dir=never")
    done = installed.run(installed.python, "-c", program, *words, "expert_parallel_size=2", "--nproc", "2")
    assert done.returncode == 2, done.stderr
    assert "tiles_per_token: 1" in done.stderr and "every expert is a module of its own" in done.stderr
    assert done.stderr.count("(says mosaic)") == 2


def test_its_own_test_by_the_conformance_kit_passes(installed: Environment) -> None:
    tests = installed.folder / "source" / "tests"
    done = installed.run(installed.python, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", tests)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_it_trains_and_the_loss_falls(trained: Environment) -> None:
    rows = [json.loads(line) for line in (trained.folder / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == STEPS
    assert losses[-1] < 0.7 * losses[0]


def test_its_export_holds_every_expert_by_its_own_key_and_generates(trained: Environment) -> None:
    with safe_open(trained.folder / "out" / "model.safetensors", "pt") as file:
        found = set(file.keys())
    in_layer = [f"self_attn.{name}_proj.weight" for name in "qkvo"] + ["norm.weight", "mixture.router.weight"]
    in_layer += [
        f"mixture.tiles.{tile}.{part}.{kind}"
        for tile in range(8) for part in ("inner", "outer") for kind in ("weight", "bias")
    ]
    layers = {f"model.layers.{layer}.{name}" for layer in range(3) for name in in_layer}
    assert found - {"lm_head.weight"} == {"model.embed_tokens.weight", "model.norm.weight", *layers}
    done = trained.halo("sample", "out", "the tile", "--max-new-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_its_command_is_offered(trained: Environment) -> None:
    assert "mosaic-load" in trained.halo("--help").stdout
    done = trained.halo("mosaic-load", "out", "the tile of number 3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["layer 0", "layer 1", "layer 2"]
    counts = [json.loads(line.partition(": ")[2]) for line in lines]
    assert len({sum(count) for count in counts}) == 1 and all(len(count) == 8 for count in counts)


def test_removed_it_is_gone(trained: Environment) -> None:
    trained.pip("uninstall", "--yes", "halo-mosaic")
    done = trained.halo("plugins")
    assert done.returncode == 0 and "mosaic" not in done.stdout
    done = trained.halo("train", "--family", "mosaic", "run.yaml", "model_name_or_path=out/")
    assert done.returncode == 2
    assert "no installed plugin has this family" in done.stderr
    assert "gemma4, gpt_oss, lfm2, qwen3, qwen3_5" in done.stderr
    assert "its config.json says model_type: mosaic" in done.stderr


def test_nothing_was_built_in_the_tree() -> None:
    assert not [path for path in PACKAGE.rglob("*") if path.suffix == ".egg-info" or path.name in ("build", "dist")]
