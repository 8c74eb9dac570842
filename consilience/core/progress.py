"""Progress within a round: engines count finished clients, and a listener displays the count."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Listener = Callable[[int, int], None]
"""(finished clients, clients of the round)."""

_listener: Listener | None = None
_done, _of = 0, 0


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Use this listener in place of any other within the block; clients of an earlier round are forgotten."""
    global _listener, _done, _of
    before, _listener = _listener, listener
    _done, _of = 0, 0
    try:
        yield
    finally:
        _listener = before


def begin(of: int) -> None:
    """Start counting a round with this many clients."""
    global _done, _of
    _done, _of = 0, of
    add(0)


def add(clients: int = 1) -> None:
    """Count this many more clients as finished."""
    global _done
    _done = min(_of, _done + clients)
    if _listener is not None and _of:
        _listener(_done, _of)
