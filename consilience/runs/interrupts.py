"""SIGINT and SIGTERM end a run after the round in progress; a second one ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOTE = b"\x1b[?25h" if os.isatty(2) else b""  # show the cursor, which a live display hides


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
        with contextlib.suppress(OSError):
            name = signal.Signals(number).name.encode()
            os.write(2, b"\n%s%s: finishing this round and saving; once more to exit at once\n" % (_NOTE, name))
