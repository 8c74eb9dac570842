"""The server side of an app: the library's only loop, over a Flower Grid, into an ordinary run folder."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from consilience.core import tree
from consilience.core.federation import Rows
from consilience.core.rounds import Diverged, TooFewClients
from consilience.core.settings import Invalid
from consilience.experiments.assembly import Experiment
from consilience.experiments.config.catalogue import KINDS
from consilience.experiments.config.config import Config
from consilience.experiments.live_run import Run
from consilience.flower.deploy.hosting import settings_of
from consilience.flower.deploy.settings import DeployedConfig, load
from consilience.flower.deploy.sources import Source, source_of
from consilience.flower.engine import wire
from consilience.flower.engine.engine import FlowerEngine
from consilience.runs import checkpoint, identity
from consilience.runs.folder import RunFolder
from consilience.runs.metric_table import FACT, stored
from consilience.runs.observation import Observation

log = logging.getLogger("consilience.flower")

LOG = "deploy.log"
PATIENCE = tuple(f"deploy.{key}:" for key in ("min_available", "deadline", "wait", "retries", "pause"))


@dataclass(frozen=True, eq=False, kw_only=True)
class Elsewhere:
    """A federation whose rows are not here; `test` are the server's own."""

    clients: int
    test: Rows | None
    classes: int | None

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' numbers."""
        return tuple(str(client) for client in range(self.clients))

    def __len__(self) -> int:
        return self.clients


def server_app(folder: Path | str) -> Any:
    """The ServerApp of the app in this folder."""
    wire.records()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        for case in str(context.run_config.get("cases", "")).split() or [""]:
            serve(grid, Path(folder), context.run_config, case)

    return app


def serve(grid: Any, folder: Path, run_config: Any, case: str = "") -> Path:
    """Run one experiment, or continue it where its last checkpoint is; its run folder."""
    refuse_plain_text(grid, allowed=bool(run_config.get("insecure", False)))
    config = load(folder, case, settings_of(run_config))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    experiment = _experiment(grid, config, source_of(folder, config), case)
    with opened(experiment, Path(str(run_config.get("runs", config.runs)))) as run, _logged(run.folder):
        run.folder.record(status="running", server_pid=os.getpid())
        try:
            if run.done:
                log.info("continuing after round %d", run.done)
            cast(Any, experiment.engine).meet()
            run.complete(watch=lambda live: _watched(live, grid))
        except (TooFewClients, Diverged, Invalid) as problem:
            status = "diverged" if isinstance(problem, Diverged) else "too few clients"
            run.folder.record(status="refused" if isinstance(problem, Invalid) else status, reason=str(problem))
            log.error("%s", problem)
            raise
        log.info("%s: %s", run.folder.facts().get("status"), run.folder.path)
        return run.folder.path


@contextlib.contextmanager
def opened(experiment: Experiment, runs: Path) -> Iterator[Run]:
    """The run in its folder: a new one, or the one of that name, continued; what would change numbers is refused."""
    config, path = experiment.config, runs / experiment.config.label
    settings = identity.settings(config.table())
    if not (path / "run.json").exists():
        made = {
            "config": settings,
            "code": identity.code(),
            "prints": experiment.prints,
            "algorithm": repr(experiment.algorithm),
            "clients": len(experiment.federation),
            "parameters": experiment.parameters,
            FACT: stored(experiment.task.metrics.rows),
            "status": "created",
            "deployed": True,
        }
        RunFolder.create(runs, config.label, config.toml(), made)
    folder = RunFolder.open(path)
    with folder.lock():
        saved = checkpoint.load_latest(folder.checkpoints)
        refuse_another_run(folder, config, computed=saved is not None)
        yield Run(folder, experiment, saved)


