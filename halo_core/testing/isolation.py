"""Proofs that documents in one row are what they are alone, in every layer: log-probabilities and every gradient.

Not for whole runs, packing plans or accounts: see `packed_runs.py`. Shapes: N tokens of all documents in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from halo_core.data.batch import IGNORED, Batch
from halo_core.data.collate import collate
from halo_core.data.rows import Row
from halo_core.data.units import Pack
from halo_core.kernels import documents
from halo_core.models import sockets
from halo_core.models.hidden import Head, last_hidden
from halo_core.plan import Checked
from halo_core.registry import Registry
from halo_core.testing.cases import Case, uneven_rows
from halo_core.testing.compare import REORDERED, assert_same
from halo_core.testing.product import PAD, build, checked
from halo_core.trainer.recompute import enable_recompute

LENGTHS = (19, 1, 13)
"""Tokens of three documents: odd, one of a single token, together longer than the tiny models' attention windows."""

PADDINGS = ((0, 0), (7, 0), (64, 0), (0, 7), (0, 64))
"""Positions of padding to the left and to the right of them."""

BACKENDS = ("eager", "sdpa")
"""Attention implementations that compute on a CPU."""

APART = 1e-5
"""Largest difference of one log-probability, and of one element of a gradient of their mean as a share of that
gradient's norm where the norm is above one, fp32: products of other shapes sum in another order. At most 4.3e-6 and
7.4e-6 were seen over the built-in families; in fp64 the same log-probabilities are equal to the last bit."""

READ = "log_probabilities"

Seen: TypeAlias = dict[str, Tensor]


def prove_packing(registry: Registry, case: Case) -> None:
    """Documents of a padded row are what they are alone and what transformers alone makes of them, recomputed too."""
    for ready in plans(registry, case, {"packing": True}):
        assert_documents_apart(build(ready, case), case, PADDINGS)
        assert_packs_equal_reference(ready, case, [slice(0, 3)], [slice(0, 2), slice(2, 3)])


def prove_padding_free(registry: Registry, case: Case) -> None:
    """Documents of one long row without padding are what they are alone and what transformers alone makes of them."""
    for ready in plans(registry, case, {"padding_free": True}):
        assert_documents_apart(build(ready, case), case, PADDINGS[:1])
        assert_packs_equal_reference(ready, case, [slice(0, 3)])


def plans(registry: Registry, case: Case, keys: Mapping[str, Any]) -> Iterator[Checked]:
    """Yield the plan of a run with these keys under each backend that the architecture has on a CPU."""
    for backend in BACKENDS:
        if case.architecture.cell(f"attention:{backend}").word == "Supported":
            yield checked(registry, case, {**keys, "attn_implementation": backend})


def assert_documents_apart(
    model: PreTrainedModel, case: Case, paddings: Sequence[tuple[int, int]], allowed: float = APART
) -> None:
    """Check three documents in one row against each of them in a row of its own.

    Raises:
        AssertionError: naming what differs.
    """
    rows = _documents(model.config.vocab_size)
    alone = observe(model, case, [collate([row], PAD) for row in rows])
    for left, right in paddings:
        packed = observe(model, case, [_padded(collate([Pack(rows=rows)], PAD), left, right)])
        name = f"{case.architecture.name}, three documents with padding {left} to the left and {right} to the right"
        sizes = {key: max(1.0, float(tensor.norm())) if key != READ else 1.0 for key, tensor in alone.items()}
        assert_same(name, _divided(packed, sizes), _divided(alone, sizes), allowed)


