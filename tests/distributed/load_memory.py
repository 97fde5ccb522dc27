"""A model of half a gigabyte without its bytes; as a script, loads one process's part of it and tells memory's peak.

Not a test: `test_load_sharded.py` starts it, because only a process that has done nothing else can be measured. It is
the first of two that share the experts; the other is not there, since loading sends nothing.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from halo_core import registry
from halo_core.arithmetic import Degrees
from halo_core.kernels.experts.reference import reference
from halo_core.models import sockets
from halo_core.models.build import attribute, build_meta
from halo_core.models.load import load_weights
from halo_core.models.safetensors_files import header_of
from halo_core.models.tiny import tiny_config
from halo_core.sharding.shard import shard
from halo_core.topology import Topology, build_meshes

NAME, EXPERTS, WIDTH, HIDDEN, LAYERS = "qwen3_moe", 32, 512, 512, 12


def architecture() -> Any:
    """Return an architecture whose checkpoints hold every expert apart, with large experts."""
    found = next(a for a in registry.load().architectures() if a.name == NAME)
    tiny = {**found.spec.tiny, "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_hidden_layers": LAYERS,
            "num_experts": EXPERTS, "mlp_only_layers": []}  # fmt: skip
    return replace(found, spec=replace(found.spec, tiny=tiny))


def write(folder: Path) -> None:
    """Write config.json and a safetensors file of zeros: a header, and a hole as long as the tensors."""
    folder.mkdir()
    described = architecture()
    config = tiny_config(described)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = attribute(described.spec.model_class)(config)
    stored = []
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            parts = [f"{n}.{part}_proj.weight" for n in range(EXPERTS) for part in ("gate", "up")]
            stored += [(name.replace("gate_up_proj", part), (WIDTH, HIDDEN)) for part in parts]
        elif name.endswith("experts.down_proj"):
            parts = [f"{n}.down_proj.weight" for n in range(EXPERTS)]
            stored += [(name.replace("down_proj", part), (HIDDEN, WIDTH)) for part in parts]
        else:
            stored.append((name, tuple(tensor.shape)))
    head = header_of([(name, "BF16", shape) for name, shape in stored], {"format": "pt"})
    length = sum(2 * torch.Size(shape).numel() for _, shape in stored)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(head)
        file.truncate(len(head) + length)


def load(folder: Path) -> dict[str, int]:
    """Return the growth of anonymous memory at its highest, and what it should be measured by, in bytes."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    described = architecture()
    topology = Topology(degrees=Degrees(replicate=1, shard=1, cp=1, ep=2, etp=1))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = build_meta(described, config, dtype=torch.bfloat16, experts=reference)
    experts = dict(sockets.experts_modules(model, described))
    shard(model, described, topology, build_meshes(topology, "cpu"), experts=experts)
    before, peak, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    load_weights(model, folder, described)
    done.set()
    watcher.join()
    local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    size = {name: tensor.numel() * tensor.element_size() for name, tensor in local.items()}
    dist.destroy_process_group()
    return {
        "file": (folder / "model.safetensors").stat().st_size,
        "shard": sum(size.values()),
        "layer": sum(bytes_ for name, bytes_ in size.items() if ".layers.0." in name and ".experts." in name),
        "peak": peak[0] - before,
    }


def anonymous() -> int:
    """Return this process's anonymous resident memory, in bytes. Source: proc(5), RssAnon."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(load(Path(sys.argv[1]))))
