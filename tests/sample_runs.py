"""Run folders to report on: small real ones, and some written by hand with whatever a test needs in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from consilience.experiments import runner
from consilience.experiments.config import config
from consilience.runs.folder import RunFolder

SMALL = (
    *("rounds=3", "threads=1", "model.hidden=[4]", "partition.clients=6", "algorithm.epochs=1"),
    *("engine.lane=serial", "engine.device=cpu"),
)
CONFIG = 'seed = {seed}\nrounds = 3\n\n[data]\nname = "digits"\n\n[algorithm]\nname = "{algorithm}"\nlr = 0.1\n'


def real(folder: Path, *overrides: str) -> Path:
    """A run of three rounds over six clients."""
    runner.execute(config.load(None, [*SMALL, *overrides]), folder=folder)
    return folder


def written(
    root: Path,
    name: str,
    *,
    accuracies: tuple[float | None, ...] = (0.2, 0.4, 0.6),
    seed: int = 0,
    algorithm: str = "fedavg",
    more: str = "",
    clients: tuple[dict[str, Any], ...] = (),
    federation: dict[str, Any] | None = None,
    **facts: Any,
) -> Path:
    """A run folder with these accuracies, two clients a round with weights 0.25 and 0.75."""
    text = CONFIG.format(seed=seed, algorithm=algorithm) + more
    folder = RunFolder.create(root, name, text, {"status": "finished", "clients": 4, **facts})
    for number, accuracy in enumerate(accuracies, 1):
        row = {"round": number, "accuracy": accuracy, "loss": 1 / number, "cohort": [0, 2], "weights": [0.25, 0.75]}
        folder.metrics.append({**row, "bytes_up_total": 1e6 * number, "bytes_down_total": 2e6 * number})
        folder.timing.append({"round": number, "seconds": 2.0, "evaluation_seconds": 0.5})
    for row in clients:
        folder.clients.append(row)
    if federation is not None:
        folder.federation.write_text(json.dumps(federation))
    return folder.path


def replace_rows(run: Path, rows: list[dict[str, Any]]) -> None:
    """Put other metrics into a run folder, as if the run had written them."""
    log = RunFolder.open(run).metrics
    log.path.write_bytes(b"")
    for row in rows:
        log.append(row, sync=False)
