"""The place of a process on the mesh, against torch's own mesh. Not for what the mesh is used for."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halo_core.arithmetic import Degrees
from halo_core.topology import AXES, Topology, build_meshes
from tests.distributed import ranks


def degrees(**sizes: int) -> Degrees:
    return Degrees(**{axis: sizes.get(axis, 1) for axis in AXES})


def test_one_process_needs_no_process_group() -> None:
    topology = Topology(degrees=degrees())
    assert (topology.world, topology.data_rank, topology.data_ranks, topology.is_first) == (1, 0, 1, True)
    assert not dist.is_initialized()


def test_coordinates_count_from_the_last_axis_and_name_every_rank_once() -> None:
    sizes = degrees(replicate=2, shard=3, cp=2, ep=4, etp=2)
    places = [
        tuple(Topology(degrees=sizes, rank=rank).coordinate(axis) for axis in AXES) for rank in range(sizes.world)
    ]
    assert places == list(itertools.product(range(2), range(3), range(2), range(4), range(2)))


def test_processes_that_differ_only_in_cp_or_etp_share_their_rows() -> None:
    sizes = degrees(replicate=2, shard=2, cp=2, ep=2, etp=2)
    shares: dict[int, set[tuple[int, ...]]] = {}
    for rank in range(sizes.world):
        topology = Topology(degrees=sizes, rank=rank)
        place = tuple(topology.coordinate(axis) for axis in ("replicate", "shard", "ep"))
        shares.setdefault(topology.data_rank, set()).add(place)
    assert sorted(shares) == list(range(sizes.data_ranks))
    assert all(len(places) == 1 for places in shares.values())


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        Topology(degrees=degrees(ep=2), rank=2)


def seen_by_torch(**sizes: int) -> dict[str, Any]:
    topology = Topology(degrees=degrees(**sizes), rank=dist.get_rank())
    meshes = build_meshes(topology, "cpu")
    own = torch.tensor([float(topology.rank)])
    sums = {}
    for name, group in (("ep", meshes.ep.get_group()), ("data", meshes.data)):
        total = own.clone()
        dist.all_reduce(total, group=group)
        sums[name] = total.item()
    return {
        "torch": meshes.world.get_coordinate(), "ours": [topology.coordinate(axis) for axis in AXES], "sums": sums,
        "dense": (meshes.dense.mesh_dim_names, tuple(meshes.dense.shape)),
        "experts": (meshes.experts.mesh_dim_names, tuple(meshes.experts.shape)),
        "data_rank": dist.get_rank(meshes.data) == topology.data_rank,
    }


def test_the_mesh_agrees_with_torchs_and_its_groups_hold_who_they_should() -> None:
    seen = ranks.run(4, lambda: seen_by_torch(replicate=2, ep=2))
    assert all(list(one["torch"]) == one["ours"] and one["data_rank"] for one in seen)
    assert [one["sums"]["ep"] for one in seen] == [1.0, 1.0, 5.0, 5.0]
    assert all(one["sums"]["data"] == 6.0 for one in seen)
    assert {one["dense"] for one in seen} == {(("replicate", "dense"), (2, 2))}
    assert {one["experts"] for one in seen} == {(("replicate", "shard"), (2, 1))}


def test_the_harness_brings_back_the_first_failure_and_ends_the_rest() -> None:
    def fails() -> None:
        if dist.get_rank() == 1:
            raise KeyError("this rank")
        dist.barrier()

    with pytest.raises(ranks.RankFailed, match="this rank") as caught:
        ranks.run(2, fails)
    assert caught.value.rank == 1 and isinstance(caught.value.error, KeyError)


def test_the_harness_notices_a_rank_that_hangs() -> None:
    def hangs() -> None:
        if dist.get_rank() == 0:
            threading.Event().wait()

    with pytest.raises(ranks.RankFailed, match="rank 0: nothing came back"):
        ranks.run(2, hangs, timeout=1.5)
