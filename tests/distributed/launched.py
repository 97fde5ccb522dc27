"""What the tests' launchers start in place of training: one small act per behaviour. usage: launched.py ACT [WORD ...]

Not a test by itself. torch is imported only by acts that need a group, so that the others start at once.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from halo_core import process_group
from halo_core.cli import endings
from halo_core.cli.main import explain
from halo_core.errors import Problem, Refused
from halo_core.ranks import Ranks, ranks_from
from halo_core.trainer.interrupts import Interrupts


class Seven(Exception):
    exit_code = 7


def stuck() -> None:
    """Wait for ever, deaf to every signal that a process can be deaf to, like a process inside a collective."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    select.select([], [], [])


def says_what_it_got(ranks: Ranks, *words: str) -> None:
    with process_group.joined(ranks, timeout=60):
        process_group.agree("run", {"words": words, "variable": os.environ["HALO_OF_THE_TEST"]})
        moment = process_group.from_rank_0(f"said by {ranks.rank}")
        any_last = process_group.any_rank(ranks.rank == ranks.world - 1)
        got = {"words": words, "variable": os.environ["HALO_OF_THE_TEST"], "folder": str(Path.cwd()), "moment": moment}
        print(json.dumps({**got, "any": any_last, "rank": ranks.rank, "world": process_group.world()}), flush=True)


def refuses_everywhere(ranks: Ranks) -> None:
    raise Refused(Problem(key="packing", value=True, why="this cannot be", remedy="packing: false"), everywhere=True)


def refuses_alike(ranks: Ranks) -> None:
    raise Refused(Problem(key="packing", value=True, why="this cannot be", remedy="packing: false"))


def refuses_on_one(ranks: Ranks) -> None:
    with process_group.joined(ranks, timeout=60):
        with process_group.together():
            if ranks.rank == 1:
                raise Refused(Problem(key="dataset_name", value="x", why="no such file", remedy="copy it"))


