"""The frozen, checked answer to "what will this run do", or one refusal with every problem.

Not for the device and its kernels: `runtime.resolve` decides those once torch may be imported. No torch here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from packaging.specifiers import SpecifierSet

from halo_core import model_config, support
from halo_core.config import RUN_MECHANISMS, ConfigRead, RunConfig, active_features
from halo_core.errors import Problem, Refused
from halo_core.plugins import PluginFault, near_text
from halo_core.registry import Architecture, Family, Registry, size, text_config
from halo_core.support import Cell, Part


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


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One feature of the run: its verdict, why, and who says so. `key` asked for it (None: always part of a run)."""

    feature: str
    word: str
    reason: str
    by: str
    instead: str = ""
    key: str | None = None
    value: str = ""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run will do, decided without torch.

    rows: the features with their verdicts. attention: the attention implementation asked for, or chosen.
    model_origin: where config.json was read. tokens_per_step: upper bound, in tokens, of one optimizer step.
    plugins: (name, version) of every loaded plugin. notes: what the person should know, nothing that stops a run.
    """

    family: str
    architecture: str
    model_type: str
    model_name_or_path: str
    model_origin: str
    rows: tuple[PlanRow, ...]
    degrees: Degrees
    attention: str
    experts_kernel: str
    plugins: tuple[tuple[str, str], ...]
    tokens_per_step: int | None
    rows_per_step: int
    notes: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """Return the names of the features this run uses."""
        return tuple(row.feature for row in self.rows)

    @property
    def not_built(self) -> tuple[PlanRow, ...]:
        """Return the rows whose mechanism this version lacks; a dry-run shows them, a run is refused."""
        return tuple(row for row in self.rows if row.word == "not built yet")

    def digest(self) -> str:
        """Return 16 hexadecimal digits that are equal exactly when two plans decide the same."""
        decided = {name: value for name, value in asdict(self).items() if name not in ("notes", "model_origin")}
        text = json.dumps(decided, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A sound plan with what it was made from: the configuration, the joined facts and the model's config.json."""

    plan: RunPlan
    config: RunConfig
    registry: Registry
    family: Family
    architecture: Architecture
    model_config: Mapping[str, Any]
    guessed: tuple[str, ...] = ()


def build(
    read: ConfigRead, registry: Registry, *, nproc: int = 1, family: str | None = None, dry_run: bool = False
) -> Checked:
    """Return the checked plan of a run.

    read: the configuration as parsed, with the problems found so far. nproc: number of processes.
    family: what was typed after `--family`. dry_run: mechanisms that are not built become rows, not a refusal.

    Raises:
        Refused: once, with every problem of parsing, keys, types, plugins, model, features and arithmetic.
    """
    config = read.config
    problems = [*read.problems, *_plugin_problems(registry)]
    if nproc < 1:
        problems.append(Problem(key="--nproc", value=nproc, why="a run has at least one process", remedy="--nproc 1"))
    asked = _asked_family(family, config, registry, problems)
    found = _model(config, asked, registry, dry_run, problems)
    problems += _run_problems(config)
    if found is None:
        problems += [_with_line(p, read) for p in _features_without_model(config)] if not dry_run else []
        raise Refused([_with_line(problem, read) for problem in problems])
    owner, architecture, model = found
    problems += _version_problems(config, owner)
    notes = list(read.notes)
    rows, attention = _rows(config, owner, architecture, nproc, problems, notes)
    rows += _quantised_source(model.config)
    degrees = _degrees(config, architecture, model.config, nproc, problems)
    plan = RunPlan(
        family=owner.name, architecture=architecture.name, model_type=str(model.config.get("model_type")),
        model_name_or_path=str(config.model_name_or_path), model_origin=model.origin, rows=tuple(rows),
        degrees=degrees, attention=attention, experts_kernel=_experts_kernel(config, architecture),
        plugins=registry.plugins.versions, rows_per_step=_rows_per_step(config, degrees),
        tokens_per_step=config.max_length * _rows_per_step(config, degrees) if config.max_length else None,
    )
    problems += _length_problems(config, architecture, model.config)
    problems += _hook_problems(registry, plan, model.config)
    if not dry_run:
        problems += [_not_built(row) for row in plan.not_built]
    if problems:
        raise Refused([_with_line(problem, read) for problem in problems])
    return Checked(
        plan=replace(plan, notes=tuple(notes)), config=config, registry=registry, family=owner,
        architecture=architecture, model_config=model.config, guessed=model.guessed,
    )


def _with_line(problem: Problem, read: ConfigRead) -> Problem:
    if problem.line is None and problem.where is None and problem.key in read.lines:
        return replace(problem, line=read.lines[problem.key])
    return problem


