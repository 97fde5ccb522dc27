"""The conformance kit: every Supported cell is shown to work, every Unsupported one to refuse and to be honest.

Not for facts about classes and keys, which have tests of their own. An author of a plugin puts this into a test file:

    from pathlib import Path

    from halo_core.testing.conformance import prove_family


    def test_family_keeps_its_word(tmp_path: Path) -> None:
        prove_family("mosaic", tmp_path)

and, to see each cell as a test of its own, parametrises one over `supported_cells` and `unsupported_cells` of
`halo_core.testing.cells`, and calls `Suite.prove` with a `Suite.of("mosaic", folder)` made once per session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from halo_core import registry as facts
from halo_core import runtime
from halo_core.models.build import build_meta
from halo_core.models.tiny import tiny_config
from halo_core.registry import Architecture, Registry, size
from halo_core.support import Cell
from halo_core.testing import isolation, packed_runs
from halo_core.testing.balanced import balanced_by_hand, observe_balanced
from halo_core.testing.cases import Case, make_cases
from halo_core.testing.cells import ASKS, assert_refused, is_familys_no, supported_cells, unsupported_cells
from halo_core.testing.compare import ABSOLUTE, REORDERED, assert_same
from halo_core.testing.precision import prove_bf16, prove_fp32_router
from halo_core.testing.product import checked, layer_passes, observe
from halo_core.testing.several import trained

Proof: TypeAlias = Callable[[Registry, Case], None]
"""Shows one feature on one architecture, or raises AssertionError."""

PLAIN: Mapping[str, Any] = MappingProxyType({"attn_implementation": "eager"})
"""Keys under which Halo does the reference's arithmetic in the reference's order, but for the experts."""


def prove_sft(registry: Registry, case: Case) -> None:
    """Loss, every gradient, every experts output, and loss and weights after SGD steps equal transformers alone."""
    assert_equals_reference(case, observe(checked(registry, case, PLAIN), case))


def prove_gradient_checkpointing(registry: Registry, case: Case) -> None:
    """The recomputed run is the plain run bit for bit, and layers really are computed again."""
    plain = observe(checked(registry, case, PLAIN), case)
    ready = checked(registry, case, {**PLAIN, "gradient_checkpointing": True})
    assert "gradient_checkpointing" in ready.plan.features, "the plan leaves out what was asked"
    assert layer_passes(ready, case) == 2, "nothing is recomputed"
    found = observe(ready, case)
    unequal = [name for name in plain if not torch.equal(plain[name], found[name])]
    assert not unequal, f"other bits with gradient_checkpointing: {', '.join(unequal[:12])}"
    assert found.keys() == plain.keys()


def prove_grouped_gemm(registry: Registry, case: Case) -> None:
    """The grouped experts kernel, and the loop over experts that specifies it, both equal transformers alone."""
    for keys, kernel in (({"use_grouped_gemm": True}, "grouped"), ({"use_grouped_gemm": False}, "reference")):
        ready = checked(registry, case, {**PLAIN, **keys})
        resolved = runtime.resolve(ready)
        assert resolved.experts == kernel, f"asked for {kernel}, got {resolved.experts}: {resolved.experts_reason}"
        assert_equals_reference(case, observe(ready, case))


def prove_attention_eager(registry: Registry, case: Case) -> None:
    """The plan asks transformers for eager attention, and the run equals transformers alone."""
    ready = checked(registry, case, PLAIN)
    assert runtime.resolve(ready).attention == "eager"
    assert_equals_reference(case, observe(ready, case))


def prove_attention_sdpa(registry: Registry, case: Case) -> None:
    """A run under torch's scaled dot product attention equals transformers alone under eager attention."""
    ready = checked(registry, case, {"attn_implementation": "sdpa"})
    assert runtime.resolve(ready).attention == "sdpa"
    assert_equals_reference(case, observe(ready, case), REORDERED)


def prove_balancing_none(registry: Registry, case: Case) -> None:
    """Nothing is added to the loss, and no buffer (such as a selection bias) moves in training."""
    ready = checked(registry, case, {**PLAIN, "moe_balancing": "none"})
    found = observe(ready, case)
    assert_equals_reference(case, found)
    model = build_meta(case.architecture, ready.model_config, dtype=torch.float32)
    kept = {f"weight.{name}" for name, _ in model.named_buffers()} & found.keys()
    moved = [name for name in sorted(kept) if not torch.equal(found[name], case.reference[name])]
    assert not moved, f"buffers moved without balancing: {', '.join(moved)}"


