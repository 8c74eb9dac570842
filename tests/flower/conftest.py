"""Flower's messages need to know which task makes them, which a running ServerApp is told by the SuperLink."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:  # older or newer than we know, or not there at all: then the tests say so themselves
        return
    for name, value in (("_task_id", 1), ("_run_id", 1), ("_node_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, value)
