"""Nothing that a run keeps in memory grows with its rounds: counted, not timed (benchmarks/long_run.py has times)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.usefixtures("untraced"),
]


@pytest.fixture
def long_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import long_run

    return long_run


@pytest.mark.parametrize("algorithm", ["fedavg", "dp_fedavg"])
def test_descriptors_and_objects_stay_the_same(algorithm: str, long_run: Any, tmp_path: Path) -> None:
    if algorithm == "dp_fedavg":
        pytest.importorskip("dp_accounting", reason="the extra `dp` is not installed")
    from consilience.experiments import runner
    from consilience.experiments.config.config import from_table

    meter = long_run.Meter(50)
    runner.execute(from_table(long_run.table(250, algorithm)), folder=tmp_path / "run", watch=meter)
    first, *_, last = meter.rows[2:]  # by then the accountant's caches are full
    assert first["fds"] == last["fds"]
    assert last["objects"] - first["objects"] < 50  # one object kept in each round would be 100