def _plugin_problems(registry: Registry) -> list[Problem]:
    problems = []
    for row in registry.plugins.broken:
        if row.target.startswith("$"):
            remedy = f"correct {row.target}"
        elif row.distribution == "file":
            remedy = "repair the file, or leave --plugin out"
        else:
            remedy = f"repair or uninstall {row.distribution}, or leave it out with HALO_DISABLE_PLUGINS={row.name}"
        problems += [
            Problem(where=f"plugin {row.name} ({row.distribution} {row.version})", why=fault, remedy=remedy, by=row.name)
            for fault in row.faults
        ]
    return problems


def _asked_family(flag: str | None, config: RunConfig, registry: Registry, problems: list[Problem]) -> Family | None:
    name, key = (flag, "--family") if flag is not None else (config.family, "family")
    if name is None:
        return None
    family = registry.family(name)
    if family is None:
        problems.append(
            Problem(key=key, value=name, why=f"no installed plugin has this family{registry.near_family(name)}",
                    remedy=f"one of: {', '.join(registry.families)}")
        )
    return family


def _model(
    config: RunConfig, asked: Family | None, registry: Registry, dry_run: bool, problems: list[Problem]
) -> tuple[Family, Architecture, model_config.ModelConfig] | None:
    """Return (family, architecture, config.json), or None after adding the problem that hides them."""
    key, name = "model_name_or_path", config.model_name_or_path
    if not name:
        problems.append(
            Problem(key=key, value=None, why="a run needs a model to start from",
                    remedy="a folder, a hub id such as org/name, or tiny for a small random model")
        )
        return None
    if name in model_config.TINY:
        return _tiny(name, asked, registry, problems)
    model = model_config.read(name, config.model_revision, registry, may_use_bundled=dry_run)
    if isinstance(model, Problem):
        problems.append(model)
        return None
    model_type = model.config.get("model_type")
    architecture = registry.match(model.config)
    if architecture is None:
        known = sorted({t for a in registry.architectures() for t in a.spec.model_types})
        problems.append(
            Problem(key=key, value=name,
                    why=f"its config.json says model_type: {model_type}, which no installed family knows"
                        f"{near_text(str(model_type), known)}",
                    remedy=f"a model of one of: {', '.join(known)}; or install a plugin for it")
        )
        return None
    owner = registry.families[architecture.family]
    if asked is not None and asked.name != owner.name:
        problems.append(
            Problem(key="family", value=asked.name,
                    why=f"{name} is a {model_type}, which belongs to family {owner.name}",
                    remedy=f"--family {owner.name}, or leave --family out: it is read from the model")
        )
    return owner, architecture, model


def _tiny(
    name: str, asked: Family | None, registry: Registry, problems: list[Problem]
) -> tuple[Family, Architecture, model_config.ModelConfig] | None:
    names = ", ".join(registry.families)
    if asked is None:
        if not any(problem.key in ("--family", "family") for problem in problems):
            problems.append(
                Problem(key="model_name_or_path", value=name, why="a tiny model exists for every family, so one must be named",
                        remedy=f"--family F, or family: F in the file, with F one of: {names}")
            )
        return None
    chosen = asked.tiny(dense=name == "tiny-dense")
    if chosen is None:
        problems.append(
            Problem(key="model_name_or_path", value=name, why=f"family {asked.name} has no dense architecture",
                    remedy="model_name_or_path: tiny", by=asked.plugin)
        )
        return None
    spec = chosen.spec
    config = {**spec.tiny, "model_type": spec.model_types[0]}
    origin = f"the tiny model of family {asked.name}, made on the spot with random weights"
    return asked, chosen, model_config.ModelConfig(config=config, origin=origin)


def _version_problems(config: RunConfig, family: Family) -> list[Problem]:
    installed = importlib.metadata.version("transformers")
    if config.allow_untested_transformers or SpecifierSet(family.spec.transformers).contains(installed, prereleases=True):
        return []
    return [
        Problem(key="allow_untested_transformers", value=False,
                why=f"transformers {installed} is installed, family {family.name} was tested with {family.spec.transformers}",
                remedy=f"pip install 'transformers{family.spec.transformers}', or allow_untested_transformers: true",
                by=family.plugin)
    ]


def _features_without_model(config: RunConfig) -> list[Problem]:
    """Return what can be said about features while the model is unknown: the core's own missing mechanisms."""
    rows = []
    for key, value, feature in active_features(config):
        known = _mechanism(feature)
        if known is not None and not known.built:
            rows.append(_not_built(_core_row(key, value, known)))
    return rows


