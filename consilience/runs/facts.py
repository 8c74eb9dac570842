"""The facts of a run, as `run.json` holds them under a digest of their own."""

from __future__ import annotations

import datetime
import hashlib
import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from consilience.core.settings import Invalid
from consilience.runs import canonical, identity
from consilience.runs.names import plain
from consilience.runs.redact import redacted

FORMAT = 2
READABLE = (1, FORMAT)  # 1: without digests of the folder's own files
FIXED = ("format", "name", "created", "digest", "files")


def prepare_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts as they are stored; the caller may not set those that describe the folder itself."""
    for name in FIXED:
        if name in facts:
            raise Invalid(f"the fact {name!r} of a run cannot be changed: record it under another name")
    return redacted(canonical.to_json_types(facts, "facts", nonfinite_as_null=True))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def with_digest(facts: dict[str, Any]) -> bytes:
    """Facts as `run.json` holds them; format 1 has no digest."""
    signed = facts if facts["format"] == 1 else facts | {"digest": sha256(canonical.encode(facts))}
    return canonical.encode(signed, pretty=True)


def checked_facts(data: bytes) -> dict[str, Any]:
    """What `with_digest` wrote; `ValueError` for anything else."""
    facts = canonical.decode(data)
    if not isinstance(facts, dict):
        raise ValueError("it holds no JSON object")
    version = facts.get("format")
    if type(version) is not int or version not in READABLE:
        raise ValueError(f"it has format {plain(repr(version))}; this version reads {READABLE[0]} and {FORMAT}")
    if version == 1 and "digest" in facts:
        raise ValueError("it has a digest, which its format has not")
    if version > 1 and facts.pop("digest", None) != sha256(canonical.encode(facts)):
        raise ValueError("its digest is not that of its content")
    if version > 1 and with_digest(facts) != data:
        raise ValueError("it is not spelled as it was written")
    return facts


def described(name: str) -> dict[str, Any]:
    """The facts every run starts with."""
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "consilience": identity.own_version(),
    }
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        "format": FORMAT,
        "name": name,
        "created": created,
        "versions": versions,
        "platform": platform.platform(),
    }
