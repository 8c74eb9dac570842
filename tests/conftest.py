"""Settings shared by all tests; small federations, models and rules to test with are in `tiny.py`."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from consilience.engines.vectorised import program

# the same cases on every run, and no deadline: the first case pays for torch's lazy set-up
settings.register_profile(
    "consilience", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("consilience")


os.environ.setdefault("CONSILIENCE_REPORT", "0")  # no run draws a report, which takes seconds, unless told to


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers of pytest-xdist take whole files, whose tests share what they cached.

    Contract tests go recipe by recipe and documents page by page. Contract tests come last: there are many short groups
    of them, so that no worker waits long for another at the end.
    """
    items.sort(key=lambda item: item.path.parent.name == "contract")
    for item in items:
        given = getattr(item, "callspec", None) and item.callspec.params
        contract, document = item.path.parent.name == "contract", item.path.name.startswith("test_docs")
        part = given and ((contract and given.get("name")) or (document and given.get("file")))
        item.add_marker(pytest.mark.xdist_group(f"{item.path} {part}" if part else str(item.path)))


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tracing of steps, which takes longer than a test's few steps themselves."""
    monkeypatch.setattr(program, "HOT", 10**9)
    monkeypatch.setattr(program.Traced, "__call__", lambda self, *arguments: self._function(*arguments))