def _mechanism(feature: str) -> support.Mechanism | None:
    return next((m for m in (*support.MECHANISMS, *RUN_MECHANISMS) if m.feature == feature), None)


def _core_row(key: str | None, value: object, known: support.Mechanism) -> PlanRow:
    word = "Supported" if known.built else "not built yet"
    reason = known.what if known.built else f"this version has no mechanism for it yet ({known.what})"
    return PlanRow(feature=known.feature, word=word, reason=reason, by="halo_core", instead=known.instead,
                   key=key, value=str(value))


def _not_built(row: PlanRow) -> Problem:
    return Problem(
        key=row.key or row.feature, value=row.value, kind="not built", why=row.reason, by=row.by,
        remedy=row.instead or "leave it out, or use --dry-run to see the whole plan",
    )


def _rows(
    config: RunConfig, family: Family, architecture: Architecture, nproc: int, problems: list[Problem], notes: list[str]
) -> tuple[list[PlanRow], str]:
    """Return the run's features with their verdicts, and the attention implementation; refusals go to `problems`."""
    asked: list[tuple[str | None, object, str]] = [(None, "", "sft")]
    asked += active_features(config)
    attention = config.attn_implementation
    if attention is None:
        attention = "sdpa" if architecture.cell("attention:sdpa").word == "Supported" else "eager"
        asked.append((None, attention, f"attention:{attention}"))
    if nproc > 1:
        asked.append(("--nproc", nproc, "fsdp"))
    rows: list[PlanRow] = []
    for key, value, feature in asked:
        if any(row.feature == feature for row in rows):
            continue
        if feature not in support.FEATURES:
            known = _mechanism(feature)
            assert known is not None, f"feature {feature!r} has no mechanism entry"
            rows.append(_core_row(key, value, known))
            continue
        if feature == "grouped_gemm" and not architecture.spec.is_moe:
            continue  # the key's default is true and concerns experts only
        cell = family.verdict(feature, architecture=architecture.name)
        rows += _row_of(cell, key, value, config, problems, notes)
    return rows, str(attention)


def _row_of(
    cell: Cell, key: str | None, value: object, config: RunConfig, problems: list[Problem], notes: list[str]
) -> list[PlanRow]:
    part = cell.decisive
    if part.word == "Unsupported":
        problems.append(_refusal(cell, part, key, value))
        return []
    if part.word == "Experimental":
        if cell.feature not in config.allow_experimental:
            problems.append(_refusal(cell, part, key, value))
            return []
        notes.append(f"{cell.feature} is experimental: {part.reason} (says {part.author})")
    if part.word == "declared":
        notes.append(f"{cell.feature} is declared but {part.reason}")
    return [PlanRow(feature=cell.feature, word=part.word, reason=part.reason, by=part.author, instead=part.instead,
                    key=key, value=str(value))]


def _quantised_source(model: Mapping[str, Any]) -> list[PlanRow]:
    stored = model.get("quantization_config")
    if not stored:
        return []
    method = stored.get("quant_method", "a quantised format") if isinstance(stored, Mapping) else "a quantised format"
    return [
        PlanRow(feature="quantised_source", word="not built yet", by="halo_core", key="model_name_or_path",
                value=f"stored as {method}", reason="this version cannot read quantised weights yet",
                instead="start from a bf16 copy of this model")
    ]


def _refusal(cell: Cell, part: Part, key: str | None, value: object) -> Problem:
    because = f" ({', '.join(part.because)})" if part.because else ""
    kind = "is experimental" if part.word == "Experimental" else "cannot work"
    return Problem(
        key=key or cell.feature, value=value, why=f"{cell.feature} {kind} on {cell.architecture}: {part.reason}{because}",
        remedy=part.instead, by=part.author,
    )


