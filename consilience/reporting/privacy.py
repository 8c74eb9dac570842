"""A warning about runs whose noise does not protect anyone."""

from __future__ import annotations

from typing import Any


def not_private(facts: dict[str, Any]) -> str:
    """A warning if the noise can be removed by anyone who knows its seed; else empty."""
    privacy = facts.get("privacy")
    seeded = isinstance(privacy, dict) and privacy.get("private") is False
    return "not private: noise drawn from algorithm.noise_seed can be taken off again" if seeded else ""
