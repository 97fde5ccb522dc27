"""How the tensors of a source folder correspond to those of a model, both ways, decided from names and shapes alone.

Not for reading or writing files. Loading and exporting share this map, so that what is read is what is written.
The rules are transformers' own weight conversions, preceded by the architecture's `source_prefixes`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from halo_core.errors import Problem, Refused
from halo_core.models.safetensors_files import TRAINABLE_DTYPES, StoredTensor, WeightFile
from halo_core.registry import Architecture

SHOWN = 10
"""How many names a refusal lists before it counts the rest."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Source tensors that together make the model's tensors named `targets` (one tensor each way, most often).

    members: source key -> the key's name in module terms, still in the source's layout (such as one per expert).
    converter: what turns the members into the targets, None when it is one tensor under another name at most.
    """

    targets: tuple[str, ...]
    members: Mapping[str, str]
    converter: WeightConverter | None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The whole correspondence. groups: of trained tensors. untrained: source keys the model does not hold."""

    groups: tuple[Group, ...]
    untrained: frozenset[str]

    @cached_property
    def group_of(self) -> Mapping[str, Group]:
        """Return source key -> its group."""
        return {key: group for group in self.groups for key in group.members}


def read_layout(model: PreTrainedModel, files: Iterable[WeightFile], architecture: Architecture) -> Layout:
    """Return the map between the source's tensors and the model's.

    model: on any device, only names and shapes are looked at.

    Raises:
        Refused: with the names of tensors that are missing, unexpected, doubled, of a wrong shape or quantised.
    """
    stored: dict[str, StoredTensor] = {}
    faults = _Faults()
    files = list(files)
    for file in files:
        for tensor in file.tensors:
            if tensor.key in stored:
                faults.doubled.append(f"{tensor.key} (in two files)")
            stored[tensor.key] = tensor
    state = model.state_dict()
    mapped = _Mapping(model, architecture, state)
    gathered: dict[str, dict[str, tuple[str, WeightConverter | None]]] = {}
    untrained = set()
    for key in sorted(stored, key=dot_natural_key):
        name, target, converter = mapped.of(key)
        if target in state:
            gathered.setdefault(target, {})[key] = (name, converter)
        elif mapped.is_untrained(key, target):
            untrained.add(key)
        else:
            faults.unexpected.append(key)
    groups = []
    for target, members in gathered.items():
        group = _group(model, target, members, stored, state, faults)
        if group is not None:
            groups.append(group)
    reached = {target for group in groups for target in group.targets} | set(gathered)
    faults.missing += [key for key in state if key not in reached and not _is_tied_to(key, reached, model)]
    faults.raise_any(str(files[0].path.parent) if files else architecture.name)
    return Layout(groups=tuple(groups), untrained=frozenset(untrained))


