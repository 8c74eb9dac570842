"""A run whose clients' rows are in the log and in a file gives the same numbers, also when it is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from consilience.algorithms.ditto import ditto
from consilience.core import tree, versions
from consilience.core.federation import Federation, NumberedNames, Rows
from consilience.core.rounds import run as train
from consilience.engines.vectorised.engine import Vectorised
from consilience.experiments import runner
from consilience.experiments.config import config
from consilience.runs import checkpoint, client_log
from consilience.runs.result import Result
from consilience.selection import Uniform
from consilience.stores.client_rows import ClientRows
from consilience.task.task import Task

pytestmark = pytest.mark.usefixtures("untraced")
SMALL = ("model=logistic", "partition.clients=12", "algorithm.epochs=1", "engine.lane=serial", "threads=1")


def run(tmp_path: Path, name: str, *overrides: str) -> Result:
    selection = "algorithm.selection={name='uniform', count=4}"
    return runner.execute(config.load(None, [*SMALL, selection, f"runs={tmp_path}", f"name={name}", *overrides]))


@pytest.mark.parametrize(
    "settings",
    [("ditto",), ("fedsplit", "algorithm.step=0.5", "algorithm.lr=0.05", "algorithm.keeps_z=true"), ("simfedswap",)],
)
def test_a_resumed_run_with_a_log_equals_one_with_whole_checkpoints(
    settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = [f"algorithm={settings[0]}", *settings[1:]]
    whole = run(tmp_path, "whole", *algorithm, "rounds=4")
    monkeypatch.setattr(versions, "COPIED", 0)
    monkeypatch.setattr(client_log, "WHOLE", 0)
    first = run(tmp_path, "logged", *algorithm, "rounds=2", "engine.memory=file")
    assert first.folder is not None and whole.folder is not None
    assert list((first.folder / "checkpoints").glob("clients-*.log"))
    runner.proceed(first.folder, ["rounds=4"])
    files = [(folder / "metrics.jsonl").read_bytes() for folder in (first.folder, whole.folder)]
    assert files[0] == files[1]
    found, expected = (checkpoint.load_latest(folder / "checkpoints") for folder in (first.folder, whole.folder))
    assert found is not None and expected is not None
    for name in ("server", "memory", "losses", "pending"):
        values = [tree.map_leaves(_plain, saved.trees[name]) for saved in (found, expected)]
        assert tiny.same(*values), name


def _plain(leaf: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(leaf.clone(), nan=-1.0) if leaf.is_floating_point() else leaf.clone()


def test_a_sample_of_clients_is_tested_and_recorded(tmp_path: Path) -> None:
    row = run(tmp_path, "sampled", "algorithm=ditto", "rounds=1", "evaluation.client_sample=5").history[-1]
    every = run(tmp_path, "all", "algorithm=ditto", "rounds=1").history[-1]
    assert row["personal_clients_tested"] == 5 and row["personal_clients_total"] == 12
    assert 0 < row["personal_accuracy_standard_error"] < 0.5 and "personal_clients_tested" not in every
    expected = row["personal_accuracy_spread"] * np.sqrt(5 / 4) * np.sqrt((1 - 5 / 12) / 5)
    assert row["personal_accuracy_standard_error"] == pytest.approx(expected, rel=1e-12)
    assert {key for key in row if "clients_" not in key and "standard_error" not in key} == set(every)
    assert row["client_clients_tested"] == 5 and 0 < row["client_accuracy_standard_error"] < 0.5


def test_a_population_of_a_million_costs_its_cohorts(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = 1_000_000
    train_rows = Rows(
        x=torch.rand(50, 4), y=torch.arange(50) % 3, starts=torch.arange(clients) % 40, sizes=torch.full((clients,), 5)
    )
    federation = Federation(train=train_rows, classes=3)
    assert isinstance(federation.names, NumberedNames) and federation.names[999_999] == "999999"
    engine: Any = Vectorised(Task(torch.nn.Linear(4, 3)), federation, device="cpu", lane="serial")
    *_, last = train(ditto(selection=Uniform(count=7), batch_size=5, epochs=1), engine, rounds=3, seed=1)
    table = ClientRows.of(last.snapshot.memory)
    assert table is not None and len(table) == clients and len(table.written()) == 21
    assert sum(engine.memory_bytes.values()) <= 64 << 20
    some = np.array([0, clients - 1, *table.written()[:2]])
    assert tiny.same(table.read(some), tree.take(last.snapshot.memory, some))
