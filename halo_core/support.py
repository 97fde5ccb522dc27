"""What the core can do in this version, and the verdict that follows from family, core and evidence together.

Not for refusing a run: `plan.py` collects problems. A cell is the weakest of three parts, each with its author:
the family's answer, the core's mechanism, and the evidence that it was shown on a GPU where that is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from halo_core.verdict import Experimental, Supported, Verdict


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """The core's side of one feature.

    feature: its name. what: one line for people. built: whether this version has it.
    since: the contract level that introduced it. instead: the way out while it is not built.
    """

    feature: str
    what: str
    built: bool
    since: int = 1
    instead: str = ""


MECHANISMS: tuple[Mechanism, ...] = (
    Mechanism(feature="sft", what="supervised fine-tuning of every weight", built=True),
    Mechanism(feature="gradient_checkpointing", what="recompute activations in backward", built=True),
    Mechanism(feature="grouped_gemm", what="all experts of a layer in one grouped matrix product", built=True),
    Mechanism(feature="attention:eager", what="attention as plain matrix products", built=True),
    Mechanism(feature="attention:sdpa", what="torch's scaled dot product attention", built=True),
    Mechanism(
        feature="attention:flex_attention",
        what="torch's compiled flex attention",
        built=False,
        instead="leave attn_implementation out, or set it to sdpa or eager",
    ),
    Mechanism(
        feature="attention:flash_attention_2",
        what="any exact flash attention kernel that is installed",
        built=True,
        instead="leave attn_implementation out, or set it to sdpa or eager",
    ),
    Mechanism(feature="balancing:none", what="no load balancing", built=True),
    Mechanism(
        feature="balancing:bias_update",
        what="nudge a selection bias towards equal expert load",
        built=True,
    ),
    Mechanism(
        feature="balancing:aux_loss",
        what="an auxiliary loss on router probabilities",
        built=False,
        instead="set moe_balancing: none",
    ),
    Mechanism(
        feature="ep",
        what="expert parallelism: each process holds a part of the experts",
        built=True,
    ),
    Mechanism(
        feature="etp",
        what="expert tensor parallelism: each process holds a slice of every expert",
        built=False,
        instead="set expert_tensor_parallel_size: 1",
    ),
    Mechanism(
        feature="cp:ulysses",
        what="context parallelism by exchanging heads for sequence",
        built=False,
        instead="set context_parallel_size: 1 and lower max_length",
    ),
    Mechanism(
        feature="fsdp",
        what="weights, gradients and optimizer state sharded over processes",
        built=True,
    ),
    Mechanism(
        feature="packing",
        what="several rows in one sequence, kept apart in every layer",
        built=True,
        instead="set packing: false",
    ),
    Mechanism(
        feature="padding_free",
        what="a batch flattened to its real tokens",
        built=True,
        instead="set padding_free: false",
    ),
    Mechanism(feature="lora", what="low-rank adapters", built=False, instead="set use_peft: false"),
    Mechanism(
        feature="qlora", what="low-rank adapters over 4-bit weights", built=False, instead="set load_in_4bit: false"
    ),
    Mechanism(feature="liger", what="Liger's fused kernels", built=False, instead="set use_liger_kernel: false"),
    Mechanism(feature="compile", what="torch.compile", built=False, instead="set torch_compile: false"),
    Mechanism(
        feature="bf16",
        what="bf16 weights and moments with stochastic rounding",
        built=True,
        instead="set bf16: false; dtype: bfloat16 trains in bf16 under torch's own optimizer",
    ),
    Mechanism(
        feature="fp32_router", what="router weights and routing in fp32", built=True, instead="set fp32_router: false"
    ),
    Mechanism(
        feature="lowp", what="training aware of 8-bit or 4-bit weights", built=False, instead="remove lowp_precision"
    ),
)
"""Features that every architecture answers."""

FEATURES: tuple[str, ...] = tuple(mechanism.feature for mechanism in MECHANISMS)

WORDS = ("Supported", "declared", "Experimental", "not built yet", "Unsupported")
"""What a cell can read, from strongest to weakest. `declared`: all is there but the proof on a GPU."""

PARALLEL_SETS: frozenset[frozenset[str]] = frozenset(
    frozenset(axes) for axes in ((), ("ep",), ("etp",), ("cp",), ("ep", "etp"), ("ep", "cp"))
)
"""Which parallel axes may be larger than one together; sharding and replicas go with each of them."""

KERNELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "experts": ("grouped", "reference"),
        "head": ("chunked", "reference"),
        "attention": ("flash", "reference"),
        "short_conv": ("fused", "reference"),
        "delta_rule": ("fused", "chunked", "reference"),
    }
)
"""Kernel names that `kernels:` can switch, and what each can be; the first is what runs unasked, where it can.

