"""Which model a run starts from: its config.json, and the family and architecture that it means.

config.json is read with `json` and nothing else: from a folder, the hub's cache, a plugin, or the hub. Not for
weights: `models/source.py` brings those. No torch, no transformers.
"""

from __future__ import annotations

import importlib.resources
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halo_core import hub
from halo_core.config import RunConfig
from halo_core.errors import Problem, shown
from halo_core.plugins import fault_text, near_text
from halo_core.registry import Architecture, Family, Registry

TINY = ("tiny", "tiny-dense")

PARTS_FOLDER = "ep-shards"
"""Where a run with save_sharded_ep leaves the parts of its model, inside output_dir."""
PARTS_MANIFEST = "ep-shards.json"
"""The file that tells such a folder."""
MERGE = "halo run merge-ep-shards"

QUANTISATION = "quantization_config"
"""The entry of config.json that says how weights are stored, when they are not plain numbers."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """config.json as a dict, and in words where it was read (`origin`). `guessed` names fields nobody published."""

    config: Mapping[str, Any]
    origin: str
    guessed: tuple[str, ...] = ()


def stored_as(config: Mapping[str, Any]) -> str | None:
    """Return the name of the form in which a model's weights are stored, or None when they are plain numbers."""
    stored = config.get(QUANTISATION)
    if not stored:
        return None
    return str(stored.get("quant_method", "a quantised format") if isinstance(stored, Mapping) else stored)


def left_packed(key: str, method: str) -> Problem:
    """Return the problem of weights that shall stay in the stored form `method`."""
    return Problem(
        key=key,
        value=False,
        why=f"the model's weights are stored as {method}, which has no gradient, so they cannot be trained as they are",
        remedy=f"set {key}: true to read them as bf16, or start from a bf16 copy of this model",
    )


def asked_family(flag: str | None, config: RunConfig, registry: Registry, problems: list[Problem]) -> Family | None:
    """Return the family typed after `--family` (`flag`) or under the key `family`; an unknown one is a problem."""
    name, key = (flag, "--family") if flag is not None else (config.family, "family")
    if name is None:
        return None
    family = registry.family(name)
    if family is None:
        problems.append(
            Problem(
                key=key,
                value=name,
                why=f"no installed plugin has this family{registry.near_family(name)}",
                remedy=f"one of: {', '.join(registry.families)}",
            )
        )
    return family


def choose(
    config: RunConfig, asked: Family | None, registry: Registry, dry_run: bool, problems: list[Problem]
) -> tuple[Family, Architecture, ModelConfig] | None:
    """Return (family, architecture, config.json), or None after adding the problem that hides them."""
    key, name = "model_name_or_path", config.model_name_or_path
    if not name:
        problems.append(
            Problem(
                key=key,
                value=None,
                why="a run needs a model to start from",
                remedy="a folder, a hub id such as org/name, or tiny for a small random model",
            )
        )
        return None
    if name in TINY:
        return _tiny(name, asked, registry, problems)
    model = read(name, config.model_revision, registry, may_use_bundled=dry_run)
    if isinstance(model, Problem):
        problems.append(model)
        return None
    model_type = model.config.get("model_type")
    architecture = registry.match(model.config)
    if architecture is None:
        known = sorted({t for a in registry.architectures() for t in a.spec.model_types})
        remedy = f"a model of one of: {', '.join(known)}; or install a plugin for it"
        if not known:
            remedy = "no family is loaded: `halo plugins` says why; look at HALO_PLUGINS and HALO_DISABLE_PLUGINS"
        problems.append(
            Problem(
                key=key,
                value=name,
                why=f"its config.json says model_type: {shown(model_type)}, which no installed family knows"
                f"{near_text(str(model_type), known)}",
                remedy=remedy,
            )
        )
        return None
    owner = registry.families[architecture.family]
    if asked is not None and asked.name != owner.name:
        problems.append(
            Problem(
                key="family",
                value=asked.name,
                why=f"{name} is a {model_type}, which belongs to family {owner.name}",
                remedy=f"--family {owner.name}, or leave --family out: it is read from the model",
            )
        )
    return owner, architecture, model