def assert_packs_equal_reference(
    ready: Checked, case: Case, *layouts: Sequence[slice], allowed: float = REORDERED
) -> None:
    """Check the case's rows, packed, against what transformers alone computed of each in a row of its own.

    layouts: for each row of a batch, which of the case's rows it holds.

    Raises:
        AssertionError: naming what differs.
    """
    wanted = {key: t for key, t in case.reference.items() if key.startswith("gradient.") or key == "loss.0"}
    real = [len(row.input_ids) for row in case.rows]
    for key, tensor in case.reference.items():
        if key.startswith("experts."):
            wanted[key] = torch.cat([row[:length] for row, length in zip(tensor, real, strict=True)])
    for recomputed in (False, True):
        model = build(ready, case)
        if recomputed:
            enable_recompute(model, routes=case.architecture.spec.is_moe)
        for layout in layouts:
            batch = collate([Pack(rows=case.rows[part]) for part in layout], PAD)
            found = observe(model, case, [batch], learnt=True)
            name = f"{case.architecture.name}, rows in packs{' (recomputed)' * recomputed}, against transformers alone"
            assert_same(name, found, wanted, allowed)


def observe(model: PreTrainedModel, case: Case, batches: Sequence[Batch], *, learnt: bool = False) -> Seen:
    """Return what a model makes of documents, however they are spread over `batches`, in order.

    With `learnt`: the loss over supervised targets, `loss.0`, its `gradient.*` by parameter, and the output of each
    experts module `experts.*` [N, H]. Without: the log-probability of a drawn token after each one, `READ` [N], and
    the gradients of their mean under drawn weights.
    """
    head = Head(model, case.architecture)
    model.zero_grad(set_to_none=True)
    outputs: dict[str, list[Tensor]] = {}
    real: list[Tensor] = []
    handles = [
        module.register_forward_hook(_recorder(f"experts.{path}", outputs, real))
        for path, module in sockets.experts_modules(model, case.architecture)
    ]
    total = sum(int((batch.segment_ids != 0).sum()) for batch in batches)
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(model.config.vocab_size, (total,), generator=generator)
    weights = torch.rand(total, generator=generator) / total
    found: Seen = {}
    done, read, loss = 0, [], torch.zeros(())
    for batch in batches:
        at = (batch.segment_ids != 0).flatten().nonzero().squeeze(-1)
        real[:] = [at]
        hidden = last_hidden(model, batch).flatten(0, 1)
        if learnt:
            count = max(1, int((batch.targets != IGNORED).sum()))
            part = -head(hidden, batch.targets.flatten()).sum() / count
            assert len(batches) == 1, "of several batches the mean is none of these"
        else:
            chosen = head(hidden[at], drawn[done : done + len(at)])
            read.append(chosen.detach())
            part = (chosen * weights[done : done + len(at)]).sum()
        for handle in handles:
            handle.remove()  # a recomputation in backward would be recorded again
        part.backward()  # type: ignore[no-untyped-call]
        loss, done = loss + part.detach(), done + len(at)
    if learnt:
        found["loss.0"] = loss
        found.update({key: torch.cat(parts) for key, parts in outputs.items()})
    else:
        found[READ] = torch.cat(read)
    found.update({f"gradient.{n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return found


def _recorder(key: str, outputs: dict[str, list[Tensor]], real: list[Tensor]) -> Callable[..., None]:
    def record(module: Any, arguments: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        outputs.setdefault(key, []).append(hidden.detach().reshape(-1, hidden.shape[-1])[real[0]].clone())

    return record


def _divided(tensors: Mapping[str, Tensor], sizes: Mapping[str, float]) -> Seen:
    return {key: tensor / sizes.get(key, 1.0) for key, tensor in tensors.items()}


def _documents(vocabulary: int) -> tuple[Row, ...]:
    return uneven_rows(vocabulary, seed=1, lengths=LENGTHS)


def _padded(batch: Batch, left: int, right: int) -> Batch:
    """Return a batch with more padding, whose tokens and positions are nothing that could go unnoticed."""
    around = (left, right)
    segment_ids = functional.pad(batch.segment_ids, around)
    return replace(
        batch,
        input_ids=functional.pad(batch.input_ids, around, value=PAD),
        targets=functional.pad(batch.targets, around, value=IGNORED),
        weights=functional.pad(batch.weights, around),
        position_ids=functional.pad(batch.position_ids, around, value=3),
        segment_ids=segment_ids,
        documents=documents.find(segment_ids),
    )
