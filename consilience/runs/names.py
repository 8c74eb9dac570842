"""External names: an allow-list for names used as paths (`plain` is for printed text)."""

from __future__ import annotations

import re
from typing import Any

from consilience.core.refusal import plain as plain
from consilience.core.settings import Invalid

LONGEST = 64

_DEVICES = {"con", "prn", "aux", "nul"} | {f"{port}{n}" for port in ("com", "lpt") for n in range(10)}


def safe_name(text: Any, what: str) -> str:
    """A run, client or metric name that is a valid path component on any system, or `Invalid` with the reason."""
    reason = _why_not(text)
    if reason:
        raise Invalid(
            f"{what} = {plain(repr(text), most=100)} {reason}: use 1 to {LONGEST} of the characters "
            "A-Z a-z 0-9 . _ - and begin with a letter, a digit or _"
        )
    return str(text)


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
