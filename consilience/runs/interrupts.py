"""SIGINT and SIGTERM end a run after the round in progress; a second one ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOTE = b"\x1b[?25h" if os.isatty(2) else b""  # show the cursor, which a live display hides

_displays: list[Callable[[str], None]] = []


class Interrupts:
    """`with Interrupts() as interrupts:` then look at `interrupts.asked`: 0, or the signal that asked to stop."""

    def __init__(self) -> None:
        self.asked = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread set handlers
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)  # by the system, so that it works inside a long computation too
        note = f"{signal.Signals(number).name}: finishing this round and saving; once more to exit at once"
        with contextlib.suppress(OSError):
            os.write(2, _NOTE if _displays else b"\n%s%s\n" % (_NOTE, note.encode()))
        for display in _displays:
            display(note)


@contextlib.contextmanager
def noted_by(display: Callable[[str], None]) -> Iterator[None]:
    """Let a live display show an interrupt: what is written beside it would be painted over.

    display: called in a signal handler, so it may only keep the text.
    """
    _displays.append(display)
    try:
        yield
    finally:
        _displays.remove(display)
