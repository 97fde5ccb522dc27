"""Turns the conversations of the installed package chatterbot-corpus into rows of `messages`.

Not a copy of them: the text stays in that package (BSD licence) and is read when this runs.

    python examples/chatterbot/make_data.py runs/chatterbot-data      writes train.jsonl and heldout.jsonl there
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import yaml

HELD_OUT_EVERY = 20
ROLES = ("user", "assistant")


def conversations(language: str = "english") -> Iterator[list[str]]:
    """Yield the turns of every conversation of one language, file by file in the order of their names."""
    folder = files("chatterbot_corpus") / "data" / language
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".yml"):
            yield from yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]


def messages(turns: list[str]) -> list[dict[str, str]]:
    """Return turns as messages of user and assistant in alternation; a last turn that nobody answers is left out."""
    answered = turns[: len(turns) // 2 * 2]
    return [{"role": ROLES[index % 2], "content": str(turn).strip()} for index, turn in enumerate(answered)]


def write(folder: Path) -> dict[str, int]:
    """Write both files and return how many rows each has. Conversations that occur twice are written once."""
    listed = [row for row in map(messages, conversations()) if row and all(turn["content"] for turn in row)]
    unique = list({json.dumps(row): row for row in listed}.values())
    held_out_prompts = {row[0]["content"].lower() for row in unique[::HELD_OUT_EVERY]}
    # Many questions occur with several answers: all rows of a held-out question are held out.
    parts = {"train.jsonl": [], "heldout.jsonl": []}
    for row in unique:
        parts["heldout.jsonl" if row[0]["content"].lower() in held_out_prompts else "train.jsonl"].append(row)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        lines = [json.dumps({"messages": row}, ensure_ascii=False) + "\n" for row in rows]
        (folder / name).write_text("".join(lines), encoding="utf-8")
    return {name: len(rows) for name, rows in parts.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write train.jsonl and heldout.jsonl")
    target = parser.parse_args().folder
    print(f"{target}: {write(target)}")
