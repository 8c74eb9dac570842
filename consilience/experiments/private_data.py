"""Data whose preparation looks at all rows: one client's rows then change the others', which no clipping bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from consilience.core.settings import Invalid

LEARNT = {
    **dict.fromkeys(("breast_cancer", "heart_disease", "uci_har_acc"), "scaled by statistics of all clients' rows"),
    "shakespeare": "numbered by the characters that all clients use",
}
"""Data sets of which this is true whatever their options."""
SCALES = "it scales every client's rows by statistics of all"
COUNTS = "it numbers tokens by how often all clients use them: use 'ngrams' or 'encoder'"


def refuse_shared_preparation(name: str, options: Mapping[str, Any]) -> None:
    """Refuse, for a private run, data that were prepared with what all clients' rows have in common."""
    if name in LEARNT:
        raise Invalid(f"a private run cannot have data.name = {name!r}: it is {LEARNT[name]}")
    form = "features" if "features" in options else "text"  # one of the two says how texts become numbers
    reasons = {
        "normalise": (options.get("normalise") == "standard", f"{SCALES}: use 'unit', 'signed' or 'none'"),
        "standardise": (options.get("standardise") is True, f"{SCALES}: use false"),
        "picture_encoder": (options.get("picture_encoder") is not None, SCALES),
        form: (options.get(form) in ("words", "characters"), COUNTS),
    }
    for option, (refused, reason) in reasons.items():
        if refused:
            raise Invalid(f"a private run cannot have data.{option} = {options[option]!r}: {reason}")
