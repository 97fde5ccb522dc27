"""The conformance kit can fail: each planted fault turns the check red that is there for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_core.balancing.bias_update import BiasUpdate
from halo_core.errors import Refused
from halo_core.family import HeadSpec
from halo_core.kernels.experts.reference import reference
from halo_core.kernels.experts.weights import ExpertsKernel, ExpertWeights
from halo_core.methods.sft import Sft
from halo_core.registry import Registry
from halo_core.testing import compare, conformance, product
from halo_core.testing.cases import REFERENCE, Case
from halo_core.testing.cells import assert_refused, unsupported_cells
from halo_core.testing.conformance import (
    PLAIN,
    PROBES,
    PROOFS,
    Suite,
    assert_because_occurs,
    assert_equals_reference,
    prove_family,
    unproven,
)
from halo_core.testing.product import checked, observe
from halo_core.trainer import balance
from halo_core.verdict import Supported, Unsupported


def with_answer(joined: Registry, architecture: str, feature: str, verdict: Any) -> Registry:
    """Return the registry with one answer changed."""
    families = dict(joined.families)
    for name, family in families.items():
        changed = []
        for found in family.architectures:
            if found.name == architecture:
                answer, plugin = found.answers[feature]
                answers = {**found.answers, feature: (replace(answer, verdict=verdict), plugin)}
                found = replace(found, answers=answers)
            changed.append(found)
        families[name] = replace(family, architectures=tuple(changed))
    return replace(joined, families=families)


def scaled(weights: ExpertWeights, hidden: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return 1.001 * reference(weights, hidden, ids, routing)


def without_bias(weights: ExpertWeights, hidden: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    assert weights.down_bias is not None
    return reference(replace(weights, down_bias=torch.zeros_like(weights.down_bias)), hidden, ids, routing)


def other_gate_order(weights: ExpertWeights, hidden: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    """Read gate and up as interleaved where they lie one after the other, and the other way round."""

    def activation(inner: Tensor) -> Tensor:
        if weights.is_concatenated:
            return weights.activation(torch.cat((inner[:, ::2], inner[:, 1::2]), dim=-1))
        return weights.activation(torch.stack(inner.chunk(2, dim=-1), dim=-1).flatten(-2))

    return reference(replace(weights, activation=activation), hidden, ids, routing)


def other_expert(weights: ExpertWeights, hidden: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return reference(weights, hidden, (ids + 1) % weights.num_experts, routing)


def router_cut_off(weights: ExpertWeights, hidden: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    return reference(weights, hidden, ids, routing.detach())


def gradient_doubled(weights: ExpertWeights, hidden: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
    down = 2 * weights.down - weights.down.detach()
    return reference(replace(weights, down=down), hidden, ids, routing)


@pytest.mark.parametrize(
    ("name", "experts", "said"),
    [
        ("gpt_oss", scaled, "experts."), ("lfm2_moe", scaled, "experts."), ("gpt_oss", without_bias, "experts."),
        ("gpt_oss", other_gate_order, "experts."), ("qwen3_moe", other_gate_order, "experts."),
        ("qwen3_5_moe", other_expert, "experts."), ("gemma4_moe", router_cut_off, "router"),
        ("lfm2_moe", gradient_doubled, "down_proj"),
    ],
)
def test_wrong_experts_kernel_is_seen(name: str, experts: ExpertsKernel, said: str, suite: Suite) -> None:
    case = suite.cases[name]
    found = observe(checked(suite.registry, case, PLAIN), case, experts)
    with pytest.raises(AssertionError, match=said):
        assert_equals_reference(case, found)


def test_right_experts_kernel_put_in_by_hand_passes(suite: Suite) -> None:
    case = suite.cases["gpt_oss"]
    assert_equals_reference(case, observe(checked(suite.registry, case, PLAIN), case, reference))


def test_forgotten_softcap_is_seen(suite: Suite) -> None:
    case = suite.cases["gemma4_moe"]
    spec = replace(case.architecture.spec, head=HeadSpec(softcap=None))
    with pytest.raises(AssertionError, match="gradient"):
        PROOFS["sft"](suite.registry, replace(case, architecture=replace(case.architecture, spec=spec)))


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("gpt_oss", "sliding_window", 64, "gradient"),
        ("lfm2_moe", "rope_theta", 1e4, "gradient"),
        ("gemma4", "num_kv_shared_layers", 1, "k_proj"),
    ],
)
def test_other_value_in_the_configuration_is_seen(name: str, key: str, value: object, said: str, suite: Suite) -> None:
    case = suite.cases[name]
    ready = checked(suite.registry, case, PLAIN)
    config = dict(ready.model_config)
    if key == "rope_theta":
        config["rope_parameters"] = {**config["rope_parameters"], key: value}
    else:
        assert config[key] != value
        config[key] = value
    with pytest.raises((AssertionError, Refused), match=said):
        assert_equals_reference(case, observe(replace(ready, model_config=config), case))


def test_mean_of_means_over_micro_batches_is_seen(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    class MeanOfMeans(Sft):
        """Divides each micro-batch by its own tokens, then by the number of micro-batches."""

        def denominators(self, batch: Any) -> dict[str, float]:
            return dict.fromkeys(super().denominators(batch), 1.0)

        def sums(self, batch: Any, head: Any) -> dict[str, Tensor]:
            return {name: total / batch.weights.sum() for name, total in super().sums(batch, head).items()}

    monkeypatch.setattr(product, "Sft", MeanOfMeans)
    case = suite.cases["lfm2"]
    with pytest.raises(AssertionError) as failure:
        PROOFS["sft"](suite.registry, case)
    assert "loss.0" not in str(failure.value)  # one micro-batch: the same
    assert "weight." in str(failure.value)


def test_recomputation_that_does_not_happen_is_seen(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "enable_recompute", lambda model, **_: None)
    with pytest.raises(AssertionError, match="nothing is recomputed"):
        PROOFS["gradient_checkpointing"](suite.registry, suite.cases["qwen3"])


def test_one_changed_bit_under_recomputation_is_seen(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(ready: Any, case: Case) -> dict[str, Tensor]:
        found = observe(ready, case)
        if "gradient_checkpointing" in ready.plan.features:
            found["loss.3"] = torch.nextafter(found["loss.3"], torch.tensor(torch.inf, dtype=found["loss.3"].dtype))
        return found

    monkeypatch.setattr(conformance, "observe", shifted)
    with pytest.raises(AssertionError, match=r"other bits.*loss\.3"):
        PROOFS["gradient_checkpointing"](suite.registry, suite.cases["qwen3"])


def test_selection_bias_that_moves_without_balancing_is_seen(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(ready: Any, case: Case) -> dict[str, Tensor]:
        found = observe(ready, case)
        name = next(name for name in found if name.endswith("expert_bias"))
        return {**found, name: found[name] + 1e-6}  # far below what comparing weights would see

    monkeypatch.setattr(conformance, "observe", moved)
    with pytest.raises(AssertionError, match="buffers moved"):
        PROOFS["balancing:none"](suite.registry, suite.cases["lfm2_moe"])


@pytest.mark.parametrize("fault", ["padding counts", "evaluations count", "towards more load", "recomputation counts"])
def test_wrong_bias_update_is_seen(fault: str, suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    right_counting, right_step = BiasUpdate.counting, BiasUpdate.step
    if fault == "padding counts":
        monkeypatch.setattr(BiasUpdate, "counting", lambda self, real: right_counting(self, torch.ones_like(real)))
    elif fault == "evaluations count":
        monkeypatch.setattr(balance.torch, "is_grad_enabled", lambda: True)
    elif fault == "towards more load":

        def step(self: BiasUpdate) -> Tensor:
            self._rate = -abs(self._rate)
            return right_step(self)

        monkeypatch.setattr(BiasUpdate, "step", step)
    else:  # what was counted in the forward pass stays open for the backward pass

        @contextmanager
        def open_for_good(self: BiasUpdate, real: Tensor) -> Iterator[None]:
            self._real = real.reshape(-1).long()
            yield

        monkeypatch.setattr(BiasUpdate, "counting", open_for_good)
    # The mask of one batch does not fit the recomputation of another, which ends the attempt as well.
    with pytest.raises((AssertionError, RuntimeError), match=r"other biases than by hand|Expected index"):
        PROOFS["balancing:bias_update"](suite.registry, suite.cases["lfm2_moe"])


def test_loop_over_experts_in_place_of_the_grouped_kernel_is_seen(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halo_core.kernels.experts.choice.grouped_obstacle", lambda **sizes: "it is raining")
    with pytest.raises(AssertionError, match="it is raining"):
        PROOFS["grouped_gemm"](suite.registry, suite.cases["qwen3_moe"])


def test_run_that_is_let_through_is_seen(suite: Suite, tmp_path: Path) -> None:
    refused = suite.registry.family("gpt_oss")
    assert refused is not None
    lenient = with_answer(suite.registry, "gpt_oss", "attention:sdpa", Supported(proof="cpu"))
    with pytest.raises(AssertionError, match="the run would start"):
        assert_refused(lenient, refused.architecture(), "attention:sdpa", tmp_path)


def test_refusal_with_another_reason_than_the_matrix_is_seen(suite: Suite, tmp_path: Path) -> None:
    owner = suite.registry.family("gpt_oss")
    assert owner is not None
    other = with_answer(suite.registry, "gpt_oss", "attention:sdpa", Unsupported(reason="it is slow", instead="wait"))
    with pytest.raises(AssertionError, match="it is slow"):
        assert_refused(other, owner.architecture(), "attention:sdpa", tmp_path)


@pytest.mark.parametrize(("name", "feature", "said"), [("qwen3", "attention:sdpa", "it works"),
                                                       ("qwen3", "attention:eager", "it works"),
                                                       ("qwen3_moe", "grouped_gemm", "there are experts")])
def test_no_to_a_thing_that_works_is_seen(name: str, feature: str, said: str, suite: Suite, tmp_path: Path) -> None:
    timid = with_answer(suite.registry, name, feature, Unsupported(reason="better not", instead="something else"))
    cell = next(cell for cell in unsupported_cells(timid) if (cell.architecture, cell.feature) == (name, feature))
    with pytest.raises(AssertionError, match=said):
        PROBES[feature](suite.cases[name])
    assert cell.word == "Unsupported"


def test_reason_that_points_at_a_class_which_is_not_there_is_seen(suite: Suite) -> None:
    verdict = Unsupported(reason="it has a clock", instead="no clock", because=("Lfm2MoeShortConv", "Clockwork"))
    joined = with_answer(suite.registry, "lfm2_moe", "liger", verdict)
    architecture = next(a for a in joined.architectures() if a.name == "lfm2_moe")
    with pytest.raises(AssertionError, match="no Clockwork in the tiny model"):
        assert_because_occurs(architecture, architecture.cell("liger"))


def test_supported_cell_without_proof_is_seen(suite: Suite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(conformance, "PROOFS", {name: proof for name, proof in PROOFS.items() if name != "sft"})
    monkeypatch.setattr(conformance, "PROBES", {})
    lines = unproven(suite.registry)
    assert sum("sft is printed Supported" in line for line in lines) == len(suite.cases)
    assert "gpt_oss attention:sdpa: the family's No can be tried, and PROBES does not" in lines
    cell = next(cell for cell in suite.cells if cell.feature == "sft")
    with pytest.raises(AssertionError, match="has no proof"):
        suite.prove(cell, tmp_path)


def test_family_is_shown_in_one_call_and_every_false_cell_is_named(suite: Suite, session_folder: Path) -> None:
    # The session's cases lie where `prove_family` would make its own.
    folder = session_folder / "one_call"
    folder.mkdir(exist_ok=True)
    if not (folder / "cases").exists():
        (folder / "cases").symlink_to(session_folder / "conformance")
    shown = prove_family("gpt_oss", folder, suite.registry)
    assert "gpt_oss sft" in shown
    assert "gpt_oss attention:sdpa" in shown
    boastful = with_answer(suite.registry, "gpt_oss", "attention:sdpa", Supported(proof="cpu"))
    boastful = with_answer(boastful, "gpt_oss", "attention:eager", Unsupported(reason="no", instead="yes"))
    with pytest.raises(AssertionError) as failure:
        prove_family("gpt_oss", folder, boastful)
    assert "gpt_oss attention:sdpa (Supported)" in str(failure.value)
    assert "gpt_oss attention:eager (Unsupported): AssertionError: it works" in str(failure.value)
    with pytest.raises(AssertionError, match="no loaded plugin has family 'nobody'"):
        prove_family("nobody", folder, suite.registry)


def test_reference_process_notices_that_it_imported_halo(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("hf_reference_here", REFERENCE)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    (tmp_path / "jobs.json").write_text("[]")
    with pytest.raises(AssertionError, match="must not know Halo"):  # this process has it loaded
        script.main(tmp_path / "jobs.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t + 2e-5, "at most"),
        (lambda t: t * 1.01, "of its norm"),
        (lambda t: torch.zeros_like(t), "of its norm"),
        (lambda t: t * torch.nan, "at most"),
        (lambda t: t[:3], "shape"),
    ],
)
def test_tensors_that_differ_are_told_apart(change: Callable[[Tensor], Tensor], said: str) -> None:
    small = torch.linspace(1e-7, 4e-6, 8)
    assert compare.difference(small, small) is None
    text = compare.difference(change(small), small)
    assert text is not None
    assert said in text


def test_missing_and_surplus_names_are_told() -> None:
    one, two = {"a": torch.ones(1), "b": torch.ones(1)}, {"b": torch.ones(1), "c": torch.ones(1)}
    assert compare.differences(one, two) == ["c: missing", "a: not in the reference"]