def _tiny(
    name: str, asked: Family | None, registry: Registry, problems: list[Problem]
) -> tuple[Family, Architecture, ModelConfig] | None:
    names = ", ".join(registry.families)
    if asked is None:
        if not any(problem.key in ("--family", "family") for problem in problems):
            problems.append(
                Problem(
                    key="model_name_or_path",
                    value=name,
                    why="a tiny model exists for every family, so one must be named",
                    remedy=f"--family F, or family: F in the file, with F one of: {names}",
                )
            )
        return None
    chosen = asked.tiny(dense=name == "tiny-dense")
    if chosen is None:
        problems.append(
            Problem(
                key="model_name_or_path",
                value=name,
                why=f"family {asked.name} has no dense architecture",
                remedy="model_name_or_path: tiny",
                by=asked.plugin,
            )
        )
        return None
    spec = chosen.spec
    config = {**spec.tiny, "model_type": spec.model_types[0]}
    origin = f"the tiny model of family {asked.name}, made on the spot with random weights"
    return asked, chosen, ModelConfig(config=config, origin=origin)


def read(name: str, revision: str | None, registry: Registry, *, may_use_bundled: bool) -> ModelConfig | Problem:
    """Return the config.json of `model_name_or_path`, or the problem that keeps it from being read.

    A folder is read directly. A hub id is looked up in the local cache, then (for a dry-run, `may_use_bundled`)
    among the configurations that plugins bundle, then on the hub.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _from_file(folder / "config.json", name, str(folder / "config.json"))
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") != 1 or "\\" in name
    if looks_like_path:
        return _problem(name, "there is no such folder", "give a folder with config.json, or a hub id such as org/name")
    cached = _from_cache(name, revision)
    if cached is not None:
        return _from_file(cached, name, f"the local hub cache of {name}")
    published = registry.published(name)
    if published is not None and may_use_bundled:
        package, _, path = published.config.partition(":")
        text = (importlib.resources.files(package) / path).read_text(encoding="utf-8")
        return ModelConfig(
            config=json.loads(text),
            origin=f"the configuration of {name} bundled with its plugin",
            guessed=published.guessed,
        )
    return _from_hub(name, revision)


def parts_in(folder: Path) -> Path | None:
    """Return the folder of a model's parts that a folder without config.json is or holds, or None."""
    if (folder / "config.json").is_file():
        return None
    return next((one for one in (folder, folder / PARTS_FOLDER) if (one / PARTS_MANIFEST).is_file()), None)


def parts_problem(key: str, folder: Path, parts: Path) -> Problem:
    """Return the problem that `folder` is given as a model and holds one in parts."""
    why = "it holds the parts of a model that several processes wrote, not yet put together"
    return Problem(key=key, value=folder, why=why, remedy=f"{MERGE} {parts} OUT, then give OUT")


def _from_file(file: Path, name: str, origin: str) -> ModelConfig | Problem:
    if not file.is_file():
        parts = parts_in(file.parent)
        if parts is not None:
            return parts_problem("model_name_or_path", file.parent, parts)
        return _problem(name, f"{file} does not exist", "give a folder that holds config.json and safetensors files")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as fault:
        return _problem(name, f"{file} cannot be read as JSON: {fault}", "repair the file or copy the model again")
    if not isinstance(config, dict):
        return _problem(name, f"{file} is not a JSON object", "repair the file or copy the model again")
    return ModelConfig(config=config, origin=origin)


def _from_cache(name: str, revision: str | None) -> Path | None:
    """Return config.json of the hub cache; the hub's package is imported only when the cache holds this model."""
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    if not (cache / f"models--{name.replace('/', '--')}").is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found) if isinstance(found, str) else None


def _from_hub(name: str, revision: str | None) -> ModelConfig | Problem:
    obstacle = hub.obstacle()
    if obstacle is not None:
        return _problem(
            name,
            f"it is neither a folder here nor in the local hub cache, and {obstacle}",
            "give a local folder, or download it first on a machine that reaches the hub",
        )
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(name, "config.json", revision=revision, etag_timeout=5)
    except Exception as fault:  # whatever the hub's client raises, the person needs the same two ways out
        return _problem(
            name,
            f"it is no folder here, and the hub did not give its config.json ({fault_text(fault)[:200]})",
            "check the spelling, log in with `hf auth login` if it is gated, or give a local folder",
        )
    return _from_file(Path(file), name, f"the hub's {name}")


def _problem(name: str, why: str, remedy: str) -> Problem:
    return Problem(key="model_name_or_path", value=name, why=why, remedy=remedy)
