"""The fixture of a benchmark: a model's shape, cut to fewer layers where asked, and rows of random tokens.

Not for weights (`random_weights.py`). No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from halo_core.data.rows import Row, Rows
from halo_core.errors import Problem, Refused
from halo_core.registry import Architecture, size, text_config


def cut(model_config: Mapping[str, Any], architecture: Architecture, layers: int | None) -> dict[str, Any]:
    """Return config.json with the first `layers` layers alone; None keeps all.

    Lists with one entry per layer (such as `layer_types`) are cut too. How the weights were stored is left out: there
    are none to read.

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
    inner |= {name: layers for name in names if name in inner}
    nested = architecture.spec.text_config
    return config | {nested: inner} if nested is not None and isinstance(config.get(nested), Mapping) else inner


def random_rows(count: int, *, length: int, vocab_size: int, seed: int) -> Rows:
    """Return `count` rows of exactly `length` tokens, every token supervised: nothing is padded or packed.

    The same arguments give the same rows on every machine.
    """
    # Raw words, which numpy keeps the same over its versions; the bias of the remainder is below one in 10**13.
    words = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count * length)
    tokens = (words % np.uint64(vocab_size)).astype(np.int64).reshape(count, length)
    rows = Rows()
    for row_id, row in enumerate(tokens):
        rows.add(Row(row_id=row_id, input_ids=row.tolist(), supervised=[True] * length))
    return rows
