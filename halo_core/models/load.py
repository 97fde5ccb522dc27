"""Fills a model that was built on the meta device with its source's weights, slice by slice.

Not for deciding what belongs where (`layout.py`), nor for finding the folder (`source.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from halo_core.models.layout import check_inverse, module_key, read_layout
from halo_core.models.safetensors_files import read_file
from halo_core.models.source import weight_files
from halo_core.registry import Architecture


def load_weights(
    model: PreTrainedModel, folder: Path, architecture: Architecture, *, device: torch.device | str = "cpu"
) -> None:
    """Read every tensor of `model` from the folder's safetensors files, and rebuild what is not stored.

    model: on the meta device. Each tensor keeps the dtype it has there, whatever the file's is.
    device: where the weights go.

    Raises:
        Refused: before any tensor is read, with the names of tensors that are missing, unexpected, doubled, of
            another shape or quantised, and with files that are damaged.
    """
    files = [read_file(path) for path in weight_files(folder)]
    layout = read_layout(model, files, architecture)
    check_inverse(model, layout, files)
    placement = {"": device}
    settings = LoadStateDictConfig(
        weight_mapping=get_model_conversion_mapping(model),
        device_map=placement,
        dtype_plan=model._get_dtype_plan(model.dtype),
    )
    prefixes = architecture.spec.source_prefixes
    with ExitStack() as stack:
        slices: dict[str, Any] = {}
        for file in files:
            handle = stack.enter_context(safe_open(file.path, framework="pt"))
            for tensor in file.tensors:
                if tensor.key not in layout.untrained:
                    slices[module_key(tensor.key, prefixes)] = handle.get_slice(tensor.key)
        found, _ = convert_and_load_state_dict_in_model(model, slices, settings)
        del slices
    failed = {**found.conversion_errors, **{name: "shape" for name, *_ in found.mismatched_keys}}
    if failed or found.unexpected_keys:
        raise RuntimeError(f"transformers loaded other tensors than planned: {failed} {found.unexpected_keys}")
    _finish(model, found, placement)
    left = [name for name, _ in _on_meta(model)]
    if left:
        raise RuntimeError(f"tensors without a value after loading: {', '.join(left)}")


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
