"""The server side of an app: the library's training loop over a Flower Grid, with an ordinary run folder."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from consilience.core import tree
from consilience.core.capabilities import Buffers, capability
from consilience.core.refusal import plain
from consilience.core.rounds import Diverged, TooFewClients
from consilience.core.settings import Invalid
from consilience.experiments.config.config import Config
from consilience.experiments.experiment import Experiment
from consilience.experiments.live_run import Run
from consilience.flower.audit.log import FILE, KEYS, AuditLog
from consilience.flower.audit.signing import Signer
from consilience.flower.deploy import member_list
from consilience.flower.deploy.hosting import settings_of
from consilience.flower.deploy.settings import DeployedConfig, load
from consilience.flower.deploy.sources import Source, source_of
from consilience.flower.engine.engine import FlowerEngine
from consilience.flower.messages import wire
from consilience.runs import canonical, identity
from consilience.runs.disk import read_file, replace_file
from consilience.runs.folder import DEPLOY_LOG, NODES, RunFolder
from consilience.runs.observation import Observation
from consilience.runs.text import quality
from consilience.runs.verification import newest_checkpoint

log = logging.getLogger("consilience.flower")

CONNECTION = "CONSILIENCE_CONNECTION"
"""Environment variable in which the launcher says how models are sent: `tls`, or `loopback` (within the machine)."""
ENCRYPTED = ("tls", "loopback")
PATIENCE = tuple(f"deploy.{key}:" for key in ("min_available", "deadline", "wait", "retries", "pause"))


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
    connection = os.environ.get(CONNECTION, "")
    refuse_plain_text(connection, allowed=run_config.get("insecure", False) is True)
    config = load(folder, case, settings_of(run_config))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    source = source_of(folder, config)
    engine = _engine(grid, config, source, case)
    experiment = _experiment(config, source, engine)
    with opened(experiment, Path(str(run_config.get("runs", config.runs)))) as run, _logged(run.folder):
        run.folder.record(status="running", server_pid=os.getpid())
        try:
            if run.done:
                log.info("continuing after round %d", run.done)
            _keep_log(run, engine)
            engine.meet()
            _store_health(run.folder, engine)
            run.complete(watch=lambda live: _watched(live, connection, engine))
        except (TooFewClients, Diverged, Invalid) as problem:
            status = "diverged" if isinstance(problem, Diverged) else "too few clients"
            _record_end(run, engine, "refused" if isinstance(problem, Invalid) else status, str(problem))
            log.error("%s", problem)
            raise
        except Exception as problem:  # an ended run must not have the status running
            _record_end(run, engine, "failed", plain(f"{type(problem).__name__}: {problem}"))
            log.error("%s: %s", type(problem).__name__, plain(problem))
            raise
        finally:
            _store_health(run.folder, engine)
        if engine.audit is not None:
            engine.audit.ended(str(run.folder.facts().get("status")), files=_left(run.folder))
        log.info("%s: %s", run.folder.facts().get("status"), run.folder.path)
        return run.folder.path


@contextlib.contextmanager
def opened(experiment: Experiment, runs: Path) -> Iterator[Run]:
    """The run in its folder: a new one, or the continued one of that name; changes that affect results are refused."""
    config, path = experiment.config, runs / experiment.config.label
    if not (path / "run.json").exists():
        made = experiment.facts(identity.code(), identity.settings(config.table()))
        RunFolder.create(runs, config.label, config.toml(), {**made, "deployed": True})
    folder = RunFolder.open(path)
    with folder.lock():
        saved = newest_checkpoint(folder)
        refuse_another_run(folder, config, computed=saved is not None)
        try:
            run = Run(folder, experiment, saved)
        except Invalid as problem:  # such as a privacy budget that is spent
            folder.record(status="refused", reason=str(problem))
            raise
        yield run


def _keep_log(run: Run, engine: FlowerEngine) -> None:
    """Begin, or continue, the audit log of a run."""
    place = os.environ.get(KEYS, "")
    signer = Signer(Path(place) / "server.pem", Path(place) / "server.key") if place else None  # of `deploy keys`
    audit = AuditLog(run.folder.path / FILE, signer)
    audit.started(
        done=run.done,
        model=run.model,
        run=run.folder.name,
        settings=run.config.digest(),
        agreement=engine.agreement,
        code=identity.code(),
        asynchronous=capability(engine.algorithm.server, Buffers) is not None,
    )
    engine.keep_log(audit)

    def concluded(observation: Observation) -> None:
        done = observation.round
        audit.concluded(done.number, done.chosen.tolist(), done.cohort.ids.tolist(), done.cohort.refusals, done.model)

    run.on_round = concluded


def _left(folder: RunFolder) -> dict[str, str]:
    """SHA-256 of the run's result files."""
    names = [*folder.facts()["files"], *(log.path.name for log in (folder.metrics, folder.clients))]
    return {name: hashlib.sha256(read_file(folder.path / name)).hexdigest() for name in sorted(names)}


