"""Canonical JSON: equal values give equal bytes; input is checked when it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NoReturn

import numpy as np
from torch import Tensor

from consilience.core.settings import Invalid
from consilience.runs.names import plain

_DEEPEST = 32
_LARGEST = 1 << 4096  # Python itself refuses to read numbers of more than 4300 digits


def to_json_types(value: Any, place: str, *, nonfinite_as_null: bool = False, depth: int = 0) -> Any:
    """The value in JSON's own types (tuples, arrays, tensors, paths changed), or `Invalid` with its place."""
    if depth > _DEEPEST:
        raise Invalid(f"{plain(place)} is nested more than {_DEEPEST} deep: flatten it")
    if isinstance(value, (np.generic, np.ndarray, Tensor)):
        value = value.tolist()
    elif isinstance(value, PurePath):
        value = str(value)
    if isinstance(value, float) and not math.isfinite(value):
        if nonfinite_as_null:
            return None
        raise Invalid(f"{plain(place)} = {value} is not a number JSON knows: store None, or leave it out")
    if isinstance(value, int) and abs(value) >= _LARGEST:
        raise Invalid(f"{plain(place)} is a whole number of more than 4096 bits: store it as text")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    options: dict[str, Any] = {"nonfinite_as_null": nonfinite_as_null, "depth": depth + 1}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise Invalid(f"{plain(place)} has the key {plain(repr(key))}: JSON keys are text")
        return {key: to_json_types(item, f"{place}.{key}", **options) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_types(item, f"{place}[{i}]", **options) for i, item in enumerate(value)]
    raise Invalid(f"{plain(place)} is {type(value).__name__}: store numbers, text, lists or mappings")


def encode(value: Any, *, pretty: bool = False) -> bytes:
    """Values of JSON's own types as ASCII JSON with sorted keys: one line, or indented for people."""
    spelling: dict[str, Any] = {"indent": 1} if pretty else {"separators": (",", ":")}
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False, **spelling)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return (text + "\n" * pretty).encode("ascii")


def decode(data: bytes) -> Any:
    """Strict JSON; `ValueError` for bad text, NaN and infinities, a key given twice, or endless nesting."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse, object_pairs_hook=_once_each)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found
