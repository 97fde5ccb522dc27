"""What the first pass of a recomputed layer found out, handed to its recomputation in the same order.

Not for routing: a recomputed router makes the same choice because its own choices are replayed. Because it does, the
tickets of dispatches stay right, and a recomputation neither counts rows nor waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import TypeVar

from halo_core.expert_parallel.dispatcher import Ticket

AnyTicket = TypeVar("AnyTicket", bound=Ticket)
_PASS: ContextVar[FirstPass | SecondPass | None] = ContextVar("recomputed layer", default=None)


class FirstPass:
    """A context in which every dispatch leaves its ticket in `tickets`."""

    def __init__(self, tickets: deque[Ticket]) -> None:
        self.tickets = tickets
        self._outer: list[Token[FirstPass | SecondPass | None]] = []

    def __enter__(self) -> None:
        self._outer.append(_PASS.set(self))

    def __exit__(self, *_: object) -> None:
        _PASS.reset(self._outer.pop())


class SecondPass(FirstPass):
    """A context in which every dispatch takes the ticket that its first pass left."""


def ticket(make: Callable[[], AnyTicket]) -> AnyTicket:
    """Return the first pass's ticket while a layer is recomputed, else what `make()` returns, left for that moment."""
    current = _PASS.get()
    if isinstance(current, SecondPass):
        return current.tickets.popleft()  # type: ignore[return-value]
    made = make()
    if current is not None:
        current.tickets.append(made)
    return made