def refuse_another_run(folder: RunFolder, config: Config, *, computed: bool = True) -> None:
    """Refuse to continue a run with settings or code that would change its numbers."""
    facts = folder.facts()
    found = identity.differences(facts.get("config", {}), identity.settings(config.table()), computed=computed)
    found += identity.differences(facts.get("code", {}), identity.code(), prefix="code.")
    found = [change for change in found if not change.startswith(PATIENCE)]
    if found:
        raise Invalid(
            f"{folder.path} holds a run that cannot be continued with these settings:\n  " + "\n  ".join(found) + "\n"
            "undo the change, or give the new run another name in config.toml"
        )


def refuse_plain_text(grid: Any, *, allowed: bool) -> None:
    """No run over an unencrypted connection to another machine, unless that was asked for."""
    address = str(getattr(grid, "_addr", "127.0.0.1"))
    if getattr(grid, "_insecure", False) and not is_loopback(address) and not allowed:
        raise Invalid(
            f"the connection to the SuperLink at {address} is not encrypted: start it with certificates, or, if this "
            'network is to be trusted with every model, run with --run-config "insecure=true"'
        )


def is_loopback(address: str) -> bool:
    """Whether an address (with or without a port) never leaves this machine."""
    host = address.rpartition(":")[0] if address.count(":") == 1 or address.startswith("[") else address
    host = host.strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _experiment(grid: Any, config: DeployedConfig, source: Source, case: str) -> Experiment:
    """All the pieces; the engine's clients are elsewhere."""
    algorithm, test = config.build_algorithm(), source.test()
    environment = KINDS["environment"].build(config.environment.name, config.environment.options)
    clients = config.deploy.clients
    if test is not None and len(test.sizes) != clients:
        raise Invalid(f"deploy.clients = {clients}, but the partition has {len(test.sizes)} clients")
    device = config.engine.get("device", "auto")
    engine = FlowerEngine(
        grid,
        source.task,
        algorithm,
        clients=clients,
        run=config.label,
        case=case,
        min_available=config.deploy.min_available,
        environment=environment,
        waiting=config.deploy.waiting,
        limits=config.limits,
        test=test,
        device="cpu" if device == "auto" else device,
        dtype=config.engine.get("dtype", "float32"),
        lane=config.engine.get("lane", "auto"),
        secure=config.build_terms(),
    )
    inputs = {} if test is None else tree.map_leaves(lambda leaf: leaf[:0], test.x)
    data = SimpleNamespace(x=inputs, classes=source.classes, label_names=source.label_names)
    return Experiment(
        config=config,
        federation=cast(Any, Elsewhere(clients=clients, test=test, classes=source.classes)),
        parts=[],
        task=source.task,
        engine=cast(Any, engine),
        algorithm=algorithm,
        data=cast(Any, data),
        prints={"data": "with the clients", "partition": "with the clients"},
    )


def _watched(run: Run, grid: Any) -> Iterator[Observation]:
    """Every round as a line in the log."""
    exposed = getattr(grid, "_insecure", False) and not is_loopback(str(getattr(grid, "_addr", "127.0.0.1")))
    for observation in run.observations():
        log.info("%s", _line(observation, run.config.rounds))
        if exposed:
            log.warning("TLS IS OFF: models travel in plain text")
        yield observation


def _line(observation: Observation, rounds: int) -> str:
    row, done = observation.row, observation.round
    missing = {reason: row[reason] for reason in ("silent", "memory_lost") if row[reason]} | row["rejected"]
    why = f" ({', '.join(f'{count} {reason}' for reason, count in missing.items())})" if missing else ""
    clients = f"{len(done.cohort)} of {len(done.chosen)} clients{why}"
    return f"round {done.number}/{rounds}  {observation.quality()}  {clients}  {observation.timing['seconds']:.1f} s"


@contextlib.contextmanager
def _logged(folder: RunFolder) -> Iterator[None]:
    """What the engine says, into the run folder and onto Flower's own log."""
    form = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
    handlers: list[logging.Handler] = [logging.FileHandler(folder.path / LOG), logging.StreamHandler()]
    level, passes = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in handlers:
        handler.setFormatter(form)
        log.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()
        log.level, log.propagate = level, passes