def one_raises(ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise KeyError("the cause")
    stuck()


def one_explains_itself(ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise Seven("stopped at step 3")
    stuck()


def one_dies_without_a_word(ranks: Ranks) -> None:
    if ranks.rank == 1:
        print("last words on stderr", file=sys.stderr, flush=True)
        os._exit(5)
    stuck()


def one_is_killed(ranks: Ranks, *where: str) -> None:
    import torch
    import torch.distributed as dist

    process_group.join(ranks, timeout=60)
    if ranks.rank == int((*where, "1")[0]):
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def loses_its_peer_first(ranks: Ranks, folder: str) -> None:
    pipe = Path(folder) / "pipe"
    if ranks.rank == 0:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")
    if ranks.rank == 1:
        with pipe.open() as reader:  # until the test has seen rank 0 end
            reader.read()
        raise KeyError("the cause")
    stuck()


def saves_when_asked(ranks: Ranks, folder: str, number: str) -> None:
    with Interrupts(lambda text: print(text, flush=True)) as interrupts:
        ready(ranks, Path(folder), int(number))
        while interrupts.requested is None:
            select.select([], [], [], 0.01)
        (Path(folder) / f"saved-{ranks.rank}").write_text(interrupts.requested)
        raise KeyboardInterrupt


def deaf(ranks: Ranks, folder: str, *numbers: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    ready(ranks, Path(folder), *map(int, numbers))
    select.select([], [], [])


def holds_a_pipe(ranks: Ranks, folder: str) -> None:
    handle = os.open(Path(folder) / "pipe", os.O_WRONLY)
    ready(ranks, Path(folder), signal.SIGKILL)
    select.select([], [], [])
    os.close(handle)


def exchanges(ranks: Ranks, folder: str) -> None:
    """Sum inside and across machines, and write down who heard what."""
    import torch
    import torch.distributed as dist

    from halo_core.arithmetic import Degrees
    from halo_core.topology import Topology, build_meshes

    with process_group.joined(ranks, timeout=60):
        degrees = Degrees(replicate=2, shard=1, cp=1, ep=2, etp=1)
        meshes = build_meshes(Topology(degrees=degrees, rank=ranks.rank, local_rank=ranks.local_rank), "cpu")
        heard: dict[str, Any] = {"local_rank": ranks.local_rank, "node": os.environ["GROUP_RANK"]}
        for name, mesh in (("ep", meshes.ep), ("replicate", meshes.world["replicate"])):
            total = torch.tensor([2.0**ranks.rank])
            dist.all_reduce(total, group=mesh.get_group())
            heard[name] = total.item()
        (Path(folder) / f"heard-{ranks.rank}").write_text(json.dumps(heard))


def works_on_gpus(ranks: Ranks, folder: str) -> None:
    """Sum on the device and on the host, in the whole group and in those of a mesh, and write down what came."""
    import torch
    import torch.distributed as dist

    from halo_core.arithmetic import Degrees
    from halo_core.topology import Topology, build_meshes

    with process_group.joined(ranks, timeout=60):
        degrees = Degrees(replicate=1, shard=1, cp=1, ep=ranks.world, etp=1)
        topology = Topology(degrees=degrees, rank=ranks.rank, local_rank=ranks.local_rank)
        meshes = build_meshes(topology, "cuda", timedelta(seconds=60))
        process_group.agree("run", {"world": ranks.world})
        sums = []
        for group in (None, meshes.ep.get_group(), meshes.data, meshes.dense.get_group()):
            for device in ("cpu", "cuda"):
                total = torch.tensor([1.0 + ranks.rank], device=device)
                dist.all_reduce(total, group=group)
                sums.append(total.item())
        heard = {"sums": sums, "device": torch.cuda.current_device(), "any": process_group.any_rank(ranks.rank == 1)}
        (Path(folder) / f"heard-{ranks.rank}").write_text(json.dumps(heard))


def one_is_killed_beside_a_gpu(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    process_group.join(ranks, timeout=600)
    ones = torch.ones(1, device="cuda")
    dist.all_reduce(ones)
    ones.item()
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(ones)
    ones.item()


def one_machine_fails(ranks: Ranks) -> None:
    if ranks.rank == ranks.world - 1:
        raise KeyError("the cause")
    stuck()


def one_machine_ends_well(ranks: Ranks) -> None:
    if ranks.rank == ranks.world - 1:
        raise KeyError("the cause")


def holds_its_launcher(ranks: Ranks, folder: str) -> None:
    if os.environ["GROUP_RANK"] == "0":
        place = Ranks(rank=ranks.rank, world=ranks.local_world)
        ready(place, Path(folder), signal.SIGKILL)
    stuck()


def ready(ranks: Ranks, folder: Path, *numbers: int) -> None:
    """Take note that this rank is ready; one of those that see all of them so sends the launcher the signals."""
    with (folder / "ready").open("ab", buffering=0) as file:
        file.write(b".")
        if file.tell() < ranks.world:
            return
    try:
        (folder / "sent").touch(exist_ok=False)
    except FileExistsError:
        return
    for number in numbers:
        os.kill(os.getppid(), number)


ACTS = {
    act.__name__: act
    for act in (says_what_it_got, refuses_everywhere, refuses_alike, refuses_on_one, one_raises, one_explains_itself,
                one_dies_without_a_word, one_is_killed, loses_its_peer_first, saves_when_asked, deaf, holds_a_pipe,
                exchanges, one_machine_fails, one_machine_ends_well, holds_its_launcher, works_on_gpus,
                one_is_killed_beside_a_gpu)
}

if __name__ == "__main__":
    own = ranks_from(os.environ)
    endings.enter(own.rank)
    try:
        ACTS[sys.argv[1]](own, *sys.argv[2:])
    except BaseException as fault:
        endings.end(fault, own.rank, explain)
    endings.end_well()
