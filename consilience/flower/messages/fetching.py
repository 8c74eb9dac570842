"""Fetches replies in other threads, so that a slow one delays neither the round nor the other replies.

Flower shows a reply as soon as its header is there, and then waits inside `pull_messages` for the tensors: up to two
hours, as long as the client sends a piece every three minutes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from consilience.flower.messages.pulling import MessageLimit, Pull, puller

SLOW = 1.0  # seconds after which a reply gets its own thread, and the others continue
LAST = 5.0  # seconds beyond the deadline for fetching what the clients had sent before it


class Fetching:
    """Complete replies from a Flower Grid; `look` returns in time whatever a client does."""

    def __init__(self, grid: Any) -> None:
        self._pull = puller(grid)
        self._bounds: dict[str, MessageLimit] = {}
        self._found: queue.SimpleQueue[list[Any] | BaseException] = queue.SimpleQueue()
        self._slow: dict[str, threading.Thread] = {}  # message -> the thread that is fetching its reply

    def expect(self, bounds: Mapping[str, MessageLimit]) -> None:
        """Set the size limits of the replies to these messages."""
        self._bounds |= bounds

    def forget_all_but(self, messages: Collection[str]) -> None:
        """Stop looking for replies to other messages."""
        self._bounds = {m: bound for m, bound in self._bounds.items() if m in messages}

    def look(self, messages: Sequence[str], until: float) -> list[Any]:
        """Complete replies to these messages so far; returns at most `LAST` seconds after `until` (monotonic)."""
        self._slow = {message: thread for message, thread in self._slow.items() if thread.is_alive()}
        left = [message for message in messages if message not in self._slow]
        replies = self._collected()
        while left and (walk := self._walk(left, until + LAST)) is not None:
            replies += self._collected()
            left = walk
        return replies + self._collected()

    def _walk(self, messages: list[str], end: float) -> list[str] | None:
        """Fetch replies in order; returns the messages after a slow one, for the next walk, or None at the end."""
        walk = _Walk(self._pull, {message: self._bounds[message] for message in messages}, self._found)
        walk.thread.start()
        while walk.thread.is_alive():
            now = time.monotonic()
            slow = now - walk.since >= SLOW
            if slow or now >= end:
                at = walk.leave()
                if at is not None:
                    self._slow[messages[at]] = walk.thread
                    return messages[at + 1 :] if now < end else None
            walk.thread.join(max(0.01, min(end - now, SLOW / 4)))
        return None

    def _collected(self) -> list[Any]:
        found: list[Any] = []
        while not self._found.empty():
            one = self._found.get()
            if isinstance(one, BaseException):
                raise one
            found += one
        return found


class _Walk:
    """One thread that fetches replies in order; after `leave` it ends with the current one."""

    def __init__(
        self, pull: Pull, messages: dict[str, MessageLimit], found: queue.SimpleQueue[list[Any] | BaseException]
    ) -> None:
        self._pull, self._messages, self._found = pull, messages, found
        self._lock = threading.Lock()
        self._at, self._left = 0, False
        self.since = time.monotonic()  # start time of the current message
        self.thread = threading.Thread(target=self._go, daemon=True)  # must not keep a finished server running

    def leave(self) -> int | None:
        """End after the current message, which is returned; None if it has just ended."""
        with self._lock:
            self._left = True
            return self._at if self._at < len(self._messages) else None

    def _go(self) -> None:
        try:
            for message, bound in self._messages.items():
                self._found.put(self._pull(message, bound))
                with self._lock:
                    if self._left:
                        return
                    self._at, self.since = self._at + 1, time.monotonic()
        except BaseException as problem:  # raised again in the server's thread
            self._found.put(problem)
