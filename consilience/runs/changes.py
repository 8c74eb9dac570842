"""What differs between two configs, in words: the reason a resume is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from consilience.runs.names import plain
from consilience.runs.redact import masked

_ABSENT = object()


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """'train.lr: 0.1 -> 0.2' for every setting that differs; secrets are masked."""
    changes = []
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key, _ABSENT), now.get(key, _ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes += changed_keys(old, new, f"{prefix}{key}.")
        elif type(old) is not type(new) or old != new:
            changes.append(f"{prefix}{plain(key)}: {_shown(key, old)} -> {_shown(key, new)}")
    return changes


def _shown(key: str, value: Any) -> str:
    return "(absent)" if value is _ABSENT else plain(repr(masked({key: value})[key]), most=80)
