"""A few cases of `benchmarks/chaos`, from a fixed seed: whatever happens, equal bits, and no saved round is lost."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and sets limits of other processes"),
]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')
    pytest.importorskip("dp_accounting", reason="the extra `dp` is not installed")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("chaos.__main__")


@pytest.mark.parametrize(("kind", "cases"), [("local", 2), ("deployed", 1)])
def test_disturbed_runs_end_as_undisturbed_ones(kind: str, cases: int, chaos: Any, tmp_path: Path) -> None:
    place = ["--place", str(tmp_path / "place"), "--minutes", "15"]
    assert chaos.main(["--seed", "11", "--cases", str(cases), "--only", kind, *place]) == 0


def test_a_lost_bit_is_noticed(chaos: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: a run whose metrics were changed after its end fails its case."""
    local = importlib.import_module("chaos.local")
    rows, done = local.checkpoints, []

    def spoiled(folder: Path) -> list[int]:
        file = folder / "metrics.jsonl"
        if (folder / "model.safetensors").exists() and not done:
            done.append(file.write_text(file.read_text().replace('"round":2', '"round":3')))
        return list(rows(folder))

    monkeypatch.setattr(local, "checkpoints", spoiled)
    assert chaos.main(["--seed", "11", "--cases", "1", "--only", "local", "--place", str(tmp_path / "place")]) == 1
