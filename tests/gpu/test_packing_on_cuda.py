"""Several documents in a row on a CUDA device: the fast kernels keep them apart, and every gradient is right.

What is right is said by the references in fp32, and by transformers' eager attention in fp32 on each document alone.
Needs no data and no weights; `-k kernel` are the kernels alone, `-k model` whole tiny models.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_core import registry as facts
from halo_core import support
from halo_core.bench import random_weights
from halo_core.data.batch import Batch
from halo_core.data.collate import collate
from halo_core.data.rows import Row
from halo_core.data.units import Pack
from halo_core.kernels import documents as borders
from halo_core.kernels.attention import choice as attention_choice
from halo_core.kernels.attention import flash, reference, wide
from halo_core.kernels.delta_rule import choice as delta_rule_choice
from halo_core.kernels.delta_rule import chunked
from halo_core.kernels.delta_rule import reference as delta_rule_reference
from halo_core.kernels.documents import Documents
from halo_core.kernels.short_conv import choice as short_conv_choice
from halo_core.kernels.short_conv import reference as short_conv_reference
from halo_core.models.build import build_meta
from halo_core.models.hidden import last_hidden
from halo_core.models.tiny import tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")
ARCHITECTURES = facts.load().architectures()
HAS_FLA = torch.cuda.is_available() and importlib.util.find_spec("fla") is not None
WITHOUT_FLA = delta_rule_choice.fused_obstacle(dtype=torch.bfloat16, device=DEVICE) if HAS_FLA else "no such package"
BUILT = all(support.mechanism(name).built for name in ("packing", "padding_free", "attention:flash_attention_2"))

BF16 = 1e-2
"""Relative norm: a bf16 number is off by up to 2 ** -9, and what is computed from several by a few times that."""
OF_SINKS = 2e-2
"""Relative norm, for a sink's gradient: a sum over all tokens whose terms have both signs. 0.0104 on an H200."""
FP32 = 1e-5
"""Relative norm: the same sums in another order."""
WORSE = 3.0
"""How many times further from fp32 the fast kernels may be than transformers' eager attention is in bf16."""
LEAST = 1e-2
"""Relative norm that counts as equal in bf16 whatever eager does."""
FLOOR = 1e-3
"""Gradients this small beside all of them together are compared as parts of it: some are nothing but rounding."""

LAYOUTS = {
    "one": [[1] * 300],
    "many": [[1] * 5 + [2] + [3] * 130 + [4] * 64 + [0] * 57, [0] * 3 + [1] * 254],
    "single tokens": [list(range(1, 258))],
}


@pytest.fixture(autouse=True)
def exact_fp32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def off(found: Tensor, right: Tensor) -> float:
    """Return how far a tensor is from the right one, as a share of its norm."""
    found, right = found.detach().double(), right.detach().double()
    return float((found - right).norm() / right.norm().clamp_min(1e-30))


def documents_of(layout: str) -> Documents:
    return borders.find(torch.tensor(LAYOUTS[layout])).to(DEVICE)


