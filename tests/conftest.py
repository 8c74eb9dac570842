"""Settings shared by all tests; small federations, models and rules to test with are in `tiny.py`."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
from grouping import group_of
from hypothesis import HealthCheck, settings

from consilience.engines.vectorised import program, traced

# the same cases on every run, and no deadline: the first case pays for torch's lazy set-up
settings.register_profile(
    "consilience", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("consilience")


os.environ.setdefault("CONSILIENCE_REPORT", "0")  # no run draws a report, which takes seconds, unless told to


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Contract tests come last: there are many short groups of them, so that no worker waits long at the end."""
    items.sort(key=lambda item: item.path.parent.name == "contract")


def pytest_collection_finish() -> None:
    """Keep thousands of tests, which stay until the end, out of every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers of pytest-xdist take whole groups of tests, which share fixtures and cached runs.

    Not by `xdist_group` marks: with pytest 9.2, pytest-xdist 3.8 accepts them and groups nothing.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tracing of steps, which takes longer than a test's few steps themselves."""
    monkeypatch.setattr(program, "HOT", 10**9)
    monkeypatch.setattr(traced, "HOT", 10**9)
