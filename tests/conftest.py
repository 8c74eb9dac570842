"""Settings shared by all tests; small federations, models and rules to test with are in `tiny.py`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from consilience.engines import program

# the same cases on every run, and no deadline: the first case pays for torch's lazy set-up
settings.register_profile(
    "consilience", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("consilience")


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tracing of steps, which takes longer than a test's few steps themselves."""
    monkeypatch.setattr(program, "HOT", 10**9)
    monkeypatch.setattr(program.Traced, "__call__", lambda self, *arguments: self._function(*arguments))
