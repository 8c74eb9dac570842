"""A limited number of warnings about nodes, so that one node cannot fill the server's disk."""

from __future__ import annotations

import logging
from collections import Counter
from types import TracebackType

log = logging.getLogger("consilience.flower")

PER_SENDER = 3
IN_ALL = 20


class LimitedLog:
    """`with LimitedLog("round 3") as warnings:` logs the first few of each sender and in all, and counts the rest.

    `logged` counts by sender what was logged before, for repeated warnings.
    """

    def __init__(self, subject: str, logged: Counter[str] | None = None) -> None:
        self._subject, self._logged = subject, Counter() if logged is None else logged
        self._lines = 0
        self._left_out: Counter[str] = Counter()

    def add(self, sender: str, text: object) -> None:
        """One line about a node or client."""
        if self._logged[sender] < PER_SENDER and self._lines < IN_ALL:
            self._logged[sender] += 1
            self._lines += 1
            log.warning("%s: %s", self._subject, text)
        else:
            self._left_out[sender] += 1

    def __enter__(self) -> LimitedLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._left_out and self._lines:
            most = ", ".join(f"{sender}: {count:,}" for sender, count in self._left_out.most_common(PER_SENDER))
            log.warning("%s: %d more warnings are left out (%s)", self._subject, self._left_out.total(), most)
