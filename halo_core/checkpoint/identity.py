"""What makes two runs the same run, and which differences a resumed run may have.

Not for the weights: their names and shapes are compared when they are read. No torch here.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from halo_core.errors import Problem, shown

if TYPE_CHECKING:
    from halo_core.config import RunConfig
    from halo_core.plan import RunPlan

HARMLESS = frozenset({
    "output_dir", "run_name", "resume_from_checkpoint", "report_to", "push_to_hub", "logging_steps",
    "save_strategy", "save_steps", "save_total_limit", "save_timeout", "save_async",
    "eval_strategy", "eval_steps", "per_device_eval_batch_size", "eval_dataset", "dataset_test_split", "eval_packing",
    "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
    "export_text_only", "save_sharded_ep", "enable_efficiency_metrics", "enable_moe_metrics",
    "allow_experimental", "allow_untested_transformers", "allow_warm_restart", "trust_remote_code",
    "model_name_or_path", "model_revision", "family", "gradient_checkpointing",
    "dequantize_source", "dataset_num_proc", "dataset_cache",
})
"""Keys that change nothing a step computes: weights come from the checkpoint, the architecture is compared itself."""

DATA = frozenset({
    "dataset_name", "dataset_config", "dataset_train_split", "datasets", "on_bad_row", "overlong", "max_length",
    "chat_template_path", "eos_token", "pad_token", "assistant_only_loss", "train_on_last_assistant_only",
    "completion_only_loss",
})
"""Keys that only decide the rows; the rows themselves are compared, so a moved file is not another run."""

WARM = frozenset({"optim"})
"""Keys that decide only the optimizer's state, which allow_warm_restart: true goes on without."""

LENGTH = frozenset({"max_steps", "num_train_epochs"})
"""Keys that end a run sooner or later. The learning rate then follows the new length from the next step on."""

BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
"""Keys whose product, times the number of processes with different rows, has to stay."""

LAYOUT = frozenset({
    "data_parallel_replicate_size", "expert_parallel_size", "expert_tensor_parallel_size", "context_parallel_size",
    "ep_dispatcher", "fsdp_reshard_after_forward", "fsdp_reshard_after_backward", "fsdp_defer_grad_sync",
    "padding_free",
})
"""Keys that decide which process computes what, side by side with what, and in which order sums are made, not what is
summed."""

DEGREES = "degrees"
"""The sizes of the mesh, in a plan."""

PLAN = ("family", "architecture", "model_type", "attention", "experts_kernel")
"""What of a plan decides numbers."""

OF_THE_MODEL = ("family", "architecture", "model_type")
"""What of a plan follows from the model that is named."""

VERSIONS = ("torch", "transformers", "device", "plugins")
"""What of an environment can move the last bits."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A run in plain values: its configuration, plan, data (`count`, `digest`) and environment."""

    config: Mapping[str, Any]
    plan: Mapping[str, Any]
    data: Mapping[str, Any]
    environment: Mapping[str, Any]


class TokenRow(Protocol):
    """What is read of a row, or of a piece of one that begins at its token `start`."""

    @property
    def row_id(self) -> int: ...
    @property
    def input_ids(self) -> Sequence[int]: ...
    @property
    def supervised(self) -> Sequence[bool]: ...
    @property
    def start(self) -> int: ...


class TokenUnit(Protocol):
    """What is read of a row or a pack: its rows, which for a row is itself alone."""

    @property
    def documents(self) -> Sequence[TokenRow]: ...


@runtime_checkable
class Feeding(Protocol):
    """Units that give the same bytes by themselves, faster than one by one."""

    def feed(self, update: Callable[[Any], object]) -> int: ...


def data_of(units: Iterable[TokenUnit]) -> dict[str, Any]:
    """Return the count and digest of rows, alone or in packs; equal exactly when every token, mask, row number and
    pack is."""
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(units, Feeding):
        return {"count": units.feed(digest.update), "digest": digest.hexdigest()}
    count = 0
    for unit in units:
        if len(unit.documents) > 1:  # a pack of one row is that row; no row has a negative number
            digest.update(array("q", [-len(unit.documents)]).tobytes())
        for row in unit.documents:
            count += 1
            digest.update(array("q", [row.row_id, len(row.input_ids), *row.input_ids]).tobytes())
            digest.update(bytes(row.supervised))
            if row.start:
                digest.update(array("q", [row.start]).tobytes())
    return {"count": count, "digest": digest.hexdigest()}


def identity_of(
    *, config: RunConfig, plan: RunPlan, rows: Iterable[TokenUnit], environment: Mapping[str, Any]
) -> Identity:
    """Return the identity of a run over `rows`, or over packs of them."""
    return Identity(
        config=plain(vars(config)),
        plan=plan_of(plan),
        data=data_of(rows),
        environment=plain(environment),
    )


def plan_of(plan: RunPlan) -> dict[str, Any]:
    """Return what of a plan makes a run that run, and the sizes of its mesh."""
    return {**{key: plain(getattr(plan, key)) for key in PLAN}, DEGREES: plain(vars(plan.degrees))}


