"""What a person sees while rows are prepared: a bar on a terminal, nothing elsewhere.

Not for the account that follows (`account.py`) nor for training's own lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

Advance: TypeAlias = Callable[[int], None]
"""Told how many more rows are done."""

Waiting: TypeAlias = Callable[[str, Callable[[], int | None]], AbstractContextManager[Advance]]
"""(what is done, how many rows there are or None) -> a context that is told of the progress."""


@contextmanager
def silent(what: str, count: Callable[[], int | None]) -> Iterator[Advance]:
    """Show nothing."""
    yield lambda rows: None


@contextmanager
def bar(what: str, count: Callable[[], int | None]) -> Iterator[Advance]:
    """Show a bar on a terminal's error stream, gone when it is done; nothing where there is no terminal."""
    from rich import progress as rich_progress
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda rows: None
        return
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=count())
        yield lambda rows: progress.advance(task, rows)
