"""Makes the quickstart's rows: small chat tasks that a model of a million parameters can learn in a minute.

Not a benchmark. Prompts of `heldout.jsonl` never occur in `train.jsonl`: every task first deals its cases into the two
parts, and `check` looks again at what was written.

    python examples/quickstart/make_data.py            writes both files beside this script
    python examples/quickstart/make_data.py --check    exits with 1 when they differ from what it would write
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

SEED = 0
FOLDER = Path(__file__).parent
HELD_OUT_PER_TASK = 20

OPPOSITES = """hot cold, big small, up down, left right, open closed, day night, happy sad, fast slow, hard soft,
full empty, light dark, early late, rich poor, old young, high low, long short, wet dry, loud quiet, near far,
thick thin, true false, first last, inside outside, clean dirty, strong weak, sweet sour, start end, win lose"""

CAPITALS = """France Paris, Italy Rome, Spain Madrid, Germany Berlin, Japan Tokyo, Egypt Cairo, Norway Oslo, Peru Lima,
Greece Athens, Cuba Havana, Kenya Nairobi, Austria Vienna, Poland Warsaw, Portugal Lisbon, Ireland Dublin,
Hungary Budapest, China Beijing, Russia Moscow, Canada Ottawa, Sweden Stockholm, Denmark Copenhagen, Finland Helsinki"""

WORDS = "red blue green apple river stone bird cloud tree house fish star moon rain sun hand book chair door bread"

ASK_OPPOSITE = (
    "What is the opposite of {}?",
    "Tell me the opposite of {}.",
    "Give me a word that means the opposite of {}.",
    "The opposite of {} is what?",
    "Which word is the opposite of {}?",
)
ASK_CAPITAL = (
    "What is the capital of {}?",
    "Tell me the capital of {}.",
    "Which city is the capital of {}?",
    "The capital of {} is what?",
    "Give me the name of the capital of {}.",
)

Case = tuple[str, str]
"""A prompt and its only right answer."""


def pairs(text: str) -> list[tuple[str, str]]:
    """Return the word pairs of a comma-separated list."""
    return [(first, second) for first, second in (pair.split() for pair in text.split(","))]


def reworded(known: list[tuple[str, str]], phrasings: tuple[str, ...]) -> tuple[list[Case], list[Case]]:
    """Deal facts in several wordings: of each fact one wording is held out, and the others are trained."""
    train, held_out = [], []
    for index, (subject, answer) in enumerate(known):
        for number, phrasing in enumerate(phrasings):
            part = held_out if number == index % len(phrasings) else train
            part.append((phrasing.format(subject), answer))
    return train, held_out


def dealt(cases: Iterator[Case], count: int, source: random.Random) -> tuple[list[Case], list[Case]]:
    """Take `count` different cases, and hold out `HELD_OUT_PER_TASK` of them."""
    found: dict[str, str] = {}
    for prompt, answer in cases:
        found[prompt] = answer
        if len(found) == count:
            break
    listed = list(found.items())
    source.shuffle(listed)
    return listed[HELD_OUT_PER_TASK:], listed[:HELD_OUT_PER_TASK]


def next_numbers(source: random.Random) -> Iterator[Case]:
    """Yield questions for the number after one below a thousand."""
    while True:
        number = source.randrange(1000)
        yield f"Which number comes after {number}?", str(number + 1)


def larger_numbers(source: random.Random) -> Iterator[Case]:
    """Yield questions for the larger of two numbers below a hundred."""
    while True:
        first, second = source.sample(range(100), 2)
        yield f"Which is larger, {first} or {second}?", str(max(first, second))


def sorted_digits(source: random.Random) -> Iterator[Case]:
    """Yield four digits to be sorted."""
    while True:
        digits = [str(digit) for digit in source.sample(range(10), 4)]
        yield f"Sort these numbers: {' '.join(digits)}", " ".join(sorted(digits))


def reversed_words(source: random.Random) -> Iterator[Case]:
    """Yield two to four words to be said backwards."""
    while True:
        words = source.sample(WORDS.split(), source.randint(2, 4))
        yield f"Reverse this list: {' '.join(words)}", " ".join(reversed(words))


def tasks(seed: int = SEED) -> dict[str, tuple[list[Case], list[Case]]]:
    """Return for every task its trained and its held-out cases; the same seed gives the same cases."""
    source = random.Random(seed)
    both_ways = [pair for a, b in pairs(OPPOSITES) for pair in ((a, b), (b, a))]
    return {
        "opposites": reworded(both_ways, ASK_OPPOSITE),
        "capitals": reworded(pairs(CAPITALS), ASK_CAPITAL),
        "next number": dealt(next_numbers(source), 520, source),
        "larger number": dealt(larger_numbers(source), 620, source),
        "sort digits": dealt(sorted_digits(source), 720, source),
        "reverse words": dealt(reversed_words(source), 820, source),
    }


def rows(seed: int = SEED) -> tuple[list[dict], list[dict]]:
    """Return the training rows and the held-out rows, each part in a fixed shuffled order."""
    source = random.Random(seed)
    train, held_out = [], []
    for name, (trained_cases, held_out_cases) in tasks(seed).items():
        train += [{"messages": messages(*case)} for case in trained_cases]
        chosen = source.sample(held_out_cases, HELD_OUT_PER_TASK)
        held_out += [{"task": name, "messages": messages(*case)} for case in chosen]
    source.shuffle(train)
    source.shuffle(held_out)
    return train, held_out


def messages(prompt: str, answer: str) -> list[dict[str, str]]:
    """Return a case as one turn of chat."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def check(train: list[dict], held_out: list[dict]) -> None:
    """Raise ValueError when a held-out prompt occurs in training, in any spelling of case and blanks."""

    def prompt(row: dict) -> str:
        return " ".join(row["messages"][0]["content"].lower().split())

    both = {prompt(row) for row in train} & {prompt(row) for row in held_out}
    if both:
        raise ValueError(f"held-out prompts that are trained on: {sorted(both)}")


def as_lines(part: list[dict]) -> str:
    """Return rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in part)


def main() -> int:
    """Write the two files, or with --check compare them; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the files differ")
    only_check = parser.parse_args().check
    train, held_out = rows()
    check(train, held_out)
    for name, part in (("train.jsonl", train), ("heldout.jsonl", held_out)):
        path = FOLDER / name
        if not only_check:
            path.write_text(as_lines(part), encoding="utf-8")
            print(f"{path}: {len(part)} rows")
        elif path.read_text(encoding="utf-8") != as_lines(part):
            print(f"{path} is not what {Path(__file__).name} makes; run it again")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
