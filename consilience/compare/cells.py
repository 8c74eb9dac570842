"""Running one cell: an ordinary run folder, started, resumed or left as it is."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from consilience.core.rounds import Diverged
from consilience.data.dataset import Dataset
from consilience.experiments import runner
from consilience.experiments.config.config import Config
from consilience.experiments.live_run import Run
from consilience.runs.disk import explain, is_folder
from consilience.runs.failures import explained
from consilience.runs.folder import RecordError, RunFolder
from consilience.runs.observation import Observation
from consilience.runs.text import quality

Notify = Callable[[int, str], None]
"""Called after every round with its number and the quality of the model as text."""

OVER = ("finished", "diverged")
"""States of cells that are not run again: a run that diverged would diverge again."""


class CellEnd(NamedTuple):
    """How a cell ended."""

    status: str  # finished, diverged, interrupted, failed
    text: str
    signal: int = 0  # that asked the cell to stop


def status_of(path: Path) -> str:
    """The status in a cell's folder; "" if there is no folder. A link to a run elsewhere is refused."""
    try:
        is_folder(path)
    except OSError as problem:
        raise RecordError(explain("use the run folder", path, problem)) from problem
    return str(RunFolder.open(path).facts().get("status", "")) if (path / "run.json").exists() else ""


def run_cell(
    path: Path, method: str, config: Config, *, data: Dataset | None, threads: int | None, notify: Notify
) -> CellEnd:
    """Start or resume a cell; its errors are returned, not raised."""
    last = ["no round"]

    def watch(run: Run) -> Iterator[Observation]:
        for observation in run.observations():
            last[0] = quality(observation.row, observation.metrics)
            notify(observation.round.number, last[0])
            yield observation

    try:
        if status_of(path):
            manager = runner.resume(path)
        else:
            manager = runner.start(_threaded(config, threads), folder=path, data=data)
        with manager as run:
            run.folder.record(comparison={"method": method, "seed": config.seed})
            found = run.complete(watch)
    except Diverged as problem:
        return CellEnd("diverged", f"diverged: {problem}")
    except Exception as problem:  # the other cells are still run
        return CellEnd("failed", f"failed: {explained(problem)[0]}")
    finally:
        gc.collect()  # an engine and its programs are a reference cycle
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if found.stopped:
        return CellEnd("interrupted", f"stopped at {last[0]}", found.stopped)
    return CellEnd("finished", last[0])


def _threaded(config: Config, threads: int | None) -> Config:
    return config if config.threads is not None or threads is None else dataclasses.replace(config, threads=threads)
