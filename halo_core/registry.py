"""The joined facts of all plugins, frozen: families, their architectures, and who said what.

Not for loading plugins (`plugins.py`) nor for checking a run (`plan.py`).
"""

from __future__ import annotations

import importlib.resources
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from halo_core import hookspecs, support
from halo_core.family import (
    CONTRACT_LEVEL,
    Answer,
    ArchitectureSpec,
    BackendSpec,
    FamilySpec,
    MoEBlockSpec,
    PublishedModel,
    SequenceMixerSpec,
)
from halo_core.plugins import PluginRow, Plugins, near_text, with_faults
from halo_core.support import Cell, Evidence

DTYPE_KEYS = ("dtype", "torch_dtype")
"""Where config.json says in what numbers a model computes; the second is the older name."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture with everything any plugin declared about it.

    answers: feature -> (Answer, plugin that gave it). evidence: the GPU runs recorded for it.
    """

    spec: ArchitectureSpec
    family: str
    plugin: str
    contract: int
    moe_block: MoEBlockSpec | None
    mixers: tuple[SequenceMixerSpec, ...]
    answers: Mapping[str, tuple[Answer, str]]
    evidence: tuple[Evidence, ...] = ()

    @property
    def name(self) -> str:
        """Return the architecture's name."""
        return self.spec.name

    def cell(self, feature: str) -> Cell:
        """Return what is known about one feature here, with every part and its author."""
        answer = self.answers.get(feature)
        return support.cell(
            family=self.family,
            architecture=self.name,
            feature=feature,
            answer=answer[0].verdict if answer else None,
            answered_by=answer[1] if answer else self.plugin,
            contract=self.contract,
            evidence=self.evidence,
        )


@dataclass(frozen=True, kw_only=True)
class Family:
    """One line of models and its architectures, MoE first."""

    spec: FamilySpec
    plugin: str
    architectures: tuple[Architecture, ...]

    @property
    def name(self) -> str:
        """Return the family's name, as typed after `--family`."""
        return self.spec.name

    def architecture(self, name: str | None = None) -> Architecture:
        """Return the named architecture, or the first (the MoE one where the line has both)."""
        if name is None:
            return self.architectures[0]
        return next(architecture for architecture in self.architectures if architecture.name == name)

    def tiny(self, *, dense: bool) -> Architecture | None:
        """Return the architecture of the family's tiny model; a line that is dense only has just that one."""
        of_kind = [a for a in self.architectures if a.spec.is_moe != dense]
        if not of_kind and not dense:
            of_kind = list(self.architectures)
        return of_kind[0] if of_kind else None

    def verdict(self, *features: str, architecture: str | None = None) -> Cell:
        """Return the verdict on these features together, for one architecture: the weakest of their cells.

        This is the one answer that `halo train` obeys, `halo matrix` prints and the tests enumerate. A feature of
        several (`cp` for all `cp:*`) is the strongest of its members: one that works is enough.
        """
        chosen = self.architecture(architecture)
        return support.weakest([support.best([chosen.cell(name) for name in support.expand(f)], f) for f in features])


@dataclass(frozen=True, kw_only=True)
class Registry:
    """Everything installed, joined and frozen. `plugins` carries the faults found while joining."""

    families: Mapping[str, Family]
    plugins: Plugins
    backends: Mapping[tuple[str, str], tuple[BackendSpec, str]]

    def family(self, name: str) -> Family | None:
        """Return a family by name or alias; `-` and `.` read as `_`, case is ignored."""
        wanted = plain(name)
        for family in self.families.values():
            if wanted in (family.name, *map(plain, family.spec.aliases)):
                return family
        return None

    def near_family(self, name: str) -> str:
        """Return `; did you mean 'x'?` or nothing."""
        names = [*self.families, *(alias for family in self.families.values() for alias in family.spec.aliases)]
        return near_text(plain(name), [plain(n) for n in names])

    def architectures(self) -> tuple[Architecture, ...]:
        """Return all architectures: every family's MoE ones first, then the dense ones."""
        everyone = [a for family in self.families.values() for a in family.architectures]
        return tuple(sorted(everyone, key=lambda a: not a.spec.is_moe))

    def match(self, config: Mapping[str, Any]) -> Architecture | None:
        """Return the architecture that a config.json describes, or None when no plugin knows it."""
        return next((a for a in self.architectures() if matches(a.spec, config)), None)

    def words(self) -> dict[str, tuple[str, ...]]:
        """Return configuration key -> the words that plugins' backends add to its own."""
        return {"report_to": tuple(name for kind, name in self.backends if kind == "tracker")}

    def published(self, hub_id: str) -> PublishedModel | None:
        """Return the bundled facts of a published checkpoint, or None."""
        models = (model for family in self.families.values() for model in family.spec.published)
        return next((model for model in models if model.hub_id.lower() == hub_id.lower()), None)