def with_gradients(
    run: Callable[..., Tensor], given: Mapping[str, Tensor | None], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the result of `run(**given)` and the gradient of each tensor given, computed in `dtype`."""
    tensors = {
        name: None if tensor is None else tensor.to(DEVICE, dtype).requires_grad_() for name, tensor in given.items()
    }
    out = run(**tensors)
    torch.manual_seed(7)
    upstream = torch.randn(out.shape, dtype=torch.float32).to(out)
    wanted = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return {"out": out, **dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), upstream), strict=True))}


def distances(found: Mapping[str, Tensor], right: Mapping[str, Tensor], floor: float = FLOOR) -> dict[str, float]:
    """Return how far each tensor is off, as a share of its norm, or of all norms times `floor` where that is more."""
    assert found.keys() == right.keys()
    whole = torch.stack([tensor.double().norm() for tensor in right.values()]).norm()
    result = {}
    for name, tensor in right.items():
        size = torch.maximum(tensor.double().norm(), floor * whole)
        result[name] = float(((found[name].double() - tensor.double()).norm() / size).detach())
    return result


def assert_alike(
    found: Mapping[str, Tensor], right: Mapping[str, Tensor], tolerance: float, floor: float = FLOOR
) -> None:
    measured = distances(found, right, floor)
    print({name: f"{distance:.1e}" for name, distance in measured.items()})
    assert all(torch.isfinite(tensor).all() for tensor in found.values())
    assert {name: distance for name, distance in measured.items() if not distance <= tolerance} == {}


def drawn(*shape: int) -> Tensor:
    """Return numbers that bf16 holds exactly, so that every dtype starts from the same ones."""
    return torch.randn(shape).bfloat16().float()


# ---- kernels


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 16], ids=["full", "window"])
@pytest.mark.parametrize(
    ("heads", "key_heads", "size"), [(8, 2, 16), (4, 4, 64), (8, 1, 128), (4, 2, 256), (2, 1, 512)]
)
def test_kernel_of_attention(
    layout: str, has_sinks: bool, window: int | None, heads: int, key_heads: int, size: int
) -> None:
    documents = documents_of(layout)
    tokens = documents.numbers.numel()
    torch.manual_seed(0)
    given = {
        "query": drawn(tokens, heads, size), "key": drawn(tokens, key_heads, size),
        "value": drawn(tokens, key_heads, size), "sinks": drawn(heads) if has_sinks else None,
    }  # fmt: skip
    settings: dict[str, Any] = {"documents": documents, "scale": 0.9 * size**-0.5, "window": window}
    kernel = attention_choice.kernel("flash", size)
    assert kernel is (wide.attend if size > 256 else flash.attend)
    right = with_gradients(partial(reference.attend, **settings), given, torch.float32)
    found = with_gradients(partial(kernel, **settings), given, torch.bfloat16)
    assert {name for name, distance in distances(found, right).items()
            if not distance <= (OF_SINKS if name == "sinks" else BF16)} == set()


def test_kernel_of_attention_would_be_caught_with_a_border_missed() -> None:
    documents = documents_of("many")
    joined = borders.find((documents.numbers * 0 + 1).cpu()).to(DEVICE)
    torch.manual_seed(0)
    tokens = documents.numbers.numel()
    given = {name: drawn(tokens, 2, 64) for name in ("query", "key", "value")}
    right = with_gradients(partial(reference.attend, documents=documents, scale=0.1), given, torch.float32)
    found = with_gradients(partial(flash.attend, documents=joined, scale=0.1), given, torch.bfloat16)
    assert min(off(found[name], right[name]) for name in right) > 10 * BF16


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("channels", "taps", "has_bias", "activation"),
    [(2048, 3, False, None), (67, 3, True, None), (130, 4, False, "silu"), (8, 4, True, "silu")],
)
def test_kernel_of_short_convolution(
    layout: str, dtype: torch.dtype, channels: int, taps: int, has_bias: bool, activation: str | None
) -> None:
    documents = documents_of(layout)
    rows, width = documents.numbers.shape
    torch.manual_seed(0)
    given = {
        "inputs": drawn(rows, width, channels).transpose(1, 2), "weight": drawn(channels, taps),
        "bias": drawn(channels) if has_bias else None,
    }  # fmt: skip
    settings = {"activation": activation, "documents": documents}
    right = with_gradients(partial(short_conv_reference.short_conv, **settings), given, torch.float32)
    fused = partial(short_conv_choice.kernel("fused"), **settings)
    found = with_gradients(fused, given, dtype)
    assert_alike(found, right, FP32 if dtype == torch.float32 else BF16)
    again = with_gradients(fused, given, dtype)
    assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.parametrize("name", ["chunked", pytest.param("fused", marks=pytest.mark.skipif(
    not HAS_FLA, reason="flash-linear-attention is not installed"))])  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 2, 32), (2, 2, 128)])
def test_kernel_of_delta_rule(name: str, layout: str, heads: int, key_heads: int, size: int) -> None:
    documents = documents_of(layout)
    rows, width = documents.numbers.shape
    torch.manual_seed(0)
    given = {
        "query": drawn(rows, width, key_heads, size), "key": drawn(rows, width, key_heads, size),
        "value": drawn(rows, width, heads, size), "beta": drawn(rows, width, heads).sigmoid().bfloat16().float(),
        "decay": (-drawn(rows, width, heads).exp() * 0.1).bfloat16().float(),
    }  # fmt: skip
    right = with_gradients(partial(delta_rule_reference.delta_rule, documents=documents), given, torch.float32)
    kernel = delta_rule_choice.kernel(name)
    if name == "chunked":
        assert_alike(with_gradients(partial(kernel, documents=documents), given, torch.float32), right, 10 * FP32)
        return

    def in_bf16(decay: Tensor, **others: Tensor) -> Tensor:
        return kernel(decay=decay.float(), documents=documents, **others)  # as models hand it over: always fp32

    # The gradient of decay is a difference of sums that cancel: of single tokens nothing is left of it but rounding.
    if WITHOUT_FLA is None:
        assert_alike(with_gradients(in_bf16, given, torch.bfloat16), right, 3 * BF16, floor=0.2)
        return
    with torch.no_grad():
        out = in_bf16(**{name: tensor.to(DEVICE, torch.bfloat16) for name, tensor in given.items()})
    assert_alike({"out": out}, {"out": right["out"]}, BF16)
    pytest.skip(f"only the result was compared, no gradient: {WITHOUT_FLA}")


# ---- models


def worst(measured: Mapping[str, float]) -> str:
    distance, name = max((distance, name) for name, distance in measured.items())
    return f"{distance:.1e} {name}"


def well_conditioned(architecture: Any) -> dict[str, Any]:
    """Return the tiny config.json with every expert chosen by every token, so that no rounding changes who is chosen.

    Norms also leave small numbers small: what a document's first token reads of a delta rule's state is one product
    near zero, of which a norm with its usual epsilon keeps the sign alone, and makes the gradient enormous.
    """
    tiny, names = dict(architecture.spec.tiny), architecture.spec.names
    for name in names.experts_per_token[:1]:
        tiny[name] = tiny[names.num_experts[0]]
    config: dict[str, Any] = tiny_config(replace(architecture, spec=replace(architecture.spec, tiny=tiny))).to_dict()
    if "rms_norm_eps" in config:
        config["rms_norm_eps"] = 1e-2
    return config


def built(architecture: Any, config: dict[str, Any], dtype: torch.dtype, **kernels: Any) -> Any:
    """Return a tiny model; the same weights in every dtype, all of them numbers that bf16 holds."""
    model = build_meta(architecture, config, dtype=dtype, **kernels)
    random_weights.fill(model, DEVICE, seed=3)
    with torch.no_grad():
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            # Matrices and embeddings are wide, the taps of a convolution few. What has one axis is a scale or a bias:
            # it stays near what it begins with where that is the same everywhere.
            mean, spread = 0.0, 0.5 if parameter.shape[-1] <= 4 else 0.08
            if parameter.ndim == 1:
                first = float(parameter[0])
                mean, spread = first if bool((parameter == first).all()) else 1.0, 0.1
            if name.endswith("A_log"):
                mean = -3.0  # a state that remembers
            parameter.copy_((mean + spread * torch.randn(parameter.shape)).bfloat16())
    return model


def fast_kernels(architecture: Any) -> dict[str, Any]:
    """Return the kernels that a bf16 run on this device resolves to."""
    kinds = {kind for spec in architecture.mixers for kind in spec.functions.values()}
    delta_rule = delta_rule_choice.kernel("fused" if WITHOUT_FLA is None else "chunked")
    every = {"short_conv": short_conv_choice.kernel("fused"), "delta_rule": delta_rule}
    return {
        "attention_kernel": partial(attention_choice.kernel, "flash"),
        "mixer_kernels": {kind: every[kind] for kind in kinds} or None,
    }


def some_rows(seed: int = 0, lengths: Sequence[int] = (37, 1, 90, 24, 7)) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Row(
            row_id=number, supervised=[True] * length,
            input_ids=torch.randint(5, 2000, (length,), generator=generator).tolist(),
        )
        for number, length in enumerate(lengths)
    ]  # fmt: skip


def batches(rows: list[Row], layout: str) -> list[Batch]:
    if layout == "alone":
        return [collate([row], 1) for row in rows]
    if layout == "padded":
        return [collate(rows, 1)]
    if layout == "packed":
        return [collate([Pack(rows=tuple(rows[:3])), Pack(rows=tuple(rows[3:]))], 1)]
    return [collate(rows, 1, flatten=True)]


def learnt(model: Any, given: Sequence[Batch]) -> dict[str, Tensor]:
    """Return the hidden states of real tokens in order, and every gradient of a loss that reads each of them."""
    model.zero_grad(set_to_none=True)
    hidden = []
    for batch in given:
        placed = batch.to(DEVICE)
        states = last_hidden(model, placed)
        assert torch.isfinite(states).all(), "padding is finite too"
        hidden.append(states[placed.segment_ids > 0].float())
    whole = torch.cat(hidden)
    torch.manual_seed(11)
    (whole * torch.randn(whole.shape).to(whole)).sum().backward()
    gradients = {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden": whole.detach(), **gradients}


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_model_is_as_near_to_fp32_as_eager_attention_on_each_document_alone(architecture: Any) -> None:
    config, rows = well_conditioned(architecture), some_rows()
    right = learnt(built(architecture, config, torch.float32), batches(rows, "alone"))
    by_eager = distances(learnt(built(architecture, config, torch.bfloat16), batches(rows, "alone")), right)
    model = built(architecture, config, torch.bfloat16, **fast_kernels(architecture))
    wrong = {}
    for layout in ("alone", "padded", "packed", "flat"):
        found = distances(learnt(model, batches(rows, layout)), right)
        print(f"{architecture.name} {layout}: hidden {found['hidden']:.1e} (eager {by_eager['hidden']:.1e}), "
              f"worst {worst(found)} (eager {worst(by_eager)})")  # fmt: skip
        wrong |= {
            f"{layout} {name}": f"{distance:.1e}, eager {by_eager[name]:.1e}"
            for name, distance in found.items() if not distance <= max(WORSE * by_eager[name], LEAST)
        }  # fmt: skip
    assert wrong == {}


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_model_of_fp32_with_flash_attention_inside_is_near_to_eager(architecture: Any) -> None:
    """All but attention is fp32 here, so that what attention does wrong is not lost in other rounding.

    What rounding to bf16 before and after attention costs is told by the reference kernel between the same roundings.
    """

    def in_bf16(name: str, size: int) -> Any:
        kernel = attention_choice.kernel(name, size)

        def attend(query: Tensor, key: Tensor, value: Tensor, documents: Documents, **named: Any) -> Tensor:
            return kernel(query.bfloat16(), key.bfloat16(), value.bfloat16(), documents, **named).float()

        return attend

    config, rows = well_conditioned(architecture), some_rows()
    right = learnt(built(architecture, config, torch.float32), batches(rows, "alone"))
    kinds = {kind for spec in architecture.mixers for kind in spec.functions.values()}
    every = {"short_conv": short_conv_choice.kernel("fused"), "delta_rule": chunked.delta_rule}
    by_reference, model = (
        built(
            architecture, config, torch.float32, attention_kernel=partial(in_bf16, name),
            mixer_kernels={kind: every[kind] for kind in kinds} or None,
        )
        for name in ("reference", "flash")
    )  # fmt: skip
    rounding = distances(learnt(by_reference, batches(rows, "packed")), right)
    wrong = {}
    for layout in ("padded", "packed", "flat"):
        found = distances(learnt(model, batches(rows, layout)), right)
        print(f"{architecture.name} {layout}: worst {worst(found)} (rounding alone {worst(rounding)})")
        wrong |= {
            f"{layout} {name}": f"{distance:.1e}, rounding alone {rounding[name]:.1e}"
            for name, distance in found.items() if not distance <= max(WORSE * rounding[name], LEAST)
        }  # fmt: skip
    assert wrong == {}


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_model_reads_neither_other_documents_nor_later_tokens(architecture: Any) -> None:
    config, rows = well_conditioned(architecture), some_rows()
    model = built(architecture, config, torch.bfloat16, **fast_kernels(architecture))

    def states(changed: list[Row]) -> Tensor:
        (batch,) = batches(changed, "flat")
        with torch.no_grad():
            return last_hidden(model, batch.to(DEVICE))[0].float()

    before = states(rows)
    first = len(rows[0].input_ids)  # the second row is one token, the third follows
    last = first + 1 + len(rows[2].input_ids)
    other = some_rows(seed=1)
    after = states([other[0], rows[1], rows[2], other[3], rows[4]])
    assert off(after[first:last], before[first:last]) <= FP32, "rows around it changed, it did not"
    assert off(after[:first], before[:first]) > 0.1, "the changed row changed"
    ids = list(rows[2].input_ids)
    ids[60] = 5 + (ids[60] - 4) % 1990
    after = states([rows[0], rows[1], replace(rows[2], input_ids=ids), *rows[3:]])
    begin = first + 1
    assert off(after[: begin + 60], before[: begin + 60]) <= FP32, "a later token was changed"
    assert off(after[begin + 60 : last], before[begin + 60 : last]) > BF16, "from the changed token on"


@pytest.mark.skipif(not BUILT, reason="this version does not offer packing and flash attention to runs yet")
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
@pytest.mark.parametrize("layout", [{"packing": True}, {"padding_free": True}], ids=["packing", "padding_free"])
def test_run_with_flash_attention_trains_as_one_with_eager(
    architecture: Any, layout: dict[str, bool], tmp_path: Path
) -> None:
    import json

    import halo_core
    from halo_core.models.tiny import write_tiny

    write_tiny(architecture, tmp_path / "model")
    rows = [
        {"prompt": f"say {number}", "completion": " ".join(["yes"] * (1 + number % 9))} for number in range(24)
    ]  # fmt: skip

    def losses(name: str, **settings: Any) -> list[float]:
        config = {
            "model_name_or_path": str(tmp_path / "model"), "output_dir": str(tmp_path / name), "max_steps": 3,
            "per_device_train_batch_size": 2, "max_length": 64, "learning_rate": 1e-3, "optim": "sgd",
            "dtype": "bfloat16", "save_strategy": "no", **layout, **settings,
        }  # fmt: skip
        result = halo_core.train(config, rows=rows)
        return [json.loads(line)["loss"] for line in (result.output_dir / "metrics.jsonl").read_text().splitlines()]

    flash_losses = losses("flash", attn_implementation="flash_attention_2")
    assert flash_losses == pytest.approx(losses("eager", attn_implementation="eager"), rel=BF16)
