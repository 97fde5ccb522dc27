"""Puts the core's attention function into a model's attention modules, on the instances of this one model.

Not for choosing a kernel (`halo_core.runtime`) nor for layers that mix tokens otherwise. Nothing global changes but one
entry in transformers' register of attention functions, which acts only on modules that were attached. Its register of
mask functions gets none: transformers then makes no masks, where it would look for borders in positions and wait for
the device.
Shapes: B rows, S tokens of a row, T = B*S, h query heads, g key heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from halo_core.errors import Problem, Refused
from halo_core.kernels.attention import AttentionKernel
from halo_core.kernels.documents import KEYWORD, Documents

IMPLEMENTATION = "halo"
"""The name of the one attention function registered with transformers."""

ATTACHED = "halo_attention_sockets"
"""The attribute of an attached model that holds its `Sockets`."""

KernelOfHead = Callable[[int], AttentionKernel]
"""Head size in elements -> the kernel for it."""

_WITHOUT_MEANING = frozenset({"is_causal", "softcap", "output_attentions"})
"""Arguments that some models pass and that would change the result; they must hold nothing or what is done anyway."""


@dataclass(eq=False)
class Socket:
    """One layer's door to its attention kernel, which counts how often it was opened."""

    path: str
    kernel: AttentionKernel
    calls: int = 0


@dataclass(eq=False)
class Sockets:
    """What `attach` did to one model, so that it can be checked and undone."""

    by_path: dict[str, Socket]
    modules: dict[str, nn.Module]
    implementation_before: str


def attach(model: PreTrainedModel, *, decoder_layer: str, kernel_of_head: KernelOfHead) -> None:
    """Let every attention module below a decoder layer of `model` go through the core's function.

    decoder_layer: class name. Parameters, their names and the modules stay what they are.

    Raises:
        Refused: the model's attention is something that the kernels do not compute.
    """
    if hasattr(model, ATTACHED):
        raise ValueError("this model's attention is attached already; detach it first")
    found = dict(attention_modules(model, decoder_layer))
    _refuse_other_attention(found)
    _register()
    sockets = Sockets(by_path={}, modules=found, implementation_before=model.config._attn_implementation)
    for path, module in found.items():
        socket = Socket(path=path, kernel=kernel_of_head(module.head_dim))
        sockets.by_path[path] = module.halo_attention = socket
    model.set_attn_implementation(IMPLEMENTATION)
    setattr(model, ATTACHED, sockets)


def detach(model: PreTrainedModel) -> None:
    """Give `model` its attention back as transformers made it."""
    sockets = of(model)
    if sockets is None:
        raise ValueError("this model's attention is not attached")
    for module in sockets.modules.values():
        del module.halo_attention
    model.set_attn_implementation(sockets.implementation_before)
    delattr(model, ATTACHED)


def of(model: nn.Module) -> Sockets | None:
    """Return what was attached to a model, or None."""
    found: Sockets | None = vars(model).get(ATTACHED)
    return found


def check_called(model: PreTrainedModel) -> None:
    """Check, after the first forward, that every attention layer went through its socket; then start counting afresh.

    Raises:
        RuntimeError: naming the layers that did not.
    """
    sockets = of(model)
    assert sockets is not None, "this model's attention is not attached"
    missed = [socket.path for socket in sockets.by_path.values() if socket.calls < 1]
    for socket in sockets.by_path.values():
        socket.calls = 0
    if missed:
        raise RuntimeError(f"the attention of these layers did not go through the core's function: {', '.join(missed)}")


def attention_modules(model: nn.Module, decoder_layer: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path in the model, module) of what asks transformers for an attention function, layer by layer.

    Known by what that function reads of it; whatever calls the core's function without being found is an error there.
    """
    for path, layer in model.named_modules():
        if type(layer).__name__ == decoder_layer:
            for below, module in layer.named_modules():
                if all(hasattr(module, name) for name in ("is_causal", "scaling", "num_key_value_groups")):
                    yield f"{path}.{below}", module


def _halo(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention: the function that transformers calls for every attached module.

    query [B, h, S, d]; key and value [B, g, S, d]; s_aux: sinks [h]. Returns ([B, S, h, d], None). The mask is not
    read: causality, window and the documents' borders say all that it says.
    """
    socket: Socket | None = vars(module).get("halo_attention")
    if socket is None:
        raise RuntimeError(
            f"a {type(module).__name__} without the core's socket was asked to use it: it is none of the attention "
            "modules that were found, or its model shares a configuration object with an attached model"
        )
    documents: Documents | None = others.get(KEYWORD)
    if documents is None:
        raise RuntimeError(f"nobody said where the documents of this batch lie: the model wants {KEYWORD}")
    others = {name: others[name] for name in _WITHOUT_MEANING & others.keys()}
    if dropout or others.get("softcap") is not None or others.get("is_causal") is False:
        raise NotImplementedError(f"attention with dropout {dropout} and {others} is not what the kernels compute")
    rows, heads, tokens, size = query.shape
    socket.calls += 1
    read = socket.kernel(
        *(_flat(tensor) for tensor in (query, key, value)), documents,
        scale=size**-0.5 if scaling is None else scaling, window=sliding_window, sinks=s_aux,
    )  # fmt: skip
    return read.view(rows, tokens, heads, read.shape[-1]), None


def _flat(tensor: Tensor) -> Tensor:
    """Return [B, n, S, d] as [T, n, d]; a view where the heads of a token lie together, as they do after projection."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _register() -> None:
    if IMPLEMENTATION not in AttentionInterface._global_mapping:
        AttentionInterface.register(IMPLEMENTATION, _halo)


def _refuse_other_attention(found: dict[str, nn.Module]) -> None:
    problems = []
    for path, module in found.items():
        rate = getattr(module, "attention_dropout", 0.0)
        if rate:
            problems.append((f"{path} has dropout {rate} on attention weights", "a model with attention_dropout: 0.0"))
        if not module.is_causal:
            problems.append((f"{path} lets tokens see later ones", "attn_implementation: eager"))
    if not found:
        problems.append(
            ("no decoder layer of this model has attention that can be chosen", "attn_implementation: eager")
        )
    if problems:
        first = {remedy: why for why, remedy in reversed(problems)}
        raise Refused(
            Problem(key="attn_implementation", value="a flash kernel", why=why, remedy=remedy)
            for remedy, why in first.items()
        )
