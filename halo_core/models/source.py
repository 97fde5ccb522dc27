"""Finds the folder a model comes from, and refuses one whose weights cannot be read.

Not for reading tensors (`load.py`). No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halo_core.errors import Problem, Refused
from halo_core.model_config import left_packed, parts_in, parts_problem, stored_as
from halo_core.models.safetensors_files import INDEX_FILE, SINGLE_FILE
from halo_core.support import PACKED_FORMATS

KEY = "model_name_or_path"

DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "README.md")
"""What is fetched of a hub repository. Pickled weights and remote code are not."""

NOT_DOWNLOADED = ("original/*", "metal/*", "onnx/*", "consolidated*", "*.bin.index.json")


def resolve(name: str, revision: str | None = None, *, dequantise: bool = True) -> Path:
    """Return the local folder of a model, downloading a hub id's files when they are not in the local cache.

    revision: branch, tag or commit of a hub id. dequantise: whether weights in a known packed form may be read.

    Raises:
        Refused: when there is no such folder or repository, or `check_folder` refuses it.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _downloaded(name, revision)
    check_folder(folder, dequantise=dequantise)
    return folder


def check_folder(folder: Path, *, dequantise: bool = True) -> None:
    """Check that a folder holds config.json and whole safetensors weights, plain or in a form that is read as bf16.

    dequantise: whether such a form may be read.

    Raises:
        Refused: with every reason found.
    """
    parts = parts_in(folder)
    if parts is not None:
        raise Refused(parts_problem(KEY, folder, parts))
    problems: list[Problem] = []
    config = _config(folder, problems)
    method = stored_as(config)
    if method is not None and method in PACKED_FORMATS and not dequantise:
        problems.append(left_packed("dequantize_source", method))
    elif method is not None and method not in PACKED_FORMATS:
        forms = ", ".join(PACKED_FORMATS)
        problems.append(
            Problem(
                key=KEY,
                value=str(folder),
                why=f"its weights are stored as {method}; this version reads bf16, fp16 and fp32, and {forms} as bf16",
                remedy="start from a bf16 copy of this model",
                kind="not built",
            )
        )
    else:
        problems += _weight_problems(folder)
    if problems:
        raise Refused(problems)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the folder's safetensors files: those its index names, or the single file."""
    index = folder / INDEX_FILE
    if index.is_file():
        named: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return tuple(folder / name for name in sorted(set(named.values())))
    return (folder / SINGLE_FILE,)


def _weight_problems(folder: Path) -> list[Problem]:
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if index.is_file():
        try:
            missing = [path.name for path in weight_files(folder) if not path.is_file()]
        except (ValueError, KeyError, AttributeError, OSError) as fault:
            return [_problem(folder, f"{INDEX_FILE} cannot be read ({fault})", "copy or download it again")]
        if missing:
            why = f"{INDEX_FILE} names {len(missing)} files that are not there: {', '.join(missing[:5])}"
            return [_problem(folder, why, "copy or download the missing files")]
        return []
    if single.is_file():
        return []
    if (folder / "adapter_config.json").is_file():
        return [_problem(folder, "it holds an adapter and no model", "give the model that the adapter was made for")]
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards:
        why = f"it holds {', '.join(shards[:3])}, but neither {SINGLE_FILE} nor {INDEX_FILE}"
        return [_problem(folder, why, f"copy {INDEX_FILE} as well, or save the model with transformers")]
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        why = f"its weights are pickled ({pickled[0]}), and unpickling runs whatever code the file holds"
        return [_problem(folder, why, "save it once as safetensors: from_pretrained, then save_pretrained")]
    return [_problem(folder, "it holds no safetensors file", f"give a folder with {SINGLE_FILE}, or a hub id")]


def _config(folder: Path, problems: list[Problem]) -> Mapping[str, Any]:
    try:
        config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        problems.append(_problem(folder, f"its config.json cannot be read ({fault})", "copy or download it again"))
        return {}
    return config if isinstance(config, Mapping) else {}


def _downloaded(name: str, revision: str | None) -> Path:
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise Refused(_problem(name, "there is no such folder", "give a model's folder, or a hub id such as org/name"))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=list(DOWNLOADED), ignore_patterns=list(NOT_DOWNLOADED)
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as fault:
        why = f"it is no folder here, and the hub did not give it ({str(fault).splitlines()[0][:200]})"
        remedy = "check the spelling, log in with `hf auth login` if it is gated, or give a local folder"
        raise Refused(_problem(name, why, remedy)) from None
    return Path(found)


def _problem(name: str | Path, why: str, remedy: str) -> Problem:
    return Problem(key=KEY, value=str(name), why=why, remedy=remedy)
