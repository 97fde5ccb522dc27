"""AdamW over named parameters: `AdamWBF16` keeps bf16 weights and moments, `AdamWFP32` fp32 ones beside bf16 weights.

Not for the arithmetic (`halo_core.kernels.adamw`), nor for clipping: the coefficient arrives with the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from halo_core.kernels.adamw import choice
from halo_core.kernels.adamw.boxes import Box, boxes_of
from halo_core.kernels.adamw.noise import key_of
from halo_core.kernels.adamw.parts import Kernel, Part
from halo_core.kernels.adamw.rates import Rates, rates

DTYPES = (torch.bfloat16, torch.float32)
MASTER, FIRST, SECOND, STEP = "master", "exp_avg", "exp_avg_sq", "step"
"""Keys of a parameter's state; the moments' and the step's are torch's own."""


class NamedAdamW(torch.optim.Optimizer):
    """What both have in common: groups of named parameters, and `update` by name.

    State of a parameter from its first gradient on: `exp_avg` and `exp_avg_sq`, laid out as the parameter, and `step`,
    an int. A parameter without a gradient is not touched, and its step is not counted.
    """

    has_master: ClassVar[bool]

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        seed: int,
        kernel: Kernel | None = None,
    ) -> None:
        """Take groups `{"params": [(name, parameter), ...], "weight_decay": ...}`; names are state-dict keys.

        kernel: what steps, None for the one that fits a parameter's device.

        Raises:
            ValueError: a parameter without a name, or neither bf16 nor fp32; a name given twice.
        """
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.seed = seed
        self._places: dict[str, tuple[int, tuple[Box, ...]]] = {}
        self._kernel = kernel
        self._kernels: dict[torch.device, Kernel] = {}
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        if len(names) != len(set(names)) or len(names) != sum(len(group["params"]) for group in self.param_groups):
            raise ValueError("every parameter needs a name of its own")
        for name, parameter in self.named_parameters():
            if parameter.dtype not in DTYPES:
                raise ValueError(f"{name} is {parameter.dtype}; AdamW steps bfloat16 and float32")

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Return every (name, parameter), in the order of the groups."""
        return [
            pair for group in self.param_groups for pair in zip(group["param_names"], group["params"], strict=True)
        ]

    @torch.no_grad()
    def update(self, gradients: Mapping[str, Tensor], scale: Tensor | None = None) -> None:
        """Step the parameters that have a gradient.

        gradients: by name, bf16 or fp32, laid out as the parameter. scale: a scalar on the device that multiplies each
        gradient after its cast to fp32, None for 1; nothing waits for its value. One parameter at a time gives the same
        result as all together.

        Raises:
            ValueError: a gradient of an unknown name, or laid out otherwise than its parameter.
        """
        unknown = gradients.keys() - {name for group in self.param_groups for name in group["param_names"]}
        if unknown:
            raise ValueError(f"no parameter is called {sorted(unknown)[0]}")
        work: dict[torch.device, list[Part]] = {}
        copied: list[tuple[Tensor, Tensor]] = []
        stepped: list[Tensor] = []
        for group in self.param_groups:
            numbers = functools.cache(functools.partial(
                rates, lr=group["lr"], betas=tuple(group["betas"]), eps=group["eps"], weight_decay=group["weight_decay"]
            ))  # fmt: skip
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                gradient = gradients.get(name)
                if gradient is None:
                    continue
                _check_layout(name, parameter, gradient)
                part = self._part(numbers, name, parameter, gradient)
                held = local(parameter)
                if not held.is_contiguous():
                    copied.append((held, part.weight))
                stepped += [parameter] if held is parameter else [parameter, held]
                if part.weight.numel():
                    work.setdefault(held.device, []).append(part)
        for device, parts in work.items():
            if device not in self._kernels:
                self._kernels[device] = self._kernel or choice.kernel(device)
            self._kernels[device](parts, None if scale is None else scale.to(device, torch.float32))
        for held, weight in copied:
            held.copy_(weight)
        # Kernels write past autograd; without this a backward through an old weight would go unnoticed.
        torch.autograd.graph.increment_version(stepped)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step by the gradients that parameters carry, as torch's optimizers do."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update({name: parameter.grad for name, parameter in self.named_parameters() if parameter.grad is not None})
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; fp32 state of bf16 parameters stays, which torch alone would cast.

        Raises:
            ValueError: it is the state of parameters of other names.
        """
        for saved_group, group in zip(state_dict["param_groups"], self.param_groups, strict=False):
            theirs, ours = saved_group.get("param_names"), group["param_names"]
            if theirs is not None and list(theirs) != list(ours):
                other = next((pair for pair in zip(theirs, ours, strict=False) if pair[0] != pair[1]), (theirs, ours))
                raise ValueError(f"the state is of {other[0]} where this optimizer has {other[1]}")
        super().load_state_dict({**state_dict, "state": {}})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            saved = state_dict["state"].get(number)
            if saved is not None:
                self.state[parameter] = {
                    key: int(value) if key == STEP
                    else value.to(parameter.device, self._state_dtype(parameter)).contiguous()  # kernels write here
                    for key, value in saved.items()
                }

    def _part(self, numbers: Callable[..., Rates], name: str, parameter: Tensor, gradient: Tensor) -> Part:
        """Return what a kernel needs for this parameter's next step, which is counted here; `numbers` of that step."""
        state = self.state[parameter]
        if not state:
            state.update(self._new_state(parameter))
        state[STEP] += 1
        if name not in self._places:
            self._places[name] = key_of(self.seed, name), boxes_of(parameter)
        key, boxes = self._places[name]
        master = state.get(MASTER)
        return Part(
            weight=_dense(parameter), first=_dense(state[FIRST]), second=_dense(state[SECOND]),
            master=None if master is None else _dense(master), gradient=_dense(gradient),
            rates=numbers(step=state[STEP]), key=key, step=state[STEP], boxes=boxes,
        )  # fmt: skip

    def _new_state(self, parameter: Tensor) -> dict[str, Any]:
        dtype = self._state_dtype(parameter)
        empty = {
            key: torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
            for key in (FIRST, SECOND)
        }
        if self.has_master and parameter.dtype != torch.float32:
            empty[MASTER] = parameter.detach().to(torch.float32, memory_format=torch.contiguous_format)
        return {STEP: 0, **empty}

    def _state_dtype(self, parameter: Tensor) -> torch.dtype:
        return torch.float32 if self.has_master else parameter.dtype


