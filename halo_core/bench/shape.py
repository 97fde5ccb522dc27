"""The shape that a benchmark trains: a published config.json, cut to fewer layers where asked.

Not for weights (`random_weights.py`) nor rows (`random_rows.py`). No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halo_core.errors import Problem, Refused
from halo_core.registry import Architecture, size, text_config


def cut(model_config: Mapping[str, Any], architecture: Architecture, layers: int | None) -> dict[str, Any]:
    """Return config.json with the first `layers` layers alone; None keeps all.

    Lists with one entry per layer (such as `layer_types`) and tables by layer number are cut too. How the weights were
    stored is left out: there are none to read.

    Raises:
        Refused: the model has fewer layers, or none is asked for.
    """
    config = {key: value for key, value in model_config.items() if key != "quantization_config"}
    if layers is None:
        return config
    inner = dict(text_config(architecture.spec, config))
    names = architecture.spec.names.num_layers
    total = size(names, inner)
    if total is None or not 1 <= layers <= total:
        why = f"the model has {total} layers" if total else f"its config.json has none of {', '.join(names)}"
        remedy = f"a number from 1 to {total}" if total else "leave --layers out"
        raise Refused(Problem(key="--layers", value=layers, why=why, remedy=remedy))
    for key, value in inner.items():
        if isinstance(value, list) and len(value) == total:
            inner[key] = value[:layers]
        elif isinstance(value, Mapping) and value and all(str(number).isdigit() for number in value):
            inner[key] = {number: entry for number, entry in value.items() if int(number) < layers}
    inner |= {name: layers for name in names if name in inner}
    nested = architecture.spec.text_config
    return config | {nested: inner} if nested is not None and isinstance(config.get(nested), Mapping) else inner
