"""Settings shared by all tests; small federations, models and rules to test with are in `tiny.py`."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import typer.main
import typer.testing
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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """No garbage collection while thousands of tests, which all stay until the end, come into being."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.set_threshold(10_000)  # by default 700: a trace makes more at once, and they would be looked at many times


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Keep all that is there before a file's tests, such as all tests, out of the garbage collections in them."""
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


@pytest.fixture(scope="session", autouse=True)
def _one_command_line() -> Iterator[None]:
    """Tests call the commands hundreds of times in one process: their options are read off the functions once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(typer.testing, "_get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tracing of steps, which takes longer than a test's few steps themselves."""
    monkeypatch.setattr(program, "HOT", 10**9)
    monkeypatch.setattr(traced, "HOT", 10**9)