class AdamWBF16(NamedAdamW):
    """AdamW whose weights and moments are bf16: 6 bytes a parameter beside its gradient.

    The arithmetic is fp32. Weight and second moment are rounded by chance, so that they are right in the mean; the
    first moment is rounded to the nearest. fp32 parameters have fp32 moments and are not rounded.
    """

    has_master = False


class AdamWFP32(NamedAdamW):
    """AdamW whose state is an fp32 `master` and fp32 moments beside each bf16 weight, which is the master's nearest."""

    has_master = True


def local(tensor: Tensor) -> Tensor:
    """Return this process's own part; in `update`, outside autograd, that is the memory itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _dense(tensor: Tensor) -> Tensor:
    """Return this process's own part in row-major order without gaps: itself where it lies so, else a copy."""
    return local(tensor).contiguous()


def _check_layout(name: str, parameter: Tensor, gradient: Tensor) -> None:
    same = parameter.shape == gradient.shape and isinstance(parameter, DTensor) == isinstance(gradient, DTensor)
    if same and isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        same = parameter.placements == gradient.placements and parameter.device_mesh == gradient.device_mesh
    if not same or gradient.dtype not in DTYPES:
        raise ValueError(f"the gradient of {name}, {gradient.dtype} {tuple(gradient.shape)}, is not laid out as it is")
