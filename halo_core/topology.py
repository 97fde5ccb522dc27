"""Where this process stands among all: its place on the mesh axes, its share of the rows, and the groups it talks to.

Not for starting or ending process groups, and not for deciding degrees (`arithmetic.py`). Mechanisms read this and
never a world rank or an environment variable.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from halo_core.arithmetic import Degrees

AXES = ("replicate", "shard", "cp", "ep", "etp")
"""Mesh axes from the slowest to the fastest: processes of one node are neighbours on the last ones."""

DENSE_AXES = ("shard", "cp", "ep", "etp")
"""The axes over which parameters other than experts are sharded, flattened into one."""

EXPERT_AXES = ("shard", "cp")
"""The axes over which a process's own experts are sharded: those whose processes hold the same experts."""

DATA_AXES = ("replicate", "shard", "ep")
"""The axes whose processes see different rows."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This process's place. rank: among all processes. local_rank: among those of its machine."""

    degrees: Degrees
    rank: int = 0
    local_rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.degrees.world:
            raise ValueError(f"rank must be from 0 to {self.degrees.world - 1}, not {self.rank}")

    @property
    def world(self) -> int:
        """Return the number of processes."""
        return self.degrees.world

    @property
    def is_first(self) -> bool:
        """Return whether this process speaks for all of them, to people and to files that exist once."""
        return self.rank == 0

    @property
    def data_ranks(self) -> int:
        """Return how many processes see different rows."""
        return self.degrees.data_ranks

    @property
    def data_rank(self) -> int:
        """Return which of `data_ranks` shares of the rows is this process's."""
        return self._place(DATA_AXES)

    def size(self, axis: str) -> int:
        """Return the number of processes along an axis of `AXES`."""
        size: int = getattr(self.degrees, axis)
        return size

    def coordinate(self, axis: str) -> int:
        """Return this process's place along an axis of `AXES`, from 0."""
        after = AXES[AXES.index(axis) + 1 :]
        stride = 1
        for other in after:
            stride *= self.size(other)
        return self.rank // stride % self.size(axis)

    def mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh of all processes, one dimension per axis of `AXES`.

        Needs the process group; a collective, in the same order on every process.
        """
        sizes = tuple(self.size(axis) for axis in AXES)
        return init_device_mesh(device_type, sizes, mesh_dim_names=AXES)

    def _place(self, axes: tuple[str, ...]) -> int:
        place = 0
        for axis in axes:
            place = place * self.size(axis) + self.coordinate(axis)
        return place


@dataclass(frozen=True, kw_only=True, eq=False)
class Meshes:
    """The meshes of one run, all cut from one.

    world: every axis. dense: what parameters other than experts are sharded over, behind "replicate" where there are
    replicas. experts: the same for a process's own experts. ep: the processes that exchange tokens. data: the group of
    processes with different rows.
    """

    world: DeviceMesh
    dense: DeviceMesh
    experts: DeviceMesh
    ep: DeviceMesh
    data: dist.ProcessGroup


def build_meshes(topology: Topology, device_type: str, timeout: timedelta | None = None) -> Meshes:
    """Return the run's meshes; a collective. timeout: of every group made here, None for the backend's own."""
    world = topology.mesh(device_type)
    # Their own group although some other may have the same members: sharding gathers ahead while tokens travel.
    dense = world[DENSE_AXES]._flatten("dense")
    experts = world["shard"] if topology.size("cp") == 1 else world[EXPERT_AXES]._flatten("expert_shard")
    data = world[DATA_AXES]._flatten("data")
    if topology.size("replicate") > 1:
        dense, experts = (DeviceMesh._concatenate([world["replicate"], inner]) for inner in (dense, experts))
    if timeout is not None:
        groups = [*world.get_all_groups(), *dense.get_all_groups(), *experts.get_all_groups(), data.get_group()]
        for group in {id(group): group for group in groups}.values():
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    return Meshes(world=world, dense=dense, experts=experts, ep=world["ep"], data=data.get_group())
