"""The tables of transformers.md are those of the stored results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "docs" / "make_transformers.py"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_transformers", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_up_to_date(make: ModuleType) -> None:
    assert make.main(["--check"]) == 0, "run python docs/make_transformers.py"


def test_numbers_by_hand(make: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "RESULTS", tmp_path / "transformers.json")
    for seed, last in ((0, 0.8), (1, 0.9)):
        run = tmp_path / f"runs/LoRA-seed{seed}"
        run.mkdir(parents=True)
        (run / "config.toml").write_text(f'seed = {seed}\nrounds = 2\n[model]\ntrain = "lora"\nrank = 8\n')
        (run / "run.json").write_text(json.dumps({"parameters": 1500}))
        rows = [{"round": n, "accuracy": value, "bytes_up_total": n * 10**6} for n, value in ((1, 0.5), (2, last))]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "adapters_speed.json").write_text(
        json.dumps([{"workload": "w", "precision": "bf16", "how": "by hand", "rows_per_s": 1234.4, "gib": 2.04}])
    )
    make.store(tmp_path)
    stored = json.loads(make.RESULTS.read_text())
    assert "| LoRA, rank 8 | 1,500 | 2 | 85.0 ± 7.1 % | 2.0 | 2.0 | 2 |" in make.accuracy(stored["runs"])
    assert "| w | bf16 | by hand | 1,234 | 2.0 |" in make.speed(stored["speed"])
