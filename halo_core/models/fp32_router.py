"""Lets a model's routers keep fp32 weights and choose experts in fp32, on the instances of this one model.

Not for how a router scores: its own code runs, on fp32 input. A gate of a shared expert chooses nobody and stays as it
is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from halo_core.models import sockets
from halo_core.registry import Architecture

WIDE = torch.float32


def widen_routers(model: nn.Module, architecture: Architecture) -> None:
    """Give every router fp32 parameters and fp32 input, so that its whole forward pass is fp32.

    Expert ids, routing weights and logits then come from fp32 products, and the weights travel to the experts in fp32.
    Names stay. model: on the meta device; parameters are replaced. Under one dtype for all, fp32, nothing changes.

    Raises:
        RuntimeError: a layer with experts has no router where the facts say; in a forward pass: a router that hands on
            something narrower than fp32 all the same.
    """
    for path, router in routers(model, architecture):
        for owner in router.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                setattr(owner, name, widened(parameter))
            for name, buffer in list(owner.named_buffers(recurse=False)):
                if buffer.is_floating_point():
                    setattr(owner, name, buffer.to(WIDE))
        router.register_forward_pre_hook(_widen_input, with_kwargs=True)
        router.register_forward_hook(_check(path))


def routers(model: nn.Module, architecture: Architecture) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path in the model, router) of every layer that has routed experts.

    Raises:
        RuntimeError: a layer has experts and not the router that the facts name.
    """
    block = architecture.moe_block
    if block is None:
        return
    modules = dict(model.named_modules())
    for experts, _ in sockets.experts_modules(model, architecture):
        path = f"{experts.removesuffix(block.experts)}{block.router}"
        router = modules.get(path)
        if type(router).__name__ != block.router_spec.router_class:
            raise RuntimeError(f"{path} is no {block.router_spec.router_class}, which the facts of a MoE block name")
        assert router is not None
        yield path, router


def widened(parameter: nn.Parameter) -> nn.Parameter:
    """Return an empty fp32 parameter of the same shape, device and need of a gradient."""
    return nn.Parameter(torch.empty_like(parameter, dtype=WIDE), requires_grad=parameter.requires_grad)


def _widen_input(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    return tuple(_wide(value) for value in arguments), {name: _wide(value) for name, value in named.items()}


def _wide(value: Any) -> Any:
    return value.to(WIDE) if isinstance(value, Tensor) and value.is_floating_point() else value


def _check(path: str) -> Any:
    def check(module: nn.Module, arguments: Any, output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        narrow = [p.dtype for p in parts if isinstance(p, Tensor) and p.is_floating_point() and p.dtype != WIDE]
        if narrow:
            raise RuntimeError(f"{path} hands on {narrow[0]} under fp32_router: true; its code rounds by itself")

    return check
