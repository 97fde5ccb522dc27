"""The frozen, checked answer to "what will this run do", or one refusal with every problem.

Not for the device and its kernels: `runtime.resolve` decides those once torch may be imported. No torch here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from halo_core import support
from halo_core.arithmetic import (
    Degrees,
    choice_problems,
    dispatcher_problems,
    length_problems,
    run_problems,
    version_problems,
)
from halo_core.arithmetic import degrees as mesh_degrees
from halo_core.config import RUN_MECHANISMS, ConfigRead, RunConfig, active_features, precision
from halo_core.errors import Problem, Refused, shown
from halo_core.model_config import asked_family, choose, left_packed, stored_as
from halo_core.plugins import PluginFault
from halo_core.registry import Architecture, Family, Registry, source_dtype
from halo_core.support import Cell, Part

DEQUANTISE = "dequantize_source"


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
    balancing: str
    head_kernel: str
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
    read: ConfigRead,
    registry: Registry,
    *,
    nproc: int = 1,
    family: str | None = None,
    dry_run: bool = False,
    also: Sequence[Problem] = (),
) -> Checked:
    """Return the checked plan of a run.

    read: the configuration as parsed, with the problems found so far. nproc: number of processes.
    family: what was typed after `--family`. dry_run: mechanisms that are not built become rows, not a refusal.
    also: problems that others found in the same configuration, to be told in the same report.

    Raises:
        Refused: once, with every problem of parsing, keys, types, plugins, model, features and arithmetic.
    """
    read = replace(read, config=precision.decided(read.config))
    config = read.config
    problems = [*_plugin_problems(registry), *also]
    if nproc < 1:
        problems.append(Problem(key="--nproc", value=nproc, why="a run has at least one process", remedy="--nproc 1"))
    asked = asked_family(family, config, registry, problems)
    found = choose(config, asked, registry, dry_run, problems)
    problems += run_problems(config)
    if found is None:
        problems += [] if dry_run else _features_without_model(config)
        raise Refused(_placed(problems, read))
    owner, architecture, model = found
    problems += version_problems(config, owner)
    notes = list(read.notes)
    stored = source_dtype(architecture.spec, model.config)
    problems += precision.conflicts_with_source(config, stored)
    weights = stored if config.dtype == "auto" else config.dtype
    notes += precision.remarks_on_weights(config, read.given, weights)
    balancing = _balancing(config, architecture, notes)
    rows, attention = _rows(read, owner, architecture, nproc, balancing, problems, notes)
    rows = _with_source(rows, read, model.config, problems, notes)
    degrees = mesh_degrees(config, architecture, model.config, nproc, problems)
    plan = RunPlan(
        family=owner.name,
        architecture=architecture.name,
        model_type=str(model.config.get("model_type")),
        model_name_or_path=str(config.model_name_or_path),
        model_origin=model.origin,
        rows=tuple(rows),
        degrees=degrees,
        attention=attention,
        experts_kernel=_experts_kernel(config, architecture),
        balancing=balancing,
        head_kernel=str((config.kernels or {}).get("head", support.KERNELS["head"][0])),
        plugins=registry.plugins.versions,
        rows_per_step=_rows_per_step(config, degrees),
        tokens_per_step=config.max_length * _rows_per_step(config, degrees) if config.max_length else None,
    )
    problems += dispatcher_problems(config, degrees.ep)
    problems += length_problems(config, architecture, model.config)
    problems += choice_problems(architecture, model.config)
    problems += _hook_problems(registry, plan, model.config)
    if not dry_run:
        problems += [_not_built(row) for row in plan.not_built]
    placed = _placed(problems, read)
    if placed:
        raise Refused(placed)
    return Checked(
        plan=replace(plan, notes=tuple(notes)),
        config=config,
        registry=registry,
        family=owner,
        architecture=architecture,
        model_config=model.config,
        guessed=model.guessed,
    )


def _placed(problems: Sequence[Problem], read: ConfigRead) -> list[Problem]:
    """Return the problems with the place of their key; a key that could not be read is told as that alone."""
    unread = {problem.key for problem in read.problems if problem.key is not None}
    placed = list(read.problems)
    for problem in problems:
        where, line = read.places.get(problem.key or "", (None, None))
        if problem.where is None and problem.key not in unread:
            placed.append(replace(problem, where=where, line=line))
        elif problem.where is not None:
            placed.append(problem)
    return placed


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
            Problem(
                where=f"plugin {row.name} ({row.distribution} {row.version})", why=fault, remedy=remedy, by=row.name
            )
            for fault in row.faults
        ]
    return problems


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
    return PlanRow(
        feature=known.feature,
        word=word,
        reason=reason,
        by="halo_core",
        instead=known.instead,
        key=key,
        value=shown(value),
    )


def _not_built(row: PlanRow) -> Problem:
    return Problem(
        key=row.key or row.feature,
        value=row.value,
        kind="not built",
        why=row.reason,
        by=row.by,
        remedy=row.instead or "leave it out, or use --dry-run to see the whole plan",
    )


def _rows(
    read: ConfigRead,
    family: Family,
    architecture: Architecture,
    nproc: int,
    balancing: str,
    problems: list[Problem],
    notes: list[str],
) -> tuple[list[PlanRow], str]:
    """Return the run's features with their verdicts, and the attention implementation; refusals go to `problems`."""
    config = read.config
    asked: list[tuple[str | None, object, str]] = [(None, "", "sft")]
    asked += active_features(config)
    attention = config.attn_implementation
    if attention is None:
        attention = "sdpa" if architecture.cell("attention:sdpa").word == "Supported" else "eager"
        asked.append((None, attention, f"attention:{attention}"))
    if config.moe_balancing == "auto":
        asked.append(("moe_balancing", "auto", f"balancing:{balancing}"))
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
        if feature == "grouped_gemm" and not architecture.spec.is_moe and key not in read.given:
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
    return [
        PlanRow(
            feature=cell.feature,
            word=part.word,
            reason=part.reason,
            by=part.author,
            instead=part.instead,
            key=key,
            value=shown(value),
        )
    ]


