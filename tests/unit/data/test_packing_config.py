"""What is said of packing and padding_free before any data is read: contradictions, and keys without effect."""

from __future__ import annotations

from typing import Any

import pytest

from halo_core.config import read

CUT = "wrapped cuts rows wherever a pack is full"
IDLE = "has no effect"


def notes(**given: Any) -> list[str]:
    """Return what is noted of these keys that concerns packing."""
    result = read(None, given=given)
    assert not result.problems, [problem.text() for problem in result.problems]
    keys = ("packing_strategy", "eval_packing", "overlong", "padding_free")
    return [note for note in result.notes if note.startswith(keys)]


@pytest.mark.parametrize("keys", [{"packing": True}, {"eval_packing": True}, {"packing": True, "eval_packing": False}])
def test_packing_without_a_length_is_refused_with_the_key_to_turn(keys: dict[str, Any]) -> None:
    [problem] = read(None, given={**keys, "max_length": None}).problems
    assert (problem.key, problem.why) == ("max_length", "packing fills sequences of this length")
    assert problem.remedy == f"set max_length, or {next(iter(keys))}: false"


def test_padding_free_needs_no_length() -> None:
    assert read(None, given={"padding_free": True, "max_length": None}).problems == ()


@pytest.mark.parametrize(("keys", "said"), [
    ({"packing": True}, []),
    ({"packing": True, "packing_strategy": "bfd", "overlong": "truncate"}, []),
    ({"packing_strategy": "bfd_split"}, [IDLE + " while packing is false"]),
    ({"packing_strategy": "bfd_split", "eval_packing": True}, ["eval_strategy is no", "while packing is false"]),
    ({"packing_strategy": "bfd_split", "eval_packing": True, "eval_strategy": "epoch"}, []),
    ({"packing_strategy": "bfd_split", "packing": True, "overlong": "error"}, [IDLE + ": packing_strategy: bfd_split"]),
    ({"packing_strategy": "bfd_split", "packing": True, "overlong": "error", "eval_strategy": "epoch",
      "eval_packing": False}, []),
    ({"packing_strategy": "wrapped", "packing": True}, [CUT]),
    ({"padding_free": True}, []),
    ({"padding_free": True, "per_device_train_batch_size": 1}, ["nothing to pad"]),
    ({"padding_free": True, "per_device_train_batch_size": 1, "eval_strategy": "epoch"}, []),
    ({"eval_packing": False, "packing": True}, [IDLE + " while eval_strategy is no"]),
])  # fmt: skip
def test_keys_that_do_nothing_beside_others_are_said(keys: dict[str, Any], said: list[str]) -> None:
    found = notes(**keys)
    assert len(found) == len(said)
    assert all(any(part in note for note in found) for part in said), found
