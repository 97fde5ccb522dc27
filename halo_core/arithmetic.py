"""The arithmetic and the contradictions of a run that a plan must find: sizes that do not fit, keys that disagree.

Not for features and their verdicts: `plan.py` asks the registry for those. No torch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet

from halo_core import support
from halo_core.config import RunConfig
from halo_core.errors import Problem
from halo_core.plugins import near_text
from halo_core.registry import Architecture, Family, size, text_config

DEEPEP_SIZES = (2, 4, 8)
"""How many processes of one machine DeepEP's kernels are made for."""

DEEPEP_INSTALL = (
    "build DeepEP 1.2 from source (https://github.com/deepseek-ai/DeepEP; deep-ep on PyPI is 1.0, too old), "
    "or ep_dispatcher: all_to_all"
)


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Sizes of the mesh axes; their product is the number of processes."""

    replicate: int
    shard: int
    cp: int
    ep: int
    etp: int

    @property
    def world(self) -> int:
        """Return the number of processes."""
        return self.replicate * self.shard * self.cp * self.ep * self.etp

    @property
    def data_ranks(self) -> int:
        """Return how many processes see different rows."""
        return self.world // (self.cp * self.etp)


def degrees(
    config: RunConfig, architecture: Architecture, model: Mapping[str, Any], nproc: int, problems: list[Problem]
) -> Degrees:
    """Return the mesh; a combination or a size that does not fit is a problem with the values that do."""
    ep, etp = config.expert_parallel_size, config.expert_tensor_parallel_size
    cp, replicate = config.context_parallel_size, config.data_parallel_replicate_size
    before = len(problems)
    axes = frozenset(name for name, degree in (("ep", ep), ("etp", etp), ("cp", cp)) if degree > 1)
    if axes not in support.PARALLEL_SETS:
        allowed = "; ".join(" + ".join(sorted(s)) for s in sorted(support.PARALLEL_SETS, key=sorted) if s)
        problems.append(
            Problem(
                key=" + ".join(sorted(axes)),
                why="these parallel axes are not combined",
                remedy=f"one of these sets: {allowed}",
            )
        )
    inner = text_config(architecture.spec, model)
    names = architecture.spec.names
    divides = (
        ("expert_parallel_size", ep, "num_experts", size(names.num_experts, inner), "number of experts"),
        ("expert_tensor_parallel_size", etp, "expert_width", size(names.expert_width, inner), "width of an expert"),
        ("context_parallel_size", cp, "num_heads", size(names.num_heads, inner), "number of attention heads"),
        ("context_parallel_size", cp, "num_kv_heads", size(names.num_kv_heads, inner), "number of key-value heads"),
    )
    for key, degree, _, whole, what in divides:
        if degree > 1 and whole is not None and whole % degree:
            legal = [d for d in _divisors(whole) if d <= 64]
            problems.append(
                Problem(
                    key=key,
                    value=degree,
                    why=f"it does not divide the {what}, {whole}",
                    remedy=f"one of {', '.join(map(str, legal))}",
                )
            )
    product = ep * etp * cp * replicate
    if len(problems) == before and nproc % product:
        parts = " x ".join(
            f"{key}: {degree}"
            for key, degree in (
                ("expert_parallel_size", ep),
                ("expert_tensor_parallel_size", etp),
                ("context_parallel_size", cp),
                ("data_parallel_replicate_size", replicate),
            )
            if degree > 1
        )
        problems.append(
            Problem(
                key="--nproc",
                value=nproc,
                why=f"{parts} need a multiple of {product} processes",
                remedy=f"--nproc {product}, or smaller sizes",
            )
        )
    shard = max(1, nproc // product)
    return Degrees(replicate=replicate, shard=shard, cp=cp, ep=ep, etp=etp)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def run_problems(config: RunConfig) -> list[Problem]:
    """Return contradictions between keys that need no model."""
    problems = []
    if not config.dataset_name and not config.datasets:
        problems.append(
            Problem(
                key="dataset_name",
                value=None,
                why="a run needs rows to learn from",
                remedy="a .jsonl, .json, .parquet or .csv file, a folder, or a hub id",
            )
        )
    if config.dataset_name and config.datasets:
        problems.append(
            Problem(
                key="datasets", value=config.datasets, why="dataset_name is given as well", remedy="keep one of the two"
            )
        )
    for kernel, choice in (config.kernels or {}).items():
        if kernel not in support.KERNELS:
            problems.append(
                Problem(
                    key="kernels",
                    value=kernel,
                    remedy=f"one of {', '.join(support.KERNELS)}",
                    why=f"there is no kernel of this name{near_text(str(kernel), list(support.KERNELS))}",
                )
            )
        elif choice not in support.KERNELS[kernel]:
            problems.append(
                Problem(
                    key="kernels",
                    value=f"{kernel}: {choice}",
                    why=f"{kernel} has no such variant",
                    remedy=f"one of {', '.join(support.KERNELS[kernel])}",
                )
            )
    for feature in config.allow_experimental:
        if not support.expand(feature):
            problems.append(
                Problem(
                    key="allow_experimental",
                    value=feature,
                    why=f"there is no feature of this name{near_text(feature, support.FEATURES)}",
                    remedy=f"one of {', '.join(support.FEATURES)}",
                )
            )
    return problems


def dispatcher_problems(config: RunConfig, ep: int) -> list[Problem]:
    """Return why tokens cannot travel by DeepEP where that is asked for, as far as it is known without a device.

    ep: processes that share the experts; with one, nothing travels.
    """
    if config.ep_dispatcher != "deepep" or ep == 1:
        return []
    found = []
    if importlib.util.find_spec("deep_ep") is None:
        found.append(("DeepEP, the Python module deep_ep, is not installed", DEEPEP_INSTALL))
    if config.dtype == "float32":
        why = "DeepEP carries tokens in bfloat16, and this run computes in float32"
        found.append((why, "dtype: bfloat16, or ep_dispatcher: all_to_all"))
    if ep not in DEEPEP_SIZES:
        sizes = ", ".join(map(str, DEEPEP_SIZES))
        why = f"DeepEP is made for {sizes} processes that share experts, not {ep}"
        found.append((why, "one of these sizes, or ep_dispatcher: all_to_all"))
    return [Problem(key="ep_dispatcher", value="deepep", why=why, remedy=remedy) for why, remedy in found]


def length_problems(config: RunConfig, architecture: Architecture, model: Mapping[str, Any]) -> list[Problem]:
    """Return whether rows of `max_length` tokens fit the positions that the model knows."""
    limit = text_config(architecture.spec, model).get("max_position_embeddings")
    if isinstance(limit, int) and config.max_length and config.max_length > limit:
        return [
            Problem(
                key="max_length",
                value=config.max_length,
                why=f"the model knows positions up to {limit} only",
                remedy=f"max_length: {limit}, or less",
            )
        ]
    return []


def choice_problems(architecture: Architecture, model: Mapping[str, Any]) -> list[Problem]:
    """Return whether a token can choose as many experts as config.json says."""
    names, inner = architecture.spec.names, text_config(architecture.spec, model)
    chosen, experts = size(names.experts_per_token, inner), size(names.num_experts, inner)
    if chosen is None or experts is None or 1 <= chosen <= experts:
        return []
    return [
        Problem(
            key="model_name_or_path",
            value=chosen,
            why=f"its config.json says that a token goes to {chosen} experts ({' or '.join(names.experts_per_token)}), "
            f"and a layer has {experts}",
            remedy=f"give a model whose config.json names 1 to {experts}",
        )
    ]


def version_problems(config: RunConfig, family: Family) -> list[Problem]:
    """Return whether the installed transformers is one the family was tested with."""
    installed, tested = importlib.metadata.version("transformers"), family.spec.transformers
    if config.allow_untested_transformers or SpecifierSet(tested).contains(installed, prereleases=True):
        return []
    return [
        Problem(
            key="allow_untested_transformers",
            value=False,
            why=f"transformers {installed} is installed, family {family.name} was tested with {tested}",
            remedy=f"pip install 'transformers{tested}', or allow_untested_transformers: true",
            by=family.plugin,
        )
    ]