def plain(name: str) -> str:
    """Return a name as families are compared: lower case, `-` and `.` as `_`."""
    return name.strip().lower().replace("-", "_").replace(".", "_")


def text_config(spec: ArchitectureSpec, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json that describes the language model."""
    inner = config.get(spec.text_config) if spec.text_config else None
    return inner if isinstance(inner, Mapping) else config


def source_dtype(spec: ArchitectureSpec, config: Mapping[str, Any]) -> str:
    """Return the dtype that config.json names for the weights, as it spells it; float32 where it names none."""
    places = (config, text_config(spec, config))
    found = [place[key] for place in places for key in DTYPE_KEYS if place.get(key)]
    return str(found[0]) if found else "float32"


def size(names: tuple[str, ...], config: Mapping[str, Any]) -> int | None:
    """Return the first of these config.json entries that is an integer, or None."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def matches(spec: ArchitectureSpec, config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes this architecture."""
    if config.get("model_type") not in spec.model_types:
        return False
    if spec.when is None:
        return True
    key, value = spec.when
    # An absent switch means the configuration class's own default, which every family so far has as "off".
    return bool(text_config(spec, config).get(key, False) == value)


def load(files: tuple[Any, ...] = ()) -> Registry:
    """Return the registry of everything installed, and of the plugin files given."""
    from halo_core import plugins

    return join(plugins.load(files))


def join(plugins: Plugins) -> Registry:
    """Join what the loaded plugins declare. Contradictions become faults of the plugins that cause them."""
    faults: dict[str, list[str]] = defaultdict(list)
    owners = _owners(plugins, faults)
    specs = {spec.name: (spec, row) for row, family in owners for spec in family.architectures}
    answers = _answers(plugins, specs, faults)
    blocks = _blocks(plugins, specs, faults)
    mixers: dict[str, list[SequenceMixerSpec]] = defaultdict(list)
    for row in plugins.loaded:
        for mixer in row.declared.get("halo_sequence_mixers", ()):
            if _known(mixer.architecture, specs, row, "halo_sequence_mixers", faults):
                mixers[mixer.architecture].append(mixer)
    families = {}
    for row, family in owners:
        evidence = _evidence(row, faults)
        architectures = tuple(
            Architecture(
                spec=spec,
                family=family.name,
                plugin=row.name,
                contract=family.contract,
                moe_block=blocks.get(spec.name),
                mixers=tuple(mixers[spec.name]),
                answers=MappingProxyType(answers[spec.name]),
                evidence=tuple(e for e in evidence if e.architecture == spec.name),
            )
            for spec in sorted(family.architectures, key=lambda spec: not spec.is_moe)
        )
        families[family.name] = Family(spec=family, plugin=row.name, architectures=architectures)
        _completeness(families[family.name], faults)
    backends = _backends(plugins, faults)
    found = {name: tuple(texts) for name, texts in faults.items()}
    return Registry(
        families=MappingProxyType(families), plugins=with_faults(plugins, found), backends=MappingProxyType(backends)
    )


def _owners(plugins: Plugins, faults: dict[str, list[str]]) -> list[tuple[PluginRow, FamilySpec]]:
    """Return (plugin, family) pairs; a name, alias, architecture or model type claimed twice is a fault of both."""
    owners: list[tuple[PluginRow, FamilySpec]] = []
    claims: dict[tuple[str, object], PluginRow] = {}
    for row in plugins.loaded:
        for family in row.declared.get("halo_families", ()):
            if family.contract > CONTRACT_LEVEL:
                faults[row.name].append(
                    f"family {family.name!r} is written for contract {family.contract}, this core speaks "
                    f"{CONTRACT_LEVEL}: upgrade halo-moe"
                )
                continue
            wanted: list[tuple[str, object]] = [("family", plain(n)) for n in {family.name, *family.aliases}]
            wanted += [("architecture", spec.name) for spec in family.architectures]
            wanted += [("model_type", (t, spec.when)) for spec in family.architectures for t in spec.model_types]
            taken = [claim for claim in wanted if claim in claims]
            for kind, name in taken:
                other = claims[(kind, name)]
                shown = name[0] if isinstance(name, tuple) else name
                text = f"{kind} {shown!r} is declared by two plugins: {other.name} ({other.distribution}) and "
                text += f"{row.name} ({row.distribution})"
                for name_of_plugin in {row.name, other.name}:
                    faults[name_of_plugin].append(text)
            if not taken:
                claims.update(dict.fromkeys(wanted, row))
                owners.append((row, family))
    return owners


def _known(
    architecture: str, specs: Mapping[str, Any], row: PluginRow, hook: str, faults: dict[str, list[str]]
) -> bool:
    if architecture in specs:
        return True
    near = near_text(architecture, list(specs))
    faults[row.name].append(f"{hook} speaks of architecture {architecture!r}, which no plugin declares{near}")
    return False


def _answers(
    plugins: Plugins, specs: Mapping[str, Any], faults: dict[str, list[str]]
) -> dict[str, dict[str, tuple[Answer, str]]]:
    answers: dict[str, dict[str, tuple[Answer, str]]] = defaultdict(dict)
    for row in plugins.loaded:
        for hook in hookspecs.ANSWER_HOOKS:
            for answer in row.declared.get(hook, ()):
                if not _known(answer.architecture, specs, row, hook, faults):
                    continue
                if answer.feature not in support.FEATURES:
                    near = near_text(answer.feature, support.FEATURES)
                    faults[row.name].append(f"{hook} answers {answer.feature!r}, which is not a feature{near}")
                    continue
                cell = answers[answer.architecture]
                if answer.feature in cell:
                    other = cell[answer.feature][1]
                    text = f"{answer.architecture} {answer.feature} is answered twice: by {other} and by {row.name}"
                    for name in {row.name, other}:
                        faults[name].append(text)
                    continue
                cell[answer.feature] = (answer, row.name)
    return answers


def _blocks(plugins: Plugins, specs: Mapping[str, Any], faults: dict[str, list[str]]) -> dict[str, MoEBlockSpec]:
    blocks: dict[str, tuple[MoEBlockSpec, str]] = {}
    for row in plugins.loaded:
        for block in row.declared.get("halo_moe_blocks", ()):
            if not _known(block.architecture, specs, row, "halo_moe_blocks", faults):
                continue
            if block.architecture in blocks:
                other = blocks[block.architecture][1]
                for name in {row.name, other}:
                    faults[name].append(f"{block.architecture} has two MoE blocks: from {other} and from {row.name}")
                continue
            blocks[block.architecture] = (block, row.name)
    for name, (spec, row) in specs.items():
        if spec.is_moe and name not in blocks:
            faults[row.name].append(
                f"architecture {name!r} is MoE but halo_moe_blocks does not say where its experts are"
            )
        if not spec.is_moe and name in blocks:
            faults[blocks[name][1]].append(f"architecture {name!r} is dense but has a MoE block")
    return {name: block for name, (block, _) in blocks.items()}


def _completeness(family: Family, faults: dict[str, list[str]]) -> None:
    for architecture in family.architectures:
        due = [m.feature for m in support.MECHANISMS if m.since <= family.spec.contract]
        missing = [feature for feature in due if feature not in architecture.answers]
        if missing:
            faults[family.plugin].append(f"architecture {architecture.name!r} does not answer: {', '.join(missing)}")


def _backends(plugins: Plugins, faults: dict[str, list[str]]) -> dict[tuple[str, str], tuple[BackendSpec, str]]:
    backends: dict[tuple[str, str], tuple[BackendSpec, str]] = {}
    for row in plugins.loaded:
        for backend in row.declared.get("halo_backends", ()):
            key = (backend.kind, backend.name)
            if key in backends:
                other = backends[key][1]
                for name in {row.name, other}:
                    faults[name].append(
                        f"{backend.kind} {backend.name!r} is offered twice: by {other} and by {row.name}"
                    )
                continue
            backends[key] = (backend, row.name)
    return backends


def _evidence(row: PluginRow, faults: dict[str, list[str]]) -> tuple[Evidence, ...]:
    """Return the rows of `evidence.json` beside the plugin's module; a plugin without the file has none."""
    package = getattr(row.module, "__package__", None)
    if not package:
        return ()
    file = importlib.resources.files(package) / "evidence.json"
    if not file.is_file():
        return ()
    try:
        entries: Iterable[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        return tuple(Evidence(**entry) for entry in entries)
    except (ValueError, TypeError) as fault:
        faults[row.name].append(f"its evidence.json cannot be read: {fault}")
        return ()
