"""How far the round in progress is: engines count clients that are done, whoever shows it listens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Listener = Callable[[int, int], None]
"""(clients done, clients of the round)."""

_listener: Listener | None = None
_done, _of = 0, 0


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell this listener, instead of another, while the block lasts."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def begin(of: int) -> None:
    """A round's training begins, with so many clients."""
    global _done, _of
    _done, _of = 0, of
    _tell()


def add(clients: int = 1) -> None:
    """So many more are done."""
    global _done
    _done = min(_of, _done + clients)
    _tell()


def reach(done: int) -> None:
    """At least so many are done."""
    global _done
    if done > _done:
        _done = min(_of, done)
        _tell()


def _tell() -> None:
    if _listener is not None and _of:
        _listener(_done, _of)
