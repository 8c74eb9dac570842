"""Finds secrets by the names of their keys and redacts them, to keep them out of run folders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "***"

_SECRETS = (
    *("token", "password", "passwd", "passphrase", "pwd", "secret", "credential", "apikey"),
    *("bearer", "authorization"),
)
_KEY_OWNERS = {"api", "access", "private", "secret", "auth", "account", "signing", "encryption", "ssh"}
_PLAIN_KEYS = {
    *("text", "label", "image", "target", "feature", "column", "client", "group", "sort", "split"),
    *("partition", "cache", "primary", "foreign", "public"),
}
_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)|(?i:(?<=\bbearer )\s*\S+)")  # in an address, or in a request's header


def redacted(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the values of secret-looking keys (`hub.token`, `apiKey`) and without logins in other values."""
    return {key: _redact(value, key, key, []) for key, value in mapping.items()}


def secrets_in(mapping: Mapping[str, Any]) -> list[str]:
    """The dotted keys whose values `redacted` would hide."""
    found: list[str] = []
    for key, value in mapping.items():
        _redact(value, key, key, found)
    return list(dict.fromkeys(found))


def _redact(value: Any, key: str, place: str, found: list[str]) -> Any:
    if value is None or isinstance(value, bool) or value in ("", REDACTED):
        return value
    if _is_secret(str(key), value):
        found.append(place)
        return REDACTED
    if isinstance(value, Mapping):
        return {name: _redact(item, name, f"{place}.{name}", found) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact(item, key, place, found) for item in value]
    if isinstance(value, str) and (hidden := _LOGIN.sub(REDACTED, value)) != value:
        found.append(place)
        return hidden
    return value


def _is_secret(key: str, value: Any) -> bool:
    """Whether a key names a secret: `auth_token = "a"` does, `max_tokens = 9` and `text_key = "b"` do not."""
    number, text = isinstance(value, (int, float)), isinstance(value, str)
    words = [w for w in re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()) if w]
    for i, word in enumerate(words):
        if not text and i < len(words) - 1:
            continue
        before = words[i - 1] if i else ""
        if word == "key" and before not in _PLAIN_KEYS:
            return True
        if word == "keys" and before in _KEY_OWNERS:
            return True
        if word.endswith(_SECRETS) or (not number and word.removesuffix("s").endswith(_SECRETS)):
            return True
    return False
