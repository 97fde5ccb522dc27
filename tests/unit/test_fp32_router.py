"""Routers in fp32 inside a bf16 model: what is widened, what stays, what is refused, what is exported and balanced."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from halo_core import registry
from halo_core.checkpoint.export import export
from halo_core.kernels.experts.reference import reference
from halo_core.models import sockets
from halo_core.models.build import build_meta
from halo_core.models.fp32_router import routers, widen_routers
from halo_core.models.load import load_weights
from halo_core.models.tiny import tiny_config

ALL = sorted(architecture.name for architecture in registry.load().architectures())
MOE = sorted(architecture.name for architecture in registry.load().architectures() if architecture.spec.is_moe)
ARCHITECTURES = {architecture.name: architecture for architecture in registry.load().architectures()}
FACTS = {"gpt_oss": {"weight", "bias"}, "gemma4_moe": {"scale", "per_expert_scale", "proj.weight"}}


def meta(name: str, **keys: Any) -> Any:
    architecture = ARCHITECTURES[name]
    return build_meta(architecture, tiny_config(architecture).to_dict(), dtype=torch.bfloat16, **keys)


@pytest.mark.parametrize("name", MOE)
def test_exactly_the_routers_are_fp32_under_their_old_names(name: str) -> None:
    plain, wide = meta(name), meta(name, fp32_router=True)
    assert list(plain.state_dict()) == list(wide.state_dict())
    found = {path: {leaf for leaf, _ in router.named_parameters()} for path, router in
             routers(wide, ARCHITECTURES[name])}
    assert set(map(frozenset, found.values())) == {frozenset(FACTS.get(name, {"weight"}))}
    expected = {f"{path}.{leaf}" for path, leaves in found.items() for leaf in leaves}
    assert {key for key, parameter in wide.named_parameters() if parameter.dtype == torch.float32} == expected
    layers = [m for m in wide.modules() if type(m).__name__ == ARCHITECTURES[name].spec.decoder_layer]
    assert len(found) == sum(any(hasattr(m, "gate_up_proj") for m in layer.modules()) for layer in layers)
    changed = {key for key, value in wide.named_buffers() if value.dtype != dict(plain.named_buffers())[key].dtype}
    assert not changed, "a selection bias was fp32 before"


@pytest.mark.parametrize("name", sorted(set(ALL) - set(MOE)))
def test_a_dense_model_has_nothing_to_widen(name: str) -> None:
    assert not [key for key, p in meta(name, fp32_router=True).named_parameters() if p.dtype == torch.float32]


def test_facts_that_name_no_router_are_an_error() -> None:
    architecture = ARCHITECTURES["qwen3_moe"]
    assert architecture.moe_block is not None
    for block in (
        replace(architecture.moe_block, router="mlp.router"),
        replace(architecture.moe_block, router="mlp.experts"),
    ):
        with pytest.raises(RuntimeError, match=r"layers\.1\.mlp\.\w+ is no Qwen3MoeTopKRouter"):
            widen_routers(meta("qwen3_moe"), replace(architecture, moe_block=block))


def test_a_router_that_rounds_by_itself_is_an_error(sources: Any) -> None:
    architecture, folder = sources.architecture("qwen3_moe"), sources.folder("qwen3_moe")
    config = json.loads((folder / "config.json").read_text())
    model = build_meta(architecture, config, dtype=torch.bfloat16, experts=reference, fp32_router=True)
    load_weights(model, folder, architecture)
    model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
    path, router = next(iter(routers(model, architecture)))
    right = router.forward
    router.forward = lambda hidden: tuple(
        p.bfloat16() if p.is_floating_point() else p for p in right(hidden))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=rf"{path} hands on torch.bfloat16 under fp32_router: true"):
        model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)


def test_nothing_but_this_models_routers_is_touched(sources: Any) -> None:
    architecture, folder = sources.architecture("qwen3_moe"), sources.folder("qwen3_moe")
    config = json.loads((folder / "config.json").read_text())
    before = nn.Module.__call__
    wide = build_meta(architecture, config, dtype=torch.bfloat16, experts=reference, fp32_router=True)
    plain = build_meta(architecture, config, dtype=torch.bfloat16, experts=reference)
    assert nn.Module.__call__ is before
    (_, one), (_, other) = next(iter(routers(wide, architecture))), next(iter(routers(plain, architecture)))
    assert type(one) is type(other) and one.forward.__func__ is other.forward.__func__
    load_weights(plain, folder, architecture)
    seen: list[torch.dtype] = []
    other.register_forward_hook(lambda module, arguments, output: seen.append(output[1].dtype))
    plain(input_ids=torch.tensor([[3, 4]]), use_cache=False)
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize(("name", "form", "dtype"), [
    ("gpt_oss", "plain", torch.float32), ("lfm2_moe", "plain", torch.float32),
    ("gemma4_moe", "wrapped_bf16", torch.bfloat16), ("qwen3_5_moe", "wrapped_bf16", torch.bfloat16),
])
def test_the_export_is_in_the_sources_dtype(
    name: str, form: str, dtype: torch.dtype, sources: Any, tmp_path: Path
) -> None:
    architecture, folder = sources.architecture(name), sources.folder(name, form)
    config = json.loads((folder / "config.json").read_text())
    model = build_meta(architecture, config, dtype=torch.bfloat16, experts=reference, fp32_router=True)
    load_weights(model, folder, architecture)
    moved = {}
    with torch.no_grad():
        for path, router in routers(model, architecture):
            for leaf, parameter in router.named_parameters():
                parameter.add_(1e-5)
                moved[f"{path}.{leaf}"] = parameter.detach().clone()
    export(model, architecture, folder, tmp_path / "out")
    written = {k: t for file in (tmp_path / "out").glob("*.safetensors") for k, t in load_file(file).items()}
    for key, value in moved.items():
        (stored,) = [tensor for name, tensor in written.items() if name.endswith(key.removeprefix("model."))]
        assert stored.dtype == dtype and torch.equal(stored, value.to(dtype)), key
        assert not torch.equal(value, value.bfloat16().float()), "a master that bf16 could not hold"


def test_balancing_counts_what_the_fp32_router_chose(sources: Any) -> None:
    architecture, folder = sources.architecture("lfm2_moe"), sources.folder("lfm2_moe")
    config = json.loads((folder / "config.json").read_text())
    model = build_meta(architecture, config, dtype=torch.bfloat16, experts=reference, fp32_router=True)
    load_weights(model, folder, architecture)
    heard: dict[str, torch.Tensor] = {}
    for path, socket in sockets.of(model).by_path.items():
        socket.listener = lambda ids, path=path: heard.update({path: ids})
    chosen: dict[str, torch.Tensor] = {}
    for path, router in routers(model, architecture):
        place = f"{path.removesuffix('gate')}experts"
        router.register_forward_hook(lambda m, a, output, place=place: chosen.update({place: output[2]}))
    model(input_ids=torch.randint(0, 250, (2, 12)), use_cache=False)
    assert heard.keys() == chosen.keys() and all(torch.equal(heard[path], chosen[path]) for path in heard)
