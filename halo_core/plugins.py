"""Who is installed: every plugin found, loaded and validated alone, with all its faults.

Not for joining what plugins say: that is `registry.py`. A broken plugin becomes a row with its faults; nothing
here raises because of a plugin, so `--help`, `halo plugins` and `halo matrix` survive any of them.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pluggy

from halo_core import hookspecs
from halo_core.family import Answer, BackendSpec, FamilySpec, MoEBlockSpec, SequenceMixerSpec

GROUP = "halo"
ALLOW_VARIABLE = "HALO_PLUGINS"
DISABLE_VARIABLE = "HALO_DISABLE_PLUGINS"
HEAVY_MODULES = ("torch", "transformers")

YIELDS: Mapping[str, type] = MappingProxyType(
    {
        "halo_families": FamilySpec,
        "halo_moe_blocks": MoEBlockSpec,
        "halo_sequence_mixers": SequenceMixerSpec,
        "halo_balancing_modes": Answer,
        "halo_attention_backends": Answer,
        "halo_context_parallel": Answer,
        "halo_features": Answer,
        "halo_backends": BackendSpec,
    }
)


@dataclass(frozen=True, kw_only=True)
class PluginRow:
    """One plugin as found: name, where it comes from, what it declares, and every fault it has.

    `declared` maps a declaration hook to the tuple it yielded; it is empty when the plugin has a fault.
    """

    name: str
    distribution: str
    version: str
    target: str
    enabled: bool = True
    hooks: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    declared: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    module: Any = None

    @property
    def state(self) -> str:
        """Return "disabled", "broken" or "loaded"."""
        if not self.enabled:
            return "disabled"
        return "broken" if self.faults else "loaded"

    @property
    def families(self) -> tuple[str, ...]:
        """Return the names of the families this plugin owns."""
        return tuple(spec.name for spec in self.declared.get("halo_families", ()))


@dataclass(frozen=True, kw_only=True)
class Plugins:
    """All plugins found, in loading order, and the pluggy manager that holds the sound ones."""

    rows: tuple[PluginRow, ...]
    manager: pluggy.PluginManager

    @property
    def loaded(self) -> tuple[PluginRow, ...]:
        """Return the rows that take part."""
        return tuple(row for row in self.rows if row.state == "loaded")

    @property
    def broken(self) -> tuple[PluginRow, ...]:
        """Return the rows that keep `halo train` from running."""
        return tuple(row for row in self.rows if row.state == "broken")

    @property
    def versions(self) -> tuple[tuple[str, str], ...]:
        """Return (plugin, version) of every loaded plugin: what ranks compare and checkpoints record."""
        return tuple((row.name, row.version) for row in self.loaded)

    def call(self, hook: str, *, family: str | None = None, **arguments: Any) -> list[tuple[str, Any]]:
        """Call a behaviour hook plugin by plugin and return [(plugin name, answer)].

        With `family`, a plugin that owns families hears the call only for its own.

        Raises:
            PluginFault: a plugin raised; it is named, its exception is the cause.
        """
        answers = []
        for row in self.loaded:
            if hook not in row.hooks or (family is not None and row.families and family not in row.families):
                continue
            others = [other.module for other in self.loaded if other is not row]
            try:
                for answer in self.manager.subset_hook_caller(hook, remove_plugins=others)(**arguments):
                    answers.append((row.name, list(answer) if inspect.isgenerator(answer) else answer))
            except Exception as fault:
                raise PluginFault(f"plugin {row.name!r} failed in {hook}: {fault_text(fault)}") from fault
        return answers


class PluginFault(RuntimeError):
    """A plugin raised inside a behaviour hook."""


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    name: str
    distribution: str
    version: str
    target: str
    entry_point: importlib.metadata.EntryPoint | None = None
    file: Path | None = None

    def load(self) -> Any:
        if self.entry_point is not None:
            return self.entry_point.load()
        assert self.file is not None
        spec = importlib.util.spec_from_file_location(f"halo_plugin_{self.file.stem}", self.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{self.file} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module


def load(files: tuple[Path, ...] = ()) -> Plugins:
    """Find, import and validate every plugin of entry-point group "halo" and every file given.

    HALO_PLUGINS=a,b loads only these entry points; HALO_DISABLE_PLUGINS=a leaves those out. Both are read here.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    allowed, disabled = _names(ALLOW_VARIABLE), _names(DISABLE_VARIABLE)
    rows: list[PluginRow] = []
    for candidate in _candidates(files):
        is_listed = allowed is None or candidate.name in allowed or candidate.file is not None
        if not is_listed or candidate.name in (disabled or ()):
            rows.append(_row(candidate, enabled=False))
            continue
        row = _load_one(candidate, manager)
        if not row.faults and any(row.name == other.name and other.enabled for other in rows):
            others = ", ".join(other.distribution for other in rows if other.name == row.name)
            row = replace(row, faults=(f"the plugin name {row.name!r} is also used by {others}",), declared={})
        if not row.faults:
            manager.register(row.module, name=row.name)
        rows.append(row)
    for variable, names in ((ALLOW_VARIABLE, allowed), (DISABLE_VARIABLE, disabled)):
        for name in sorted((names or set()) - {row.name for row in rows}):
            near = near_text(name, [row.name for row in rows])
            fault = f"{variable} names {name!r}, which is not installed{near}"
            rows.append(PluginRow(name=name, distribution="-", version="-", target=f"${variable}", faults=(fault,)))
    return Plugins(rows=tuple(rows), manager=manager)


def with_faults(plugins: Plugins, faults: Mapping[str, tuple[str, ...]]) -> Plugins:
    """Return the same plugins with further faults (plugin name -> texts) found when joining them."""
    rows = tuple(replace(row, faults=row.faults + faults.get(row.name, ())) for row in plugins.rows)
    return Plugins(rows=rows, manager=plugins.manager)