def _with_source(
    rows: list[PlanRow], read: ConfigRead, model: Mapping[str, Any], problems: list[Problem], notes: list[str]
) -> list[PlanRow]:
    """Return the rows with one about how the source's weights are stored, where they are no plain numbers."""
    method = stored_as(model)
    if method is None:
        # The key's default is true and concerns such sources only.
        return [row for row in rows if row.key != DEQUANTISE or DEQUANTISE in read.given]
    known = support.PACKED_FORMATS.get(method)
    if known is not None and not read.config.dequantize_source:
        problems.append(left_packed(DEQUANTISE, method))
        return rows
    if known is not None:
        notes.append(
            f"the model's weights are stored as {method}: they are read and exported as bf16, which takes "
            f"{known.growth:.1f} times the bytes"
        )
    row = PlanRow(
        feature="quantised_source",
        word="not built yet" if known is None else "Supported",
        by="halo_core",
        key="model_name_or_path",
        value=f"stored as {method}",
        reason=f"this version does not read {method}" if known is None else f"{method} is read as bf16",
        instead="start from a bf16 copy of this model" if known is None else "",
    )
    return [*rows, row]


def _refusal(cell: Cell, part: Part, key: str | None, value: object) -> Problem:
    because = f" ({', '.join(part.because)})" if part.because else ""
    kind = "is experimental" if part.word == "Experimental" else "cannot work"
    return Problem(
        key=key or cell.feature,
        value=value,
        why=f"{cell.feature} {kind} on {cell.architecture}: {part.reason}{because}",
        remedy=part.instead,
        by=part.author,
    )


def _rows_per_step(config: RunConfig, degrees: Degrees) -> int:
    return config.per_device_train_batch_size * config.gradient_accumulation_steps * degrees.data_ranks


def _balancing(config: RunConfig, architecture: Architecture, notes: list[str]) -> str:
    """Return the balancing mode; `auto` is the one without a loss where the architecture has it, else none."""
    if config.moe_balancing != "auto":
        return config.moe_balancing
    can = architecture.cell("balancing:bias_update").word == "Supported"
    chosen = "bias_update" if can else "none"
    notes.append(f"moe_balancing: auto is {chosen} on {architecture.name}")
    return chosen


def _experts_kernel(config: RunConfig, architecture: Architecture) -> str:
    if not architecture.spec.is_moe:
        return "none"
    chosen = (config.kernels or {}).get("experts")
    return str(chosen) if chosen else ("grouped" if config.use_grouped_gemm else "reference")


def _hook_problems(registry: Registry, plan: RunPlan, model: Mapping[str, Any]) -> list[Problem]:
    problems: list[Problem] = []
    try:
        for name, answer in registry.plugins.call("halo_check_run", family=plan.family, plan=plan, config=model):
            problems += [replace(problem, by=name) for problem in answer or ()]
    except PluginFault as fault:
        problems.append(Problem(why=str(fault), remedy="repair the plugin, or leave it out with HALO_DISABLE_PLUGINS"))
    return problems
