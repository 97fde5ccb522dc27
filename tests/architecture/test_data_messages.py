"""Everything that `halo_core.data` says to a person stands in the tables of docs/data.md, so that neither can rot."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from halo_core.data.examples import KINDS, example_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "halo_core" / "data"
PAGE = ROOT / "docs" / "data.md"
FAULTS = ("RowFault", "NoKind", "Media")
COUNTED = ("drop", "drop_many", "note")
SHORTEST = 8
"""Letters of the shortest piece of a message by which it is looked for."""


def plain(text: str) -> str:
    """Return a text as it is compared: white space is one space, backticks are left out."""
    return re.sub(r"\s+", " ", text.replace("`", "")).strip()


def said(node: ast.AST, scope: ast.AST, module: ast.Module) -> Iterator[str]:
    """Yield for each text that an expression may be the longest piece of it that stands in the source as it is."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        pieces = [str(part.value) for part in node.values if isinstance(part, ast.Constant)]
        yield max(pieces, key=len, default="")
    elif isinstance(node, ast.IfExp):
        yield from said(node.body, scope, module)
        yield from said(node.orelse, scope, module)
    elif isinstance(node, ast.BinOp):
        yield from said(node.left, scope, module)
        yield from said(node.right, scope, module)
    elif isinstance(node, ast.Name):
        for place in (scope, module):
            values = list(assigned(node.id, place))
            for value in values:
                yield from said(value, scope, module)
            if values:
                return


def assigned(name: str, place: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(place) if not isinstance(place, ast.Module) else place.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        is_value = isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None
        if is_value and any(isinstance(target, ast.Name) and target.id == name for target in targets):
            yield node.value  # type: ignore[union-attr]


def messages_of(source: str) -> Iterator[str]:
    """Yield a piece of every refusal's `why`, every fault's reason, every note and reason to drop in a file."""
    module = ast.parse(source)
    scopes = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    for scope in [module, *scopes]:
        own = scope.body if scope is module else [scope]
        for node in (inner for outer in own for inner in ast.walk(outer)):
            if not isinstance(node, ast.Call) or (scope is module and any(node in ast.walk(s) for s in scopes)):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            spoken = [keyword.value for keyword in node.keywords if keyword.arg == "why" and name == "Problem"]
            spoken += node.args[:1] if name in FAULTS or name in COUNTED else []
            for expression in spoken:
                yield from said(expression, scope, module)
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and "NOTE_" in node.targets[0].id:
            yield from (piece.split("{", 1)[0] for piece in said(node.value, module, module))


def missing(source: str, page: str) -> set[str]:
    told = plain(page)
    return {
        text
        for text in map(plain, messages_of(source))
        if len(text) >= SHORTEST and re.search("[a-z]{3}", text) and text not in told
    }


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_every_message_about_data_stands_in_the_page(path: Path) -> None:
    assert missing(path.read_text(encoding="utf-8"), PAGE.read_text(encoding="utf-8")) == set()


def test_a_message_that_the_page_lacks_is_found() -> None:
    source = """
NOTE_NEW = "a note that nobody wrote down"
def refuse(key):
    why = f"{key} is new" if key else "a refusal nobody knows"
    raise Refused(Problem(key=key, value=1, why=why, remedy="none"))
def fault():
    raise RowFault("a fault without a name", "detail")
"""
    assert missing(source, "nothing here") == {
        "a note that nobody wrote down", "a refusal nobody knows", "a fault without a name",
    }  # fmt: skip
    assert missing(source, "`a note that  nobody wrote down` a refusal\nnobody knows, a fault without a name") == set()


def test_every_example_of_a_row_in_the_page_is_one() -> None:
    blocks = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    rows = [json.loads(line) for block in blocks for line in block.splitlines()]
    kinds = [example_of(row).kind for row in rows]
    assert set(kinds) == set(KINDS)
    assert any(example_of(row).tools for row in rows)