def to_source(group: Group, tensors: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Return source key -> tensor in the source's layout, made from the model's tensors `group.targets`."""
    if group.converter is None:
        return dict.fromkeys(group.members, tensors[group.targets[0]])
    reverse = deepcopy(group.converter).reverse_transform()
    first = ""
    for name in group.targets:
        renamed, pattern = apply_converters(name, [reverse])
        assert pattern is not None, f"{name} does not match the inverse of its own conversion"
        first = first or renamed
        reverse.add_tensor(renamed, name, pattern, tensors[name])
    made = reverse.convert(first, model=model, config=model.config)
    return {key: _only(made[name]) for key, name in group.members.items()}


def check_inverse(model: PreTrainedModel, layout: Layout, files: Iterable[WeightFile]) -> None:
    """Check, on shapes alone, that the model can be written back as its source: better now than after training.

    Raises:
        RuntimeError: naming the source tensor that the inverse of its conversion does not give back.
    """
    shapes = {tensor.key: tensor.shape for file in files for tensor in file.tensors}
    state = model.state_dict()
    for group in layout.groups:
        if group.converter is None:
            continue
        made = to_source(group, {name: torch.empty(state[name].shape, device="meta") for name in group.targets}, model)
        for key, tensor in made.items():
            if tuple(tensor.shape) != shapes[key]:
                raise RuntimeError(f"{key} {list(shapes[key])} would be written back as {list(tensor.shape)}")


class _Mapping:
    """transformers' renamings and converters of one model, after the architecture's prefixes."""

    def __init__(self, model: PreTrainedModel, architecture: Architecture, state: Mapping[str, Tensor]) -> None:
        transforms = get_model_conversion_mapping(model)
        self.renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        self.converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        self.by_pattern = {pattern: entry for entry in self.converters for pattern in entry.source_patterns}
        self.base, self.state, self.spec = model.base_model_prefix, state, architecture.spec
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        self.ignored = [re.compile(pattern) for pattern in ignored]
        self.untrained = [re.compile(pattern) for pattern in self.spec.untrained]

    def of(self, key: str) -> tuple[str, str, WeightConverter | None]:
        """Return the key in module terms, the model's key it goes to, and the converter on the way."""
        prefixed = module_key(key, self.spec.source_prefixes)
        name = apply_renamings(prefixed, self.renamings)
        target, pattern = rename_source_key(prefixed, self.renamings, self.converters, self.base, self.state)
        if target not in self.state and prefixed in self.state:
            # transformers' own exception: a key that fits as it is was not meant to be renamed.
            name, target, pattern = prefixed, prefixed, None
        prefix = f"{self.base}."
        if target.startswith(prefix) and not name.startswith(prefix):
            name = prefix + name
        return name, target, None if pattern is None else self.by_pattern[pattern]

    def is_untrained(self, key: str, target: str) -> bool:
        """Return whether the facts, or the model's class, say that the model does not hold this tensor."""
        if any(pattern.search(key) for pattern in self.untrained):
            return True
        return any(pattern.search(name) for pattern in self.ignored for name in (key, target))


def module_key(key: str, prefixes: tuple[tuple[str, str], ...]) -> str:
    """Return a checkpoint key with the first matching (prefix in the file, prefix in the model) applied."""
    for before, after in prefixes:
        if key.startswith(before):
            return after + key.removeprefix(before)
    return key


def _group(
    model: PreTrainedModel,
    target: str,
    members: Mapping[str, tuple[str, WeightConverter | None]],
    stored: Mapping[str, StoredTensor],
    state: Mapping[str, Tensor],
    faults: _Faults,
) -> Group | None:
    """Return the group that makes `target`, or None after noting why there is none."""
    quantised = [key for key in members if stored[key].dtype not in TRAINABLE_DTYPES]
    faults.quantised += [f"{key} ({stored[key].dtype})" for key in quantised]
    names = {key: name for key, (name, _) in members.items()}
    converters = {id(converter): converter for _, converter in members.values()}
    if len(set(names.values())) < len(names) or len(converters) > 1:
        faults.doubled.append(f"{target} (from {_listed(sorted(members), 4)})")
        return None
    converter = next(iter(converters.values()))
    if converter is None:
        if len(members) > 1:
            faults.doubled.append(f"{target} (from {_listed(sorted(members), 4)})")
            return None
        shape, wanted = stored[next(iter(members))].shape, tuple(state[target].shape)
        if shape != wanted and not quantised:
            faults.shapes.append(f"{next(iter(members))} is {list(shape)}, the model has {list(wanted)}")
        return Group(targets=(target,), members=names, converter=None)
    if quantised or not _is_complete(target, names, converter, state, faults):
        return None
    try:
        made = _convert_shapes(model, target, names, converter, stored)
    except Exception as fault:  # whatever an operation raises about shapes that do not fit together
        faults.shapes.append(f"{_listed(sorted(members), 2)} do not combine to {target} ({str(fault).splitlines()[0]})")
        return None
    wrong = {name: shape for name, shape in made.items() if name in state and shape != tuple(state[name].shape)}
    for name, shape in wrong.items():
        found = f"{_listed(sorted(members), 2)} combine to {list(shape)}"
        faults.shapes.append(f"{found}, the model's {name} is {list(state[name].shape)}")
    return Group(targets=tuple(made), members=names, converter=converter)


def _convert_shapes(
    model: PreTrainedModel,
    target: str,
    names: Mapping[str, str],
    converter: WeightConverter,
    stored: Mapping[str, StoredTensor],
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's tensors that a conversion yields, found on the meta device."""
    dry = deepcopy(converter)
    for key, name in names.items():
        _, pattern = dry.rename_source_key(name)
        assert pattern is not None, f"{name} does not match the conversion it was found by"
        dry.add_tensor(target, key, pattern, torch.empty(stored[key].shape, device="meta"))
    made = dry.convert(target, model=model, config=model.config)
    return {name: tuple(_only(tensor).shape) for name, tensor in made.items()}


def _is_complete(
    target: str,
    names: Mapping[str, str],
    converter: WeightConverter,
    state: Mapping[str, Tensor],
    faults: _Faults,
) -> bool:
    """Note numbered tensors (one per expert) that are missing or too many; return whether all are there."""
    if not isinstance(converter.operations[0], MergeModulelist):
        return True
    count = state[target].shape[converter.operations[0].dim]
    present = {name: key for key, name in names.items()}
    # Where the numbered part begins and ends is seen on any member.
    sample = next(iter(present))
    _, pattern = converter.rename_source_key(sample)
    assert pattern is not None
    before, _, after = pattern.partition("*")
    found = re.search(re.escape(before) + r"(\d+)" + re.escape(after), sample)
    if found is None:
        return True  # a pattern richer than a name with a star; the shapes still have to fit
    head, tail = sample[: found.start()], sample[found.end() :]
    patterns = converter.source_patterns
    wanted = {head + name.replace("*", str(number), 1) + tail for name in patterns for number in range(count)}
    missing = sorted(wanted - present.keys(), key=dot_natural_key)
    extra = sorted((key for name, key in present.items() if name not in wanted), key=dot_natural_key)
    faults.missing += missing
    faults.unexpected += extra
    return not missing and not extra


def _is_tied_to(key: str, reached: set[str], model: PreTrainedModel) -> bool:
    """Return whether `key` shares its tensor with one that the source has."""
    tied = model.all_tied_weights_keys
    partners = {tied.get(key), *(target for target, source in tied.items() if source == key)}
    partners |= {target for target, source in tied.items() if source == tied.get(key)}
    return bool(partners & (reached - {key}))


def _only(tensor: Tensor | list[Tensor]) -> Tensor:
    return tensor[0] if isinstance(tensor, list) else tensor


def _listed(names: list[str], most: int = SHOWN) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


class _Faults:
    """What is wrong with a source, collected by kind."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.doubled: list[str] = []
        self.shapes: list[str] = []
        self.quantised: list[str] = []

    def raise_any(self, source: str) -> None:
        """Raise one refusal about the folder `source` with a problem per kind, or return when there is none."""
        again = "copy or download the model again; a file may be missing or belong to another model"
        texts = [
            (self.missing, "the source lacks tensors that the model has", again),
            (self.unexpected, "the source has tensors that the model has no place for", again),
            (self.doubled, "the source holds the same tensor more than once", "keep one of them"),
            (self.shapes, "tensors have other shapes than config.json says", "use the config.json of these weights"),
            (self.quantised, "tensors are stored quantised", "start from a bf16 copy of this model"),
        ]
        problems = [
            Problem(key="model_name_or_path", value=source, why=f"{why}: {_listed(names)}", remedy=remedy)
            for names, why, remedy in texts
            if names
        ]
        if problems:
            raise Refused(problems)
