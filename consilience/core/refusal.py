"""Why a reply was refused: client, key and reason, on one line of printable characters."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

LONGEST_NUMBER = 64  # bits


def plain(text: Any, most: int = 200) -> str:
    """Any text on one line: unprintable characters escaped, cut after `most` characters with a note."""
    if isinstance(text, int) and text.bit_length() > LONGEST_NUMBER:
        return f"a number of {text.bit_length()} bits"  # Python refuses to print those with thousands of digits
    text = str(text)
    shown = "".join(map(_printable, text[:most]))
    if len(text) <= most and len(shown) <= most:
        return shown
    return f"{shown[:most]}... ({len(text)} characters)"


def _printable(character: str) -> str:
    # isprintable is false for controls, line separators, bidirectional marks and lone surrogates.
    if character == "\\":
        return "\\\\"  # otherwise an escape in the text could not be distinguished from ours
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One reply that was refused: who sent it, why, and which of its tensors was the reason, if any."""

    client: int | str
    reason: str  # one of our own words, such as `shape`, by which refusals are counted
    key: str = ""
    detail: str = ""

    def __str__(self) -> str:
        where = f" in {plain(self.key, most=120)}" if self.key else ""
        why = f": {plain(self.detail)}" if self.detail else ""
        return f"client {plain(self.client, most=64)} refused: {self.reason}{where}{why}"


class Refused(ValueError):
    """Raised for a reply that must not be used."""

    def __init__(self, reason: str, *, key: str = "", detail: str = "") -> None:
        self.reason, self.key, self.detail = reason, key, detail
        where, why = f" in {plain(key, most=120)}" if key else "", f": {plain(detail)}" if detail else ""
        super().__init__(f"{reason}{where}{why}")

    def by(self, client: int | str) -> Refusal:
        """The refusal of this client's reply."""
        return Refusal(client=client, reason=self.reason, key=self.key, detail=self.detail)

    def at(self, key: str) -> Refused:
        """The same, with the tensor named."""
        return self if self.key else Refused(self.reason, key=key, detail=self.detail)


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Context for code that parses one client's reply: any error becomes `Refused`, so other replies are unaffected."""
    try:
        yield
    except Refused:
        raise
    except Exception as problem:
        raise Refused("format", detail=f"{type(problem).__name__}: {plain(problem, most=80)}") from None


def tally(refusals: Iterable[Refusal]) -> dict[str, int]:
    """How many were refused for each reason, by reason."""
    return dict(sorted(Counter(refusal.reason for refusal in refusals).items()))
