"""Who sums a parameter's gradient over processes: each parameter has one owner, and one without any is an error.

Not for summing. Read off the parameters themselves, so that it tells what is, not what was meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from halo_core.topology import Meshes

Owner: TypeAlias = Literal["dense", "experts", "dispatch"]
"""`dense`: summed over every process. `experts`: arrived complete by dispatch in each group of processes that hold all
experts, then summed over those groups. `dispatch`: complete on arrival, there is one such group."""


def owners(model: nn.Module, meshes: Meshes) -> dict[str, Owner]:
    """Return the owner of every trainable parameter; a tied one appears once.

    Raises:
        RuntimeError: naming parameters whose gradient nobody would sum.
    """
    found: dict[str, Owner] = {}
    unowned = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        owner = owner_of(parameter, meshes)
        if owner is None:
            unowned.append(name)
        else:
            found[name] = owner
    if unowned:
        shown = ", ".join(unowned[:10]) + (f" and {len(unowned) - 10} more" if len(unowned) > 10 else "")
        raise RuntimeError(f"nobody sums the gradients of {shown} over processes")
    return found


def owner_of(parameter: Tensor, meshes: Meshes) -> Owner | None:
    """Return who sums a parameter's gradient, or None."""
    if not isinstance(parameter, DTensor):
        return None
    members = _axes(parameter.device_mesh)
    if members == _axes(meshes.dense):
        return "dense"
    ep, experts = _axes(meshes.ep), _axes(meshes.experts)
    if members == experts | ep:
        return "experts"
    if members == ep and all(size == 1 for size in meshes.experts.shape):
        return "dispatch"
    return None


def by_owner(found: Mapping[str, Owner]) -> dict[Owner, int]:
    """Return how many parameters each owner has."""
    return {owner: sum(one == owner for one in found.values()) for owner in dict.fromkeys(found.values())}


def _axes(mesh: DeviceMesh) -> frozenset[str]:
    assert mesh.mesh_dim_names is not None, "every mesh of a run has named axes"
    return frozenset(mesh.mesh_dim_names)
