"""Fills a model that was built on the meta device with its source's weights, slice by slice.

Not for deciding what belongs where (`layout.py`), nor for finding the folder (`source.py`). Of a model that is cut over
processes each reads its own slices: transformers' conversion looks at the placement of a parameter.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from halo_core.errors import Problem, Refused
from halo_core.models.dequantise import DequantisedSlice
from halo_core.models.layout import Layout, check_inverse, module_key, read_layout
from halo_core.models.packed import PackedTensor, source_files
from halo_core.models.safetensors_files import StoredTensor, WeightFile
from halo_core.models.source import weight_files
from halo_core.registry import Architecture


def load_weights(
    model: PreTrainedModel, folder: Path, architecture: Architecture, *, device: torch.device | str = "cpu"
) -> None:
    """Read every tensor of `model` from the folder's safetensors files, and rebuild what is not stored.

    model: on the meta device, whole or cut. Each tensor keeps the dtype it has there, whatever the file's is.
    device: where the weights go.

    Raises:
        Refused: before any tensor is read, with the names of tensors that are missing, unexpected, doubled, of
            another shape or quantised, and with files that are damaged. After reading, when embedding and head are one
            in config.json, differ in the files, and the model is cut.
        NotImplementedError: before any tensor is read, when a slice of a converted tensor is not made of slices of its
            sources.
    """
    files = source_files(folder)
    layout = read_layout(model, files, architecture)
    check_inverse(model, layout, files)
    _check_slices(model, layout)
    tied = _shares_cut_head(model)
    placement = {"": device}
    settings = LoadStateDictConfig(
        weight_mapping=get_model_conversion_mapping(model),
        device_map=placement,
        dtype_plan=model._get_dtype_plan(model.dtype),
    )
    prefixes = architecture.spec.source_prefixes
    missing: set[str] = set()
    with ExitStack() as stack:
        handles = {path: stack.enter_context(safe_open(path, framework="pt")) for path in weight_files(folder)}
        for number, part in enumerate(_parts(files, layout)):
            slices = {module_key(tensor.key, prefixes): _slice(path, tensor, handles) for path, tensor in part}
            found, _ = convert_and_load_state_dict_in_model(model, slices, settings)
            _raise_surprises(found)
            missing = found.missing_keys if number == 0 else missing & found.missing_keys
            _give_back_memory()
    found.missing_keys = missing
    _finish(model, found, placement)
    _check_tied(model, tied, folder)
    left = [name for name, _ in _on_meta(model)]
    if left:
        raise RuntimeError(f"tensors without a value after loading: {', '.join(left)}")


def _slice(path: Path, tensor: StoredTensor, handles: Mapping[Path, Any]) -> Any:
    """Return what reads any part of a tensor when it is indexed."""
    if not isinstance(tensor, PackedTensor):
        return handles[path].get_slice(tensor.key)
    stored = (tensor.blocks, tensor.scales)
    return DequantisedSlice(*(handles[place].get_slice(packed.key) for place, packed in stored))


def _parts(files: list[WeightFile], layout: Layout) -> Iterator[list[tuple[Path, StoredTensor]]]:
    """Yield (file, tensor) of the tensors to be read, in parts: one layer each, and what lies outside of layers.

    transformers reads ahead of what it converts, without a limit; so it is given no more than a layer at a time.
    """
    parts: dict[str, list[tuple[Path, StoredTensor]]] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.key not in layout.untrained:
                target = layout.group_of[tensor.key].targets[0]
                numbered = re.match(r".*?\.\d+\.", target)
                parts.setdefault(numbered.group() if numbered else "", []).append((file.path, tensor))
    yield from parts.values()


def _give_back_memory() -> None:
    """Let glibc give back what was freed: the readers' threads leave holes, half as much again as a shard (CPU)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _raise_surprises(found: Any) -> None:
    failed = {**found.conversion_errors, **{name: "shape" for name, *_ in found.mismatched_keys}}
    if failed or found.unexpected_keys:
        raise RuntimeError(f"transformers loaded other tensors than planned: {failed} {found.unexpected_keys}")


def _check_slices(model: PreTrainedModel, layout: Layout) -> None:
    """Check that every converted tensor can be read slice by slice.

    Raises:
        NotImplementedError: with the first that cannot.
    """
    state = model.state_dict()
    for group in layout.groups:
        if group.converter is None:
            continue
        cut = {
            placement.dim
            for name in group.targets
            if isinstance(tensor := state[name], DTensor)
            for placement in tensor.placements
            if not placement.is_replicate()
        }
        for operation in group.converter.operations:
            # Numbered tensors are read by the process that holds them, and cut along their own dimensions like any.
            numbered = isinstance(operation, MergeModulelist) and operation.dim == 0
            beside = isinstance(operation, Concatenate) and operation.dim not in cut
            if cut and not (numbered or beside):
                raise NotImplementedError(f"{group.targets[0]} is cut along {sorted(cut)} and made by {operation}")


def _shares_cut_head(model: PreTrainedModel) -> bool:
    """Return whether embedding and head are one parameter, cut over processes."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embedding.weight and isinstance(head.weight, DTensor)


def _check_tied(model: PreTrainedModel, tied: bool, folder: Path) -> None:
    """Check that what was cut as one parameter has stayed one.

    Raises:
        Refused: when the files hold two different ones.
    """
    if tied and not _shares_cut_head(model):
        raise Refused(
            Problem(
                key="model_name_or_path",
                value=str(folder),
                why="its config.json ties the head to the embedding, its files hold two different tensors",
                remedy="set tie_word_embeddings: false in its config.json, or train in one process",
            )
        )


def _finish(model: PreTrainedModel, found: Any, placement: dict[str, torch.device | str]) -> None:
    """Tie, and compute the buffers that no file holds, in the order in which transformers itself finishes a load.

    Buffers such as rotary frequencies are recomputed by the model's own initialisation, which leaves loaded tensors
    alone because they carry its mark.
    """
    untied = found.missing_keys - model.all_tied_weights_keys.keys() - set(model.all_tied_weights_keys.values())
    if untied:
        raise RuntimeError(f"transformers did not load {', '.join(sorted(untied))}")
    model.mark_tied_weights_as_initialized(found)
    for source in model.all_tied_weights_keys.values():
        model.get_parameter(source)._is_hf_initialized = True  # may itself be the one the file lacks
    model._move_missing_keys_from_meta_to_device(set(), placement, None, None)
    model._initialize_missing_keys(is_quantized=False)
    model.tie_weights(missing_keys=found.missing_keys, recompute_mapping=False)


def _on_meta(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of parameters, buffers and plain tensor attributes that have no memory."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            yield name, tensor
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                yield f"{path}.{name}", value
