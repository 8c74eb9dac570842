"""Names and texts from outside: an allow-list for what becomes a path, an escape for what gets printed."""

from __future__ import annotations

import re
from typing import Any

from consilience.core.checks import Invalid

LONGEST = 64

_DEVICES = {"con", "prn", "aux", "nul"} | {f"{port}{n}" for port in ("com", "lpt") for n in range(10)}


def safe_name(text: Any, what: str) -> str:
    """A run, client or metric name fit to be a path component on any system, or `Invalid` with the reason."""
    reason = _why_not(text)
    if reason:
        raise Invalid(
            f"{what} = {plain(repr(text), most=100)} {reason}: use 1 to {LONGEST} of the characters "
            "A-Z a-z 0-9 . _ - and begin with a letter, a digit or _"
        )
    return str(text)


def plain(text: Any, most: int = 200) -> str:
    """Any text on one line of at most `most` characters and a note: the unprintable escaped, the rest cut."""
    text = str(text)
    shown = "".join(map(_printable, text[:most]))
    if len(text) <= most and len(shown) <= most:
        return shown
    return f"{shown[:most]}... ({len(text)} characters)"


def _why_not(text: Any) -> str:
    if not isinstance(text, str):
        return f"is {type(text).__name__}, not text"
    if not text:
        return "is empty"
    if len(text) > LONGEST:
        return f"is {len(text)} characters long"
    bad = re.search(r"[^A-Za-z0-9._-]", text)
    if bad:
        return f"holds {bad[0]!a}, which is not allowed"
    if text[0] in ".-":
        return f"begins with {text[0]!r}"
    if text[-1] == ".":
        return "ends with '.'"
    if text.split(".")[0].lower() in _DEVICES:
        return f"is a device name on Windows ({text.split('.')[0]})"
    return ""


def _printable(character: str) -> str:
    # isprintable is false for controls, line separators, bidirectional marks and lone surrogates.
    if character == "\\":
        return "\\\\"  # else an escape that was in the text could not be told from ours
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
