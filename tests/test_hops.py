"""How much code lies between a command and a client's step, as `benchmarks/hops.py` counts it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def hops(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The benchmark as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import hops

    yield hops
    sys.modules.pop("hops")


def test_a_simulated_run_takes_few_hops(hops: ModuleType, tmp_path: Path) -> None:
    found = hops.simulated(tmp_path)
    assert found.generators[-1] == "run" and len(found.generators) <= 3
    assert found.recipes["config"] <= 3 and found.recipes["run"] == 0, "the algorithm is built more than once"
    assert found.built("Vectorised") == 1
    assert 0 < found.depth <= 20
    assert len(found.parts["round"]) <= 247


def test_deployed_clients_keep_their_engines(hops: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'consilience[flower]'")
    found = hops.deployed(tmp_path)
    assert len(found.generators) <= 3
    assert found.built("Vectorised") == 2, "two nodes, two rounds: one engine each"
    assert len(found.parts["round"]) <= 335
    assert len(found.parts["message"]) <= 125