def near_text(name: str, known: list[str] | tuple[str, ...]) -> str:
    """Return `; did you mean 'x'?` for the closest known name, or nothing."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def fault_text(fault: BaseException) -> str:
    """Return an exception as one line: its class and message."""
    return f"{type(fault).__name__}: {fault}".replace("\n", " ")


def _names(variable: str) -> set[str] | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    return {name.strip().replace("-", "_") for name in text.split(",") if name.strip()}


def _candidates(files: tuple[Path, ...]) -> Iterator[_Candidate]:
    points = importlib.metadata.entry_points(group=GROUP)
    # An editable install beside a stale one lists the same entry point twice; one target is one plugin.
    seen: set[tuple[str, str, str]] = set()
    for point in sorted(points, key=lambda point: (_distribution(point)[0] != "halo-moe", point.name, point.value)):
        distribution, version = _distribution(point)
        if (point.name, point.value, distribution) in seen:
            continue
        seen.add((point.name, point.value, distribution))
        yield _Candidate(
            name=point.name.replace("-", "_"),
            distribution=distribution,
            version=version,
            target=point.value,
            entry_point=point,
        )
    for file in files:
        yield _Candidate(
            name=file.stem.replace("-", "_"), distribution="file", version="-", target=str(file), file=file
        )


def _distribution(point: importlib.metadata.EntryPoint) -> tuple[str, str]:
    return (point.dist.name, point.dist.version) if point.dist is not None else ("-", "-")


def _row(candidate: _Candidate, **rest: Any) -> PluginRow:
    return PluginRow(
        name=candidate.name,
        distribution=candidate.distribution,
        version=candidate.version,
        target=candidate.target,
        **rest,
    )


def _load_one(candidate: _Candidate, manager: pluggy.PluginManager) -> PluginRow:
    faults: list[str] = []
    module: Any = None
    with _watch_heavy_imports(faults, "importing it"):
        try:
            module = candidate.load()
        except Exception as fault:
            faults.append(f"cannot be imported: {fault_text(fault)}{_missing_hint(fault)}")
        except SystemExit as fault:
            faults.append(f"cannot be imported: it called sys.exit({fault.code!r})")
    if module is None:
        return _row(candidate, faults=tuple(faults) or ("cannot be imported: it is None",))
    hooks, hook_faults = _hooks(module, manager)
    faults += hook_faults
    declared: dict[str, tuple[Any, ...]] = {}
    if not faults:
        for hook in hookspecs.DECLARATIONS:
            if hook in hooks:
                with _watch_heavy_imports(faults, hook):
                    declared[hook] = _declarations(hooks[hook], hook, faults)
    return _row(candidate, hooks=tuple(hooks), faults=tuple(faults), declared={} if faults else declared, module=module)


def _missing_hint(fault: BaseException) -> str:
    if isinstance(fault, ModuleNotFoundError) and fault.name:
        return f" (install the package that provides {fault.name.split('.')[0]!r})"
    return ""


def _hooks(module: Any, manager: pluggy.PluginManager) -> tuple[dict[str, Any], list[str]]:
    """Return {hook name: function} of a plugin and every fault in how it implements hooks."""
    specs = {name for name in vars(hookspecs) if name.startswith("halo_")}
    hooks: dict[str, Any] = {}
    faults: list[str] = []
    for name in sorted(dir(module)):
        function = getattr(module, name, None)
        if not inspect.isroutine(function):
            continue
        options = manager.parse_hookimpl_opts(module, name)
        if options is None:
            if name.startswith("halo_") and getattr(function, "__module__", None) == getattr(module, "__name__", ""):
                known = "" if name in specs else near_text(name, sorted(specs))
                faults.append(f"{name} is not marked with @hookimpl{known}")
            continue
        hook = options.get("specname") or name
        if hook not in specs:
            faults.append(f"{hook} is not a hook{near_text(hook, sorted(specs))}")
            continue
        if options.get("wrapper") or options.get("hookwrapper"):
            faults.append(f"{hook} may not be a wrapper: answers are collected, never changed by another plugin")
            continue
        takes = [name for name in inspect.signature(function).parameters if name != "self"]
        offered = list(inspect.signature(getattr(hookspecs, hook)).parameters)
        for argument in takes:
            if argument not in offered:
                offer = ", ".join(offered) if offered else "no arguments"
                faults.append(f"{hook} takes {argument!r}, which the hook does not offer (it offers {offer})")
        hooks[hook] = function
    if not hooks and not faults:
        faults.append("it implements no hook")
    return hooks, faults


def _declarations(function: Any, hook: str, faults: list[str]) -> tuple[Any, ...]:
    try:
        items = tuple(function() or ())
    except (Exception, SystemExit) as fault:
        faults.append(f"{hook} raised {fault_text(fault)}")
        return ()
    wrong = [type(item).__name__ for item in items if not isinstance(item, YIELDS[hook])]
    if wrong:
        faults.append(f"{hook} must yield {YIELDS[hook].__name__}, it yielded {', '.join(sorted(set(wrong)))}")
    return items


@contextmanager
def _watch_heavy_imports(faults: list[str], moment: str) -> Iterator[None]:
    # Where torch is already loaded (the Python API in a running program) the import cannot be seen, and costs nothing.
    before = {name for name in HEAVY_MODULES if name in sys.modules}
    yield
    brought = [name for name in HEAVY_MODULES if name in sys.modules and name not in before]
    if brought:
        faults.append(
            f"{moment} imports {' and '.join(brought)}: facts must load without them, import inside functions"
        )