def prove_bias_update(registry: Registry, case: Case) -> None:
    """After each step the bias has moved by the counts that transformers' own router gives for the real tokens.

    Accumulation and recomputation change nothing, and an evaluation is not counted.
    """
    rate, steps = 0.01, 3
    wanted = balanced_by_hand(case, rate=rate, steps=steps)
    for recompute in (False, True):
        keys = {"moe_balancing": "bias_update", "router_balancing_rate": rate, "gradient_checkpointing": recompute}
        found = observe_balanced(checked(registry, case, {**PLAIN, **keys}), case, steps=steps)
        assert found.keys() == wanted.keys(), "other biases moved than those beside transformers' routers"
        unequal = [name for name, bias in wanted.items() if not torch.equal(bias, found[name])]
        assert not unequal, f"other biases than by hand (recomputation: {recompute}): {', '.join(unequal)}"
    assert any(not torch.equal(bias, case.reference[f"weight.{name}"]) for name, bias in wanted.items())


def prove_ep(registry: Registry, case: Case) -> None:
    """Two processes that hold half of the experts each compute what one process does."""
    assert_equals_one_process(registry, case, {"expert_parallel_size": 2})


def prove_packing(registry: Registry, case: Case) -> None:
    """Documents of a pack are what each is alone, in every layer, and a run of packs is a run of its rows."""
    isolation.prove_packing(registry, case)
    packed_runs.prove_packing(registry, case)


def prove_padding_free(registry: Registry, case: Case) -> None:
    """A batch flattened to one row is what its rows are alone, in every layer and over a run."""
    isolation.prove_padding_free(registry, case)
    packed_runs.prove_padding_free(registry, case)


def prove_fsdp(registry: Registry, case: Case) -> None:
    """Two processes that hold half of every tensor compute what one process does."""
    assert_equals_one_process(registry, case, {})


def assert_equals_one_process(registry: Registry, case: Case, keys: Mapping[str, Any], world: int = 2) -> None:
    """Check losses, gradient norms and exported weights of a whole run by `world` processes against one process."""
    with TemporaryDirectory() as place:
        one_rows, one = trained(registry, case, {}, 1, Path(place) / "one")
        rows, found = trained(registry, case, keys, world, Path(place) / "several")
    counts = ("step", "tokens", "supervised_tokens")
    assert [[row[key] for key in counts] for row in rows] == [[row[key] for key in counts] for row in one_rows]
    for key in ("loss", "grad_norm"):
        pairs = [(row[key], wanted[key]) for row, wanted in zip(rows, one_rows, strict=True)]
        assert all(abs(a - b) <= REORDERED * max(1.0, abs(b)) for a, b in pairs), f"{key} differs: {pairs}"
    assert_same("several processes", found, one, REORDERED)


PROOFS: Mapping[str, Proof] = MappingProxyType(
    {
        "sft": prove_sft,
        "gradient_checkpointing": prove_gradient_checkpointing,
        "grouped_gemm": prove_grouped_gemm,
        "attention:eager": prove_attention_eager,
        "attention:sdpa": prove_attention_sdpa,
        "ep": prove_ep,
        "fsdp": prove_fsdp,
        "balancing:none": prove_balancing_none,
        "balancing:bias_update": prove_bias_update,
        "packing": prove_packing,
        "padding_free": prove_padding_free,
        "bf16": prove_bf16,
        "fp32_router": prove_fp32_router,
    }
)
"""Every built feature that a family may answer `Supported(proof="cpu")`. A mechanism that lands without its proof here
turns cells Supported that nobody can show, which a test forbids."""


def probe_grouped_gemm(case: Case) -> None:
    """A model whose family says "no experts" really has none, neither by its modules nor by its configuration."""
    config = tiny_config(case.architecture)
    model = build_meta(case.architecture, config.to_dict(), dtype=torch.float32)
    experts = [path for path, module in model.named_modules() if hasattr(module, "_apply_gate")]
    assert not experts, f"there are experts at {', '.join(experts)}"


def probe_selection_bias(case: Case) -> None:
    """A model whose family says "no selection bias" stores no buffer with one entry per expert."""
    config = tiny_config(case.architecture)
    model = build_meta(case.architecture, config.to_dict(), dtype=torch.float32)
    experts = size(case.architecture.spec.names.num_experts, config.to_dict())
    stored = model.state_dict().keys()
    biases = [n for n, buffer in model.named_buffers() if n in stored and experts and buffer.shape == (experts,)]
    assert not biases, f"there are buffers that could balance: {', '.join(biases)}"


def probe_attention(implementation: str) -> Callable[[Case], None]:
    """Return the probe that tries an attention implementation through transformers alone."""

    def probe(case: Case) -> None:
        """A refused attention is refused by transformers as well, or computes something else than eager attention."""
        try:
            model = AutoModelForCausalLM.from_pretrained(
                case.folder, dtype=torch.float32, attn_implementation=implementation
            )
        except (ValueError, ImportError):
            return
        row = case.rows[0]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row.input_ids]), use_cache=False).logits[0]
        gap = (logits - case.reference["logits"][0, : len(row.input_ids)]).abs().max().item()
        assert gap > 100 * ABSOLUTE, f"it works: logits under {implementation} are eager's within {gap:.1e}"

    return probe