def _record_end(run: Run, engine: FlowerEngine, status: str, reason: str) -> None:
    run.folder.record(status=status, reason=reason)
    if engine.audit is not None:
        engine.audit.ended(status, reason)


def refuse_another_run(folder: RunFolder, config: Config, *, computed: bool = True) -> None:
    """Refuse to continue a run with settings or code that would change its results."""
    facts = folder.facts()
    found = identity.differences(facts.get("config", {}), identity.settings(config.table()), computed=computed)
    found += identity.differences(facts.get("code", {}), identity.code(), prefix="code.")
    found = [change for change in found if not change.startswith(PATIENCE)]
    if found:
        raise Invalid(
            f"{folder.path} holds a run that cannot be continued with these settings:\n  " + "\n  ".join(found) + "\n"
            "undo the change, or give the new run another name in config.toml"
        )


def refuse_plain_text(connection: str, *, allowed: bool) -> None:
    """Refuse a connection that the launcher has not declared encrypted, unless plain text was asked for."""
    if connection not in ENCRYPTED and not allowed:
        raise Invalid(
            f"the connection is not known to be encrypted ({CONNECTION} = {connection!r}): start the server's "
            "side with `consilience deploy link`, which encrypts it, or, if this network may read every "
            'model, run with --run-config "insecure=true"'
        )


def _engine(grid: Any, config: DeployedConfig, source: Source, case: str) -> FlowerEngine:
    """The engine, whose clients are on other machines."""
    test = source.test()
    environment = config.environment.built
    clients = config.deploy.clients
    if test is not None and len(test.sizes) != clients:
        raise Invalid(f"deploy.clients = {clients}, but the partition has {len(test.sizes)} clients")
    device = config.engine.get("device", "auto")
    return FlowerEngine(
        grid,
        source.task,
        config.build_algorithm(),
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
        members=member_list.read(Path(listed)) if (listed := os.environ.get(member_list.MEMBERS, "")) else None,
    )


def _experiment(config: DeployedConfig, source: Source, engine: FlowerEngine) -> Experiment:
    """All parts of the run; of the data only the server's own test rows are known."""
    test = engine.test_rows
    return Experiment(
        config=config,
        task=source.task,
        engine=engine,
        algorithm=engine.algorithm,
        clients=config.deploy.clients,
        classes=source.classes,
        inputs={} if test is None else tree.map_leaves(lambda leaf: list(leaf.shape[1:]), test.x),
        label_names=source.label_names,
        prints={"data": "with the clients", "partition": "with the clients"},
        validation=source.validation(),
    )


def _store_health(folder: RunFolder, engine: FlowerEngine) -> None:
    """Store the nodes' health for the dashboard; results do not depend on these wall-clock facts."""
    found = {"nodes": engine.node_health}
    try:
        replace_file(folder.path / NODES, canonical.encode(canonical.to_json_types(found, NODES)) + b"\n")
    except OSError as problem:
        log.warning("%s could not be written: %s", NODES, plain(problem))


def _watched(run: Run, connection: str, engine: FlowerEngine) -> Iterator[Observation]:
    """Log every round as a line, and store the nodes' health."""
    for note in run.notes:
        log.warning("note: %s", note)
    for observation in run.observations():
        log.info("%s", _line(observation, run.config.rounds))
        engine.count_refused(observation.round.cohort.refusals)
        _store_health(run.folder, engine)
        if connection not in ENCRYPTED:
            log.warning("TLS IS NOT KNOWN TO BE ON: models may be sent in plain text")
        yield observation


def _line(observation: Observation, rounds: int) -> str:
    row, done = observation.row, observation.round
    missing = {reason: row[reason] for reason in ("silent", "memory_lost") if row[reason]} | row["rejected"]
    why = f" ({', '.join(f'{count} {reason}' for reason, count in missing.items())})" if missing else ""
    clients, seconds = f"{len(done.cohort)} of {len(done.chosen)} clients{why}", observation.timing["seconds"]
    return f"round {done.number}/{rounds}  {quality(row, observation.metrics)}  {clients}  {seconds:.1f} s"


@contextlib.contextmanager
def _logged(folder: RunFolder) -> Iterator[None]:
    """Copy the engine's log to the run folder and to Flower's own log."""
    form = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
    stream = folder.open_log(DEPLOY_LOG)
    handlers = [logging.StreamHandler(stream), logging.StreamHandler()]
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
        stream.close()
        log.level, log.propagate = level, passes