def _degrees(
    config: RunConfig, architecture: Architecture, model: Mapping[str, Any], nproc: int, problems: list[Problem]
) -> Degrees:
    """Return the mesh; a combination or a size that does not fit is a problem with the values that do."""
    ep, etp = config.expert_parallel_size, config.expert_tensor_parallel_size
    cp, replicate = config.context_parallel_size, config.data_parallel_replicate_size
    before = len(problems)
    axes = frozenset(name for name, degree in (("ep", ep), ("etp", etp), ("cp", cp)) if degree > 1)
    if axes not in support.PARALLEL_SETS:
        allowed = "; ".join(" + ".join(sorted(s)) for s in sorted(support.PARALLEL_SETS, key=sorted) if s)
        problems.append(Problem(key=" + ".join(sorted(axes)), why="these parallel axes are not combined",
                                remedy=f"one of these sets: {allowed}"))
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
            legal = [d for d in _divisors(whole) if d <= max(nproc, degree)]
            problems.append(Problem(key=key, value=degree, why=f"it does not divide the {what}, {whole}",
                                    remedy=f"one of {', '.join(map(str, legal))}"))
    product = ep * etp * cp * replicate
    if len(problems) == before and nproc % product:
        parts = " x ".join(
            f"{key}: {degree}" for key, degree in (
                ("expert_parallel_size", ep), ("expert_tensor_parallel_size", etp),
                ("context_parallel_size", cp), ("data_parallel_replicate_size", replicate),
            ) if degree > 1
        )
        problems.append(Problem(key="--nproc", value=nproc, why=f"{parts} need a multiple of {product} processes",
                                remedy=f"--nproc {product}, or smaller sizes"))
    shard = max(1, nproc // product)
    return Degrees(replicate=replicate, shard=shard, cp=cp, ep=ep, etp=etp)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _rows_per_step(config: RunConfig, degrees: Degrees) -> int:
    return config.per_device_train_batch_size * config.gradient_accumulation_steps * degrees.data_ranks


def _experts_kernel(config: RunConfig, architecture: Architecture) -> str:
    if not architecture.spec.is_moe:
        return "none"
    chosen = (config.kernels or {}).get("experts")
    return str(chosen) if chosen else ("grouped" if config.use_grouped_gemm else "reference")


def _run_problems(config: RunConfig) -> list[Problem]:
    """Return contradictions between keys that need no model."""
    problems = []
    if not config.dataset_name and not config.datasets:
        problems.append(Problem(key="dataset_name", value=None, why="a run needs rows to learn from",
                                remedy="a .jsonl, .json, .parquet or .csv file, a folder, or a hub id"))
    if config.dataset_name and config.datasets:
        problems.append(Problem(key="datasets", value=config.datasets, why="dataset_name is given as well",
                                remedy="keep one of the two"))
    has_evaluation = bool(config.eval_dataset or config.dataset_test_split_given)
    if config.eval_strategy != "no" and not has_evaluation:
        problems.append(Problem(key="eval_strategy", value=config.eval_strategy, why="there are no rows to evaluate on",
                                remedy="give eval_dataset or dataset_test_split, or set eval_strategy: no"))
    if config.load_best_model_at_end and (
        config.eval_strategy == "no" or config.save_strategy not in (config.eval_strategy, "best")
    ):
        problems.append(
            Problem(key="load_best_model_at_end", value=True,
                    why=f"the best checkpoint is known only where saving and evaluating fall together "
                        f"(save_strategy: {config.save_strategy}, eval_strategy: {config.eval_strategy})",
                    remedy="set save_strategy and eval_strategy to the same word, steps or epoch"))
    for kernel, choice in (config.kernels or {}).items():
        if kernel not in support.KERNELS:
            problems.append(Problem(key="kernels", value=kernel, remedy=f"one of {', '.join(support.KERNELS)}",
                                    why=f"there is no kernel of this name{near_text(str(kernel), list(support.KERNELS))}"))
        elif choice not in support.KERNELS[kernel]:
            problems.append(Problem(key="kernels", value=f"{kernel}: {choice}", why=f"{kernel} has no such variant",
                                    remedy=f"one of {', '.join(support.KERNELS[kernel])}"))
    for feature in config.allow_experimental:
        if not support.expand(feature):
            problems.append(Problem(key="allow_experimental", value=feature,
                                    why=f"there is no feature of this name{near_text(feature, support.FEATURES)}",
                                    remedy=f"one of {', '.join(support.FEATURES)}"))
    return problems


def _length_problems(config: RunConfig, architecture: Architecture, model: Mapping[str, Any]) -> list[Problem]:
    limit = text_config(architecture.spec, model).get("max_position_embeddings")
    if isinstance(limit, int) and config.max_length and config.max_length > limit:
        return [Problem(key="max_length", value=config.max_length, why=f"the model knows positions up to {limit} only",
                        remedy=f"max_length: {limit}, or less")]
    return []


def _hook_problems(registry: Registry, plan: RunPlan, model: Mapping[str, Any]) -> list[Problem]:
    problems: list[Problem] = []
    try:
        for name, answer in registry.plugins.call("halo_check_run", family=plan.family, plan=plan, config=model):
            problems += [replace(problem, by=name) for problem in answer or ()]
    except PluginFault as fault:
        problems.append(Problem(why=str(fault), remedy="repair the plugin, or leave it out with HALO_DISABLE_PLUGINS"))
    return problems


