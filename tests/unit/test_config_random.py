"""Random configurations read back to themselves, and random text never raises."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from halo_core.config import KEYS, RunConfig, read, to_yaml
from halo_core.config.containers import DatasetList, FlagOrText, Many, NullIs, Optional, Table
from halo_core.config.values import CountOrRatio, Flag, Kind, Real, Text, Whole, Word

CHARACTERS = st.characters(exclude_characters="\0", exclude_categories=("Cs",))
LINES = st.sampled_from(
    [
        "seed: 1",
        "seed: 012",
        "optim: sgd",
        "learning_rate: 2e-5",
        "\tseed: 2",
        "- a",
        "---",
        "...",
        "%YAML 1.2",
        "run_name: 'x",
        "report_to: [a,",
        "]",
        "  b: c",
        "datasets:",
        "- path: x",
        "a: &b c",
        "d: *b",
        "<<: {x: 1}",
        "? q",
        ": r",
        "!!python/x y",
        "kernels: {experts: reference}",
        "warmup_ratio: 0.1",
        "max_seq_length: 5",
        "x: |",
        "  text",
        "# comment",
        "",
        'y: "\\UFFFFFFFF"',
        "run_name: \x85\u2028",
        "'",
        '"',
        "{",
        "}",
        "@",
        "`",
        "| ",
        "> ",
        "- - - -",
        "? ? ?",
        "key: key: key",
    ]
)


def values_of(kind: Kind) -> st.SearchStrategy[Any]:
    """Return the values that a key of this kind can have."""
    if isinstance(kind, Flag):
        return st.booleans()
    if isinstance(kind, Whole):
        return st.integers(kind.low, kind.high if kind.high is not None else 10**9) | st.sampled_from(
            [kind.low, *kind.also]
        )
    if isinstance(kind, Real):
        low, high = kind.low if kind.low is not None else kind.above, kind.high if kind.high is not None else kind.below
        return st.floats(
            low,
            high,
            exclude_min=kind.above is not None,
            exclude_max=kind.below is not None,
            allow_nan=False,
            allow_infinity=False,
        )
    if isinstance(kind, CountOrRatio):
        ratios = st.floats(0, 1, exclude_min=True, exclude_max=True)
        return st.integers(int(kind.positive), 10**6) | ratios
    if isinstance(kind, Word):
        return st.sampled_from(kind.choices)
    if isinstance(kind, Text):
        return st.text(CHARACTERS, min_size=1) | st.sampled_from(
            ["yes", "null", "012", "1:30", "1e5", "true", "~", "a: b", "#"]
        )
    if isinstance(kind, FlagOrText):
        return st.booleans() | values_of(Text())
    if isinstance(kind, Optional):
        return st.none() | values_of(kind.kind)
    if isinstance(kind, NullIs):
        return values_of(kind.kind)
    if isinstance(kind, Many):
        return st.lists(values_of(kind.kind), max_size=3, unique=True).map(tuple)
    if isinstance(kind, DatasetList):
        entry = st.fixed_dictionaries(
            {"path": values_of(Text())},
            optional={name: values_of(part) for name, part in kind.fields.items() if name != "path"},
        )
        listed = st.lists(entry, min_size=1, max_size=2).map(tuple)
        return listed | values_of(Text()) if kind.may_be_one else listed
    assert isinstance(kind, Table), kind
    inner = values_of(kind.kind) if kind.kind else st.booleans() | st.integers() | values_of(Text()) | st.floats(0, 1e9)
    return st.dictionaries(st.text(CHARACTERS, min_size=1), inner, max_size=3)


CONFIGS = st.fixed_dictionaries({}, optional={name: values_of(facts.kind) for name, facts in KEYS.items()})


def read_bytes(data: bytes) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_bytes(data)
        return read(path)


@settings(max_examples=60, deadline=None)
@given(CONFIGS)
def test_a_written_configuration_reads_back_to_itself(values: dict[str, Any]) -> None:
    config = RunConfig(**values)
    result = read_bytes(to_yaml(config).encode())
    unread = [problem for problem in result.problems if problem.line is None or problem.why not in CONTRADICTIONS]
    assert not unread, [problem.text() for problem in unread]
    assert result.config == config
    assert result.given == set(KEYS)


CONTRADICTIONS = {
    problem.why
    for balancing, optim, bf16 in (("none", "sgd", True), ("auto", "adamw_fp32", False), ("bias_update", "sgd", True))
    for problem in read(
        None,
        given={
            "load_in_4bit": True,
            "load_in_8bit": True,
            "packing": True,
            "max_length": None,
            "router_aux_loss_coef": 1.0,
            "moe_balancing": balancing,
            "fsdp_reshard_after_forward": True,
            "fsdp_reshard_after_backward": False,
            "fsdp_defer_grad_sync": True,
            "bf16": bf16,
            "dtype": "float32",
            "optim": optim,
            "train_on_last_assistant_only": True,
            "assistant_only_loss": False,
        },
    ).problems
}
"""What several keys together can have against each other; each value by itself is sound."""


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(KEYS)).flatmap(lambda name: st.tuples(st.just(name), values_of(KEYS[name].kind))))
def test_a_written_value_reads_back_from_python(pair: tuple[str, Any]) -> None:
    name, value = pair
    assert getattr(read(None, given={name: value}).config, name) == value


@settings(max_examples=150, deadline=None)
@given(st.lists(LINES | st.text(max_size=20), max_size=12))
def test_lines_in_any_order_give_problems_and_never_raise(lines: list[str]) -> None:
    result = read_bytes("\n".join(lines).encode(errors="surrogatepass"))
    for problem in result.problems:
        assert problem.why
        assert problem.remedy
        assert problem.text()
        assert problem.line is None or 1 <= problem.line <= len("\n".join(lines).splitlines()) + 1


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60))
def test_bytes_of_any_kind_give_problems_and_never_raise(data: bytes) -> None:
    read_bytes(data)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.text(max_size=25) | st.tuples(st.sampled_from(sorted(KEYS)), st.text(max_size=12)).map("=".join), max_size=4
    )
)
def test_words_of_any_kind_give_problems_and_never_raise(words: list[str]) -> None:
    for problem in read(None, words).problems:
        assert problem.text()