def plain(value: Any) -> Any:
    """Return `value` in the types that YAML and JSON know: mappings, lists, numbers, text, booleans and null."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(entry) for entry in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def differences(saved: Identity, now: Identity) -> tuple[list[Problem], list[str]]:
    """Return what forbids resuming `saved` as `now`, and what a person should know although it does not."""
    problems: list[Problem] = []
    notes: list[str] = []
    # A key that only one of two versions knows is not a choice anyone made differently.
    changed = [key for key in sorted(saved.config.keys() & now.config.keys()) if saved.config[key] != now.config[key]]
    other_rows = saved.data != now.data
    for key in changed:
        before, after = saved.config[key], now.config[key]
        if key in HARMLESS or key in BATCH or key in LAYOUT or (key in DATA and not other_rows):
            continue
        if key in LENGTH:
            notes.append(f"{key} was {shown(before)} and is {shown(after)}: the learning rate follows the new length "
                         "from the next step on")
            continue
        if key in WARM and now.config.get("allow_warm_restart"):
            notes.append(f"{key} was {shown(before)} and is {shown(after)}: allow_warm_restart permits it")
            continue
        problems.append(_changed(key, before, after))
    problems += _batch(saved, now, notes)
    notes += _layout(saved, now, [key for key in changed if key in LAYOUT])
    if other_rows and not any(problem.key in DATA for problem in problems):
        problems.append(Problem(
            why=f"the rows are not those of the checkpoint ({saved.data.get('count')} rows then, "
                f"{now.data.get('count')} now, or other tokens)",
            remedy="resume with the data and tokenizer of the first part, or start a new run in another output_dir"))
    for key in PLAN:
        if saved.plan.get(key) != now.plan.get(key) and not problems:
            problems.append(_other_plan(key, saved, now))
    notes += [f"{key} was {shown(saved.environment.get(key))} and is {shown(now.environment.get(key))}: "
              "results may differ in their last bits"
              for key in VERSIONS if saved.environment.get(key) != now.environment.get(key)]
    return problems, notes


def _changed(key: str, before: object, after: object) -> Problem:
    also = ", or allow_warm_restart: true to go on with the weights alone" if key in WARM else ""
    return Problem(key=key, value=after, why=f"the checkpoint has {shown(before)}, so this would be another run",
                   remedy=f"set {key}: {shown(before)}, or start a new run in another output_dir{also}")


def _other_plan(key: str, saved: Identity, now: Identity) -> Problem:
    before, after = saved.plan.get(key), now.plan.get(key)
    if key not in OF_THE_MODEL:
        return _changed(f"the plan's {key}", before, after)
    return Problem(key="model_name_or_path", value=now.config.get("model_name_or_path"),
                   why=f"its {key} is {after}, and the checkpoint's is {before}",
                   remedy=f"set model_name_or_path: {shown(saved.config.get('model_name_or_path'))}, as the checkpoint "
                          "has it, or start a new run in another output_dir")


def _batch(saved: Identity, now: Identity, notes: list[str]) -> list[Problem]:
    """Return whether a step takes other numbers of rows, with the value that restores it; note another split."""
    before, after = _split(saved), _split(now)
    if before == after:
        return []
    rows, others = math.prod(before), math.prod(after)
    if rows == others:
        split = [f"{passes} micro-batches"
                 + (f" on {ranks} process{'es' if ranks > 1 else ''}" if before[2] != after[2] else "")
                 for _, passes, ranks in (after, before)]
        split[1] = split[1] if before[2] != after[2] else str(before[1])
        notes.append(f"{rows} rows a step as before, split into {split[0]} instead of {split[1]}: "
                     "results may differ in their last bits")
        return []
    return [Problem(key=BATCH[1], value=after[1],
                    why=f"a step would take {others} rows, and the checkpoint was made with {rows}",
                    remedy=_restoring(rows, after))]


def _split(identity: Identity) -> tuple[int, int, int]:
    """Return rows of a micro-batch, micro-batches of a step, and processes that see different rows."""
    batch, accumulation = (int(identity.config.get(key) or 1) for key in BATCH)
    mesh = _mesh(identity)
    return batch, accumulation, math.prod(mesh.get(axis, 1) for axis in ("replicate", "shard", "ep"))


def _restoring(rows: int, after: tuple[int, int, int]) -> str:
    """Return the way to `rows` rows a step: another accumulation, else another batch, else other processes."""
    batch, _, data_ranks = after
    if rows % (batch * data_ranks) == 0:
        return f"set {BATCH[1]}: {rows // (batch * data_ranks)}"
    if rows % data_ranks == 0:
        share = rows // data_ranks
        fitting = next(size for size in range(min(batch, share), 0, -1) if share % size == 0)
        return f"set {BATCH[0]}: {fitting} and {BATCH[1]}: {share // fitting}"
    return (f"{rows} rows do not divide among {data_ranks} processes: start a number of them that divides {rows}, "
            f"and set {BATCH[0]} and {BATCH[1]} so that all three multiply to it")


def _layout(saved: Identity, now: Identity, keys: list[str]) -> list[str]:
    """Return the notes about other sizes of the mesh, and about other choices of who computes what."""
    texts = [f"{key} was {shown(saved.config[key])} and is {shown(now.config[key])}" for key in keys]
    before, after = _mesh(saved), _mesh(now)
    if before != after:
        sizes = [" x ".join(f"{axis} {size}" for axis, size in mesh.items()) or "one process"
                 for mesh in (before, after)]
        anew = math.prod(before.values()) != math.prod(after.values())
        texts.append(f"the mesh was {sizes[0]} and is {sizes[1]}"
                     + (", so that random numbers such as dropout's begin anew" if anew else ""))
    return [f"{text}: results may differ in their last bits" for text in texts]


def _mesh(identity: Identity) -> dict[str, int]:
    """Return the mesh axes with more than one process; none for what was written before there were several."""
    sizes = identity.plan.get(DEGREES) or {}
    return {axis: int(size) for axis, size in sizes.items() if int(size) > 1}
