"""The time left that a run shows, by a clock that the test moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from consilience.reporting import progress


def test_the_first_round_counts_alone_until_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    clock = progress._Clock(rounds=10, done=2)

    def after(seconds: float, number: int) -> str:
        now[0] += seconds
        finished: Any = SimpleNamespace(round=SimpleNamespace(number=number))
        return clock.left(finished)

    assert after(30, 3) == "3:30"  # 7 rounds as long as the first, which measures and compiles
    assert after(4, 4) == "0:24"  # 6 rounds of 4 s: the first no longer counts
    assert after(8, 5) == "0:30"  # 5 rounds of (4 + 8) / 2 s
    assert after(6, 10) == "0:00"
