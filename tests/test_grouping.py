"""Tests that share fixtures stay together when `make test` spreads them over two workers."""

from __future__ import annotations

import inspect

import pytest
from grouping import group_of


def test_files_recipes_and_pages_are_groups() -> None:
    contract = "tests/contract/test_algorithms.py"
    assert group_of("tests/engines/test_ray.py::test_a[fedavg]") == "tests/engines/test_ray.py"
    assert group_of(f"{contract}::test_a[convnet-fedavg-serial]") == group_of(f"{contract}::test_b[fedavg-batched]")
    assert group_of(f"{contract}::test_a[fedavg]") != group_of(f"{contract}::test_a[fedavgm]")
    assert group_of("tests/test_docs.py::test_a[docs/x.md]") == group_of("tests/test_docs.py::test_b[docs/x.md:12]")
    assert group_of("tests/test_docs.py::test_a[docs/x.md]") != group_of("tests/test_docs.py::test_a[docs/y.md]")


def test_pytest_xdist_still_asks_for_a_group_as_we_answer() -> None:
    scheduling = pytest.importorskip("xdist.scheduler").LoadScopeScheduling
    assert "_split_scope(nodeid)" in inspect.getsource(scheduling.schedule)