PROBES: Mapping[str, Callable[[Case], None]] = MappingProxyType(
    {
        "grouped_gemm": probe_grouped_gemm,
        "ep": probe_grouped_gemm,
        "fp32_router": probe_grouped_gemm,
        "balancing:bias_update": probe_selection_bias,
        "attention:sdpa": probe_attention("sdpa"),
        "attention:eager": probe_attention("eager"),
    }
)
"""For a family's No to a feature whose mechanism is built: fails when the refused thing in fact works."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The cells of one family, or of all, and the cases to show them on."""

    registry: Registry
    cases: Mapping[str, Case]

    @staticmethod
    def of(family: str | None, folder: Path, registry: Registry | None = None) -> Suite:
        """Return the suite of a family (None: of all); its cases are made below `folder`, in a process of their own.

        Raises:
            AssertionError: when no loaded plugin has this family, with the faults of those that are broken.
        """
        joined = registry or facts.load()
        if family is None:
            chosen: Iterable[Architecture] = joined.architectures()
        else:
            owner = joined.family(family)
            broken = "; ".join(f"{row.name}: {fault}" for row in joined.plugins.broken for fault in row.faults)
            assert owner is not None, f"no loaded plugin has family {family!r}; {broken or 'none is broken'}"
            chosen = owner.architectures
        return Suite(registry=joined, cases=make_cases(chosen, folder))

    @property
    def cells(self) -> list[Cell]:
        """Return every cell that `prove` can show: those printed Supported for the CPU, and those Unsupported."""
        everything = [*supported_cells(self.registry), *unsupported_cells(self.registry)]
        return [cell for cell in everything if cell.architecture in self.cases]

    def prove(self, cell: Cell, folder: Path) -> None:
        """Show that one cell is true.

        Raises:
            AssertionError: it is not, or there is no way to show it.
        """
        case = self.cases[cell.architecture]
        if cell.word == "Supported":
            assert cell.feature in PROOFS, f"{cell.feature} is printed Supported and has no proof"
            PROOFS[cell.feature](self.registry, case)
            return
        assert_refused(self.registry, case.architecture, cell.feature, folder)
        assert_because_occurs(case.architecture, cell)
        if is_familys_no(cell):
            assert cell.feature in PROBES, f"the No to {cell.feature} can be tried, and there is no probe for it"
            PROBES[cell.feature](case)


def prove_family(name: str, folder: Path, registry: Registry | None = None) -> list[str]:
    """Show every cell of a family on its tiny models; return the shown ones as "architecture feature".

    folder: an empty one for models and reference values, such as pytest's `tmp_path`.

    Raises:
        AssertionError: with every cell that is not true.
    """
    suite = Suite.of(name, folder / "cases", registry)
    shown, failed = [], []
    for cell in suite.cells:
        try:
            suite.prove(cell, folder / "refusals")
            shown.append(f"{cell.architecture} {cell.feature}")
        except Exception as fault:  # one cell that crashes must not hide what is wrong with the others
            failed.append(f"{cell.architecture} {cell.feature} ({cell.word}): {type(fault).__name__}: {fault}")
    assert not failed, "\n".join(failed)
    return shown


def assert_equals_reference(case: Case, found: Mapping[str, Tensor], allowed: float = ABSOLUTE) -> None:
    """Compare what Halo computed with what transformers alone did, everything by name.

    Raises:
        AssertionError: naming what differs.
    """
    expected = {key: tensor for key, tensor in case.reference.items() if key not in ("logits", "learning_rate")}
    assert_same(f"{case.architecture.name}, against transformers alone", found, expected, allowed)


def assert_because_occurs(architecture: Architecture, cell: Cell) -> None:
    """Check that the classes a No points at are there to point at, in the tiny model.

    Raises:
        AssertionError: naming those that are not.
    """
    because = cell.decisive.because
    if not because:
        return
    model = build_meta(architecture, tiny_config(architecture).to_dict(), dtype=torch.float32)
    classes = {type(module).__name__ for module in model.modules()}
    missing = [name for name in because if name not in classes]
    assert not missing, f"{architecture.name} {cell.feature}: no {', '.join(missing)} in the tiny model"


def unproven(registry: Registry) -> list[str]:
    """Return what stands between this registry and a matrix that cannot lie: cells without proof, probe or ask."""
    lines = [
        f"{cell.architecture} {cell.feature} is printed Supported, and PROOFS does not show it"
        for cell in supported_cells(registry) if cell.feature not in PROOFS
    ]
    lines += [
        f"{cell.architecture} {cell.feature}: the family's No can be tried, and PROBES does not"
        for cell in unsupported_cells(registry) if is_familys_no(cell) and cell.feature not in PROBES
    ]
    lines += [
        f"{cell.architecture} {cell.feature} is printed Unsupported, and ASKS does not say how one asks for it"
        for cell in unsupported_cells(registry) if cell.feature not in ASKS
    ]
    return lines
