"""Runs on disk: start one in a folder of its own, or resume one exactly where its last checkpoint is."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from consilience.core.settings import Invalid
from consilience.data import partition
from consilience.data.dataset import Dataset
from consilience.experiments import trackers
from consilience.experiments.assembly import Simulation, assemble
from consilience.experiments.client_log import federation_facts
from consilience.experiments.config.config import Config, from_table
from consilience.experiments.live_run import Report, Run, Watch, store_config
from consilience.runs import identity
from consilience.runs.folder import RunFolder
from consilience.runs.metric_table import FACT, stored
from consilience.runs.names import plain
from consilience.runs.result import Result
from consilience.runs.toml_text import loads
from consilience.runs.verification import newest_checkpoint


def execute(
    config: Config, *, folder: Path | None = None, watch: Watch | None = None, report: Report | None = None
) -> Result:
    """A whole run, from settings to a trained model in a run folder."""
    with start(config, folder=folder) as run:
        return run.complete(watch, report)


def proceed(
    path: Path,
    overrides: Iterable[str] = (),
    *,
    force: bool = False,
    watch: Watch | None = None,
    report: Report | None = None,
) -> Result:
    """The rest of a run that was stopped, or more rounds of one that had finished."""
    with resume(path, overrides, force=force) as run:
        return run.complete(watch, report)


@contextlib.contextmanager
def start(config: Config, *, folder: Path | None = None, data: Dataset | None = None) -> Iterator[Run]:
    """Begin a run in a new folder: `folder` exactly, or one named after the config, numbered if the name is taken."""
    if folder is not None and (Path(folder) / "run.json").exists():
        raise Invalid(f"{folder} holds a run already: continue it with `consilience resume {folder}`")
    trackers.check(config.log)
    simulation = assemble(config, data)
    simulation = dataclasses.replace(simulation, config=_resolved(simulation))
    experiment = simulation.experiment
    facts = experiment.facts(identity.code(), identity.settings(experiment.config.table()))
    made = _create(experiment.config, folder, facts)
    with made.lock(), contextlib.closing(simulation):
        made.store(made.partition.name, partition.encoded(simulation.parts))
        made.describe_clients(federation_facts(simulation.federation, simulation.data.label_names))
        yield Run(made, experiment, None)


@contextlib.contextmanager
def resume(path: Path, overrides: Iterable[str] = (), *, force: bool = False) -> Iterator[Run]:
    """Continue a run from its last checkpoint; changes that affect results are refused or, with `force`, recorded."""
    folder = RunFolder.open(Path(path))
    with folder.lock():
        facts = folder.facts()
        if facts.get("deployed"):
            raise Invalid(f"{folder.path} is a deployed run: continue it with `consilience deploy up` or `flwr run`")
        config = from_table(loads(folder.config_text()), overrides, source=str(folder.path / "config.toml"))
        saved = newest_checkpoint(folder)
        settings = identity.settings(config.table())
        found = identity.differences(facts.get("config", {}), settings, computed=saved is not None)
        found += identity.differences(facts.get("code", {}), identity.code(), prefix="code.")
        trackers.check(config.log)
        _refuse(found, folder, force)  # before the data are read, which may take long
        simulation = assemble(config, resumed=True)
        found += identity.differences(facts.get("prints", {}), simulation.prints, prefix="fingerprint.")
        found += _partition_differences(folder, simulation)
        _refuse(found, folder, force)
        folder.describe_clients(federation_facts(simulation.federation, simulation.data.label_names))
        with contextlib.closing(simulation):
            run = Run(folder, simulation.experiment, saved)
            _note(folder, run, simulation, found, facts)
            yield run


def _resolved(simulation: Simulation) -> Config:
    """The settings with the device and threads of this machine, on which the last bits depend."""
    config = simulation.config.changed(**simulation.engine.resolved_settings)
    return dataclasses.replace(config, threads=torch.get_num_threads())


def _create(config: Config, folder: Path | None, facts: dict[str, Any]) -> RunFolder:
    """The run folder; without an exact path, the first free of label, label-2, label-3 ..."""
    if folder is not None:
        return RunFolder.create(Path(folder).parent, Path(folder).name, config.toml(), facts)
    number = 1
    while True:
        name = config.label if number == 1 else f"{config.label}-{number}"
        try:
            return RunFolder.create(Path(config.runs), name, config.toml(), facts)
        except Invalid:
            if not os.path.lexists(Path(config.runs) / name):
                raise
            number += 1


def _partition_differences(folder: RunFolder, simulation: Simulation) -> list[str]:
    """Differences from the stored partition; if a crash prevented storing it, it is stored now."""
    name = folder.partition.name
    if not os.path.lexists(folder.partition):
        folder.store(name, partition.encoded(simulation.parts))
    stored, now = partition.fingerprint(partition.decoded(folder.read(name), name)), simulation.prints["partition"]
    return [] if stored == now else [f"{folder.partition.name}: {stored[:12]} -> {now[:12]}"]


def _refuse(found: list[str], folder: RunFolder, force: bool) -> None:
    if found and not force:
        raise Invalid(
            f"{folder.path} cannot be resumed exactly, because something it depends on has changed:\n  "
            + "\n  ".join(found)
            + "\nundo the change, start a new run, or resume with --force, which is recorded in the run"
        )


def _note(folder: RunFolder, run: Run, simulation: Simulation, found: list[str], facts: dict[str, Any]) -> None:
    """Record what changed: settings that do not affect results quietly, the others under `forced`."""
    config = run.config
    if identity.settings(config.table()) != facts.get("config"):
        store_config(folder, config)
    if stored(simulation.task.metrics.rows) != facts.get(FACT):
        folder.record(**{FACT: stored(simulation.task.metrics.rows)})
    if found:
        forced = [*facts.get("forced", []), {"round": run.done, "changes": [plain(line) for line in found]}]
        folder.record(forced=forced, code=identity.code(), prints=simulation.prints)
        folder.store(folder.partition.name, partition.encoded(simulation.parts))
