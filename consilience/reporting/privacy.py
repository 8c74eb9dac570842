"""Whether the epsilon of a run protects anyone, in words."""

from __future__ import annotations

from typing import Any


def not_private(facts: dict[str, Any]) -> str:
    """A warning where noise was added that whoever knows its seed can take off again; else nothing."""
    privacy = facts.get("privacy")
    seeded = isinstance(privacy, dict) and privacy.get("private") is False
    return "not private: noise drawn from algorithm.noise_seed can be taken off again" if seeded else ""
