"""The pages and pasted outputs made from the code equal what the code says now; `make docs` rewrites them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from halo_core import config as configuration
from halo_core.config import KEYS
from halo_core.config.read import FOREIGN

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "docs" / "files"


def load_generator() -> ModuleType:
    """Return docs/generate.py, which lies in no package."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generator()
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", generate.pages())
def test_a_page_shows_what_the_code_says_now(page: str) -> None:
    assert generate.read(page) == generate.fresh(page), "run `make docs`"


def test_every_page_that_shows_the_code_is_compared() -> None:
    assert {"README.md", "docs/coming-from-trl.md", "docs/configuration.md", "docs/support-matrix.md"} <= set(
        generate.pages()
    )


def test_a_piece_that_is_out_of_date_is_found() -> None:
    piece = "before\n<!-- file: docs/files/messages.jsonl -->\n```json\nold\n```\n<!-- end -->\nafter\n"
    renewed = generate.renewed(piece)
    assert (FILES / "messages.jsonl").read_text() in renewed
    assert renewed.startswith("before\n<!-- file: ") and renewed.endswith("\n<!-- end -->\nafter\n")
    assert generate.renewed(renewed) == renewed


@pytest.mark.parametrize(
    ("piece", "why"),
    [
        ("command: halo train docs/files/three-mistakes.yaml", "ended with 2 instead of 0"),
        ("command (until step): halo matrix --why lfm2 sft", "no line that begins with"),
        ("command: rm -rf docs", "only halo's own commands"),
    ],
)
def test_a_command_that_does_not_do_what_the_page_says_is_an_error(piece: str, why: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=why):
        generate.renewed(f"<!-- {piece} -->\n<!-- end -->")


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", file.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = file.parent / path if path else file
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            lost.append(link)
    assert not lost


def test_the_yaml_for_trl_is_one_that_trl_knows() -> None:
    from trl.scripts.sft import make_parser

    arguments = ["--config", str(FILES / "trl.yaml"), "--use_cpu", "true"]
    *_, unknown = make_parser().parse_args_and_config(args=arguments, return_remaining_strings=True)
    assert unknown == []


def test_the_two_yaml_files_differ_in_the_lines_that_the_page_names() -> None:
    theirs, ours = (yaml.safe_load((FILES / name).read_text()) for name in ("trl.yaml", "halo.yaml"))
    assert {key for key in theirs | ours if theirs.get(key) != ours.get(key)} == {
        "bf16",
        "dataset_num_proc",
        "overlong",
    }
    read = configuration.read(FILES / "halo.yaml")
    assert (read.problems, read.notes) == ((), ())
    assert set(theirs) <= set(KEYS) | set(FOREIGN)
