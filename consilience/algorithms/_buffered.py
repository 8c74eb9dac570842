"""Shared code of the asynchronous recipes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from consilience.core.algorithm import Algorithm
from consilience.server.averaging.averaging import Averaging
from consilience.server.rules.buffered import Buffered


def buffered(algorithm: Algorithm, **options: Any) -> Algorithm:
    """Asynchronous form of an algorithm: the server updates the model whenever its buffer is full."""
    assert isinstance(algorithm.server, Averaging)
    return replace(algorithm, server=Buffered(averaging=algorithm.server, **options))
