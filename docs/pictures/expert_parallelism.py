"""Draws docs/pictures/expert-parallelism.svg: how the tokens of two processes reach their experts and come back.

Not for measuring. The rows and arrows are those that `halo_core.expert_parallel.rows` plans for the routing below.
`make docs` writes the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from halo_core.expert_parallel.rows import destinations, plan

EXPERTS, PROCESSES = 8, 2
CHOSEN = (
    ((0, 2), (1, 6), (5, 7)),  # of process 0: one token stays, one goes both ways, one leaves with both choices
    ((3, 4), (4, 7), (0, 1)),
)
"""Process -> token -> its experts."""

PER_PROCESS = EXPERTS // PROCESSES
WIDTH, HEIGHT, LANE = 1000, 580, 235
TOKENS_X, ROWS_X, EXPERTS_X, SUMS_X = 150, 400, 620, 900
COLOURS = ("#2563a8", "#b4561a")
PALE = ("#dbe8f5", "#f8e4d6")
INK, QUIET = "#222222", "#666666"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row: a token of a process that goes to a process, for `experts` there."""

    origin: int
    token: int
    destination: int
    experts: tuple[int, ...]


def rows() -> list[Row]:
    """Return the rows of all processes, in the order in which they are received."""
    found = []
    for origin, chosen in enumerate(CHOSEN):
        ids = torch.tensor(chosen)
        wanted = destinations(ids, PER_PROCESS, PROCESSES)
        planned = plan(ids, wanted, PER_PROCESS, int(wanted.sum()))
        pairs = zip(planned.token_of_row.tolist(), planned.destination_of_row.tolist(), strict=True)
        for token, destination in pairs:
            mine = tuple(expert for expert in chosen[token] if expert // PER_PROCESS == destination)
            found.append(Row(origin=origin, token=token, destination=destination, experts=mine))
    return sorted(found, key=lambda row: (row.destination, row.origin, row.token))


def svg() -> str:
    """Return the picture."""
    parts = [*_lanes(), *_headings(), *_flow(), *_tokens(TOKENS_X, "t"), *_tokens(SUMS_X, "y"), *_footer()]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="14" role="img" aria-label="Tokens of two processes travel to their experts and back">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *parts,
        "</svg>",
    ]) + "\n"  # fmt: skip


def _lane(process: int) -> float:
    return 60 + process * LANE


def _token_y(process: int, token: int) -> float:
    return _lane(process) + 45 + token * 62


def _lanes() -> Iterator[str]:
    for process in range(PROCESSES):
        first = process * PER_PROCESS
        yield _box(10, _lane(process), WIDTH - 20, LANE - 20, PALE[process], "none", radius=10)
        yield _text(24, _lane(process) + 24, f"process {process}", COLOURS[process], weight="bold", anchor="start")
        yield _text(24, _lane(process) + 42, f"experts {first}-{first + PER_PROCESS - 1}", QUIET, anchor="start")


def _headings() -> Iterator[str]:
    for x, text, below in (
        (TOKENS_X, "tokens", "each process has its own rows"),
        (ROWS_X, "rows received", "one per token and process"),
        (EXPERTS_X, "experts", "grouped GEMMs, weighted sums"),
        (SUMS_X, "sums", "of a token's rows"),
    ):
        yield _text(x, 24, text, INK, weight="bold")
        yield _text(x, 43, below, QUIET, size=12)
    for x, text in (((TOKENS_X + ROWS_X) / 2, "dispatch"), ((EXPERTS_X + SUMS_X) / 2, "combine")):
        yield _text(x, 24, f"{text} \u2192", QUIET)


def _flow() -> Iterator[str]:
    """Yield rows with the arrows to them, through the experts, and back."""
    received = dict.fromkeys(range(PROCESSES), 0)
    counts = {process: sum(row.destination == process for row in rows()) for process in received}
    lines, boxes = [], []
    for row in rows():
        step = (LANE - 60) / max(counts.values())
        y = _lane(row.destination) + 40 + (received[row.destination] + 0.5) * step - 5
        received[row.destination] += 1
        colour = COLOURS[row.origin]
        away = row.origin != row.destination
        token_y = _token_y(row.origin, row.token)
        lines.append(_arrow(TOKENS_X + 38, token_y, ROWS_X - 62, y, colour, away))
        lines.append(_arrow(ROWS_X + 62, y, EXPERTS_X - 55, y, colour, False))
        lines.append(_arrow(EXPERTS_X + 55, y, SUMS_X - 40, token_y, colour, away))
        boxes.append(_box(ROWS_X - 60, y - 12, 120, 24, "#ffffff", colour))
        boxes.append(_text(ROWS_X, y + 5, f"token {_name(row.origin, row.token)}", colour))
        boxes.append(_box(EXPERTS_X - 53, y - 12, 106, 24, "#ffffff", colour))
        label = "expert" if len(row.experts) == 1 else "experts"
        boxes.append(_text(EXPERTS_X, y + 5, f"{label} {', '.join(map(str, row.experts))}", colour))
    yield from lines
    yield from boxes


def _tokens(x: float, letter: str) -> Iterator[str]:
    for process, chosen in enumerate(CHOSEN):
        for token, experts in enumerate(chosen):
            y = _token_y(process, token)
            yield _box(x - 36, y - 15, 72, 30, "#ffffff", COLOURS[process])
            word = "token " if letter == "t" else "sum "
            yield _text(x, y + 5, word + _name(process, token), COLOURS[process])
            if letter == "t":
                yield _text(x, y + 30, f"experts {experts[0]}, {experts[1]}", QUIET, size=12)


def _footer() -> Iterator[str]:
    away = sum(row.origin != row.destination for row in rows())
    pairs = sum(e // PER_PROCESS != p for p, chosen in enumerate(CHOSEN) for experts in chosen for e in experts)
    yield _arrow(24, HEIGHT - 43, 74, HEIGHT - 43, INK, True)
    told = f"leaves the process: {away} rows there and {away} back. A row per chosen expert would be {pairs} each way."
    beside = "Counts go ahead of the rows; expert ids and routing weights go beside them."
    yield _text(84, HEIGHT - 38, told, INK, anchor="start")
    yield _text(84, HEIGHT - 17, beside, INK, anchor="start")


def _name(process: int, token: int) -> str:
    return f"{'ab'[process]}{token}"


def _box(x: float, y: float, width: float, height: float, fill: str, stroke: str, radius: int = 5) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" fill="{fill}" '
        f'stroke="{stroke}" stroke-width="1.5"/>'
    )


def _text(
    x: float, y: float, text: str, fill: str, *, size: int = 14, weight: str = "normal", anchor: str = "middle"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{text}</text>'
    )


def _arrow(x1: float, y1: float, x2: float, y2: float, colour: str, away: bool) -> str:
    bend = (x2 - x1) / 2
    dash = ' stroke-dasharray="6 4"' if away else ""
    return (
        f'<path d="M {x1:g} {y1:g} C {x1 + bend:g} {y1:g}, {x2 - bend:g} {y2:g}, {x2 - 7:g} {y2:g}" fill="none" '
        f'stroke="{colour}" stroke-width="2"{dash}/>'
        f'<path d="M {x2:g} {y2:g} l -8 -4 v 8 z" fill="{colour}"/>'
    )