`attention` is about flash attention alone: the others are transformers' own.
"""


@dataclass(frozen=True, kw_only=True)
class PackedFormat:
    """A stored form in fewer bits that is read as bf16: tensor NAME lies in the files as NAME+blocks and NAME+scales.

    growth: bytes as bf16 for each byte in the files.
    """

    blocks: str
    scales: str
    growth: float


PACKED_FORMATS: Mapping[str, PackedFormat] = MappingProxyType(
    # 32 values are 16 bytes and a scale of one byte; as bf16 they are 64 bytes.
    {"mxfp4": PackedFormat(blocks="_blocks", scales="_scales", growth=64 / 17)}
)
"""The stored forms that this version reads, by the name that config.json has for them."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One GPU run that showed a cell to work: which test, on what, when."""

    architecture: str
    feature: str
    test: str
    device: str
    versions: str
    commit: str
    date: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """One author's say on a cell: `word` of WORDS, the reason, the way out."""

    author: str
    word: str
    reason: str
    instead: str = ""
    because: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The verdict on one feature of one architecture, and the parts it is made of."""

    family: str
    architecture: str
    feature: str
    parts: tuple[Part, ...]

    @property
    def decisive(self) -> Part:
        """Return the weakest part; of equal ones the first."""
        return max(self.parts, key=lambda part: WORDS.index(part.word))

    @property
    def word(self) -> str:
        """Return the verdict as one of WORDS."""
        return self.decisive.word

    def as_dict(self) -> dict[str, str]:
        """Return the cell as `halo matrix --json` prints it."""
        part = self.decisive
        reason = f"{part.reason}; instead: {part.instead}" if part.instead else part.reason
        return {
            "family": self.family,
            "architecture": self.architecture,
            "feature": self.feature,
            "verdict": self.word,
            "reason": reason,
            "by": part.author,
        }


def mechanism(feature: str) -> Mechanism:
    """Return the core's side of a feature that every architecture answers."""
    return next(m for m in MECHANISMS if m.feature == feature)


def expand(feature: str) -> tuple[str, ...]:
    """Return the features a name stands for: itself, or every `name:*`; nothing when it is unknown."""
    if feature in FEATURES:
        return (feature,)
    return tuple(name for name in FEATURES if name.startswith(f"{feature}:"))


def cell(
    *,
    family: str,
    architecture: str,
    feature: str,
    answer: Verdict | None,
    answered_by: str,
    contract: int,
    evidence: tuple[Evidence, ...],
) -> Cell:
    """Return the cell of one feature from the family's answer, the core's mechanism and the evidence."""
    built = mechanism(feature)
    parts = [_family_part(answer, answered_by, contract, built)]
    if built.built:
        parts.append(Part(author="halo_core", word="Supported", reason=built.what))
    else:
        parts.append(
            Part(
                author="halo_core",
                word="not built yet",
                instead=built.instead,
                reason=f"this version has no mechanism for it yet ({built.what})",
            )
        )
    shown = [row for row in evidence if row.feature == feature]
    if isinstance(answer, Supported) and built.built and shown:
        row = shown[-1]
        parts.append(Part(author="evidence", word="Supported", reason=f"{row.test} on {row.device}, {row.date}"))
    elif isinstance(answer, Supported) and built.built and answer.proof == "gpu":
        parts.append(Part(author="evidence", word="declared", reason="no run on a GPU has shown it yet"))
    return Cell(family=family, architecture=architecture, feature=feature, parts=tuple(parts))


def weakest(cells: Sequence[Cell]) -> Cell:
    """Return the weakest of several cells; of equal ones the first."""
    return max(cells, key=lambda cell: WORDS.index(cell.word))


def best(cells: Sequence[Cell], feature: str) -> Cell:
    """Return the strongest of several cells under the name that stands for them all."""
    if not cells:
        raise KeyError(feature)
    return min(cells, key=lambda cell: WORDS.index(cell.word))


def _family_part(answer: Verdict | None, author: str, contract: int, built: Mechanism) -> Part:
    if answer is None and built.since > contract:
        return Part(
            author=author,
            word="Unsupported",
            reason=f"not declared: plugin written for contract {contract}",
            instead=f"ask for a release of {author} that answers {built.feature!r}",
        )
    if answer is None:
        return Part(
            author=author,
            word="Unsupported",
            reason="not answered by its plugin",
            instead=f"ask for a release of {author} that answers {built.feature!r}",
        )
    if isinstance(answer, Supported):
        return Part(author=author, word="Supported", reason="the family says it works")
    if isinstance(answer, Experimental):
        return Part(
            author=author, word="Experimental", reason=answer.note, instead=f"allow_experimental: [{built.feature}]"
        )
    return Part(author=author, word="Unsupported", reason=answer.reason, instead=answer.instead, because=answer.because)
