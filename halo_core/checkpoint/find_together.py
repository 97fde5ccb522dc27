"""Which checkpoint all processes of a run go on from, when each may see a folder of its own.

Not for one process alone (`find.py`), and not for reading tensors. A save that was cut off between the renames of two
machines leaves its step complete on one of them: the newest step that is complete everywhere is taken.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping
from pathlib import Path

from halo_core import process_group
from halo_core.checkpoint import agreement, atomic, find
from halo_core.checkpoint.find import KEY, STATE, Checkpoint
from halo_core.errors import Problem, Refused
from halo_core.ranks import spans


def find_together(
    asked: bool | str | Path | None, output_dir: Path, *, warm: bool = False
) -> Checkpoint | None:
    """Return the checkpoint that `resume_from_checkpoint` means, of one step on every process; a collective.

    asked, output_dir, warm: as for `find.find`. The files are read for their checksums once per machine, shared among
    its processes.

    Raises:
        Refused: on every process, as `find.find`, or when processes see different checkpoints of one step.
    """
    if process_group.world() == 1 or asked is None or asked is False or asked == "":
        return find.find(asked, output_dir, warm=warm)
    chosen = find.candidates(asked, output_dir)
    # A folder of checkpoints without a complete one here, where another machine has some, is still such a folder.
    if process_group.any_rank(isinstance(chosen, list)) and isinstance(chosen, Path):
        chosen = atomic.named(chosen)[::-1]
    if isinstance(chosen, Path):
        return _named(chosen, asked, warm)
    paths = {step: path for path in chosen if (step := atomic.step_of(path)) is not None}
    seen = agreement.gathered({step: find.by_sizes(path) for step, path in paths.items()})
    skipped: list[str] = []
    usable: tuple[int, list[str], dict[str, str]] | None = None
    for step in sorted({step for one in seen for step in one}, reverse=True):
        everyone = [one.get(step, {atomic.MARKER: "it does not exist"}) for one in seen]
        if not any(find.grave(own, warm=warm) for own in everyone):
            damaged = agreement.gathered(_damaged(paths[step]))
            everyone = [{**own, **more} for own, more in zip(everyone, damaged, strict=True)]
        if not any(everyone):
            return _read(paths[step], asked, skipped, {})
        if usable is None and not any(find.grave(own, warm=warm) for own in everyone):
            usable = (step, list(skipped), _union(everyone))
        skipped.append(find.passed_over(Path(f"checkpoint-{step}"), _by_ranks(everyone)))
    if usable is not None:
        return _read(paths[usable[0]], asked, usable[1], usable[2])
    raise Refused(find.none_found(asked, output_dir, skipped), everywhere=True)


def _named(path: Path, asked: object, warm: bool) -> Checkpoint:
    """Return the checkpoint that was asked for by its path; a collective."""
    found: dict[str, str] = {}
    for faults in (find.by_sizes, _damaged):  # reading every byte comes after names and sizes
        everyone = agreement.gathered(faults(path))
        own = everyone[process_group.rank()]
        is_grave = any(find.grave(one, warm=warm) for one in everyone)
        process_group.collect_problems(find.unusable(asked, path, own) if is_grave else ())
        found |= _union(everyone)
    return _read(path, asked, [], found)


def _damaged(path: Path) -> dict[str, str]:
    """Return the files whose contents are damaged, of this process's share; a collective."""
    marker = (path / atomic.MARKER).stat()
    view = (socket.gethostname(), marker.st_dev, marker.st_ino)
    alike = [rank for rank, other in enumerate(agreement.gathered(view)) if other == view]
    return atomic.faults_by_file(path, contents=True, share=(alike.index(process_group.rank()), len(alike)))


def _read(path: Path, asked: object, skipped: list[str], lacking: Mapping[str, str]) -> Checkpoint:
    with process_group.together():
        checkpoint = find.read(path, asked, tuple(skipped), lacking=lacking)
        digest = _digest(path)
    digests = agreement.gathered(digest)
    if len(set(digests)) > 1:
        others = [rank for rank, other in enumerate(digests) if other != digests[0]]
        raise Refused(
            Problem(key=KEY, value=asked, why=f"{spans(others)} see another {path.name} than rank 0: "
                    "its files have other contents", remedy="give every machine the checkpoint of one run"),
            everywhere=True)
    return checkpoint


def _union(everyone: list[dict[str, str]]) -> dict[str, str]:
    return {file: text for own in everyone for file, text in own.items()}


def _digest(path: Path) -> str:
    """Return what is equal for the folders of one save on several machines: every process's files, wherever they are.

    state.json is left out: it tells of the machine.
    """
    marker: Mapping[str, Mapping[str, object]] = json.loads((path / atomic.MARKER).read_text(encoding="utf-8"))
    files = {**marker["files"], **marker.get(atomic.ELSEWHERE, {})}
    files.pop(STATE, None)
    return hashlib.blake2b(json.dumps(files, sort_keys=True).encode(), digest_size=16).hexdigest()


def _by_ranks(everyone: list[dict[str, str]]) -> list[str]:
    """Return each fault once, with the ranks that have it where not all have."""
    holders: dict[str, list[int]] = {}
    for rank, own in enumerate(everyone):
        for fault in own.values():
            holders.setdefault(fault, []).append(rank)
    return [fault if len(ranks) == len(everyone) else f"{fault} on {spans(ranks)}"
            for fault, ranks in holders.items()]
