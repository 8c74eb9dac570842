"""Text from outside on one line: what gets printed or logged can neither forge lines nor fill a screen."""

from __future__ import annotations

from typing import Any

LONGEST_NUMBER = 64  # bits


def plain(text: Any, most: int = 200) -> str:
    """Any text on one line of at most `most` characters and a note: the unprintable escaped, the rest cut."""
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
        return "\\\\"  # else an escape that was in the text could not be told from ours
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
