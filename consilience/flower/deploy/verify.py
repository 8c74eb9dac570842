"""`consilience verify`: runs one short experiment in process, on Ray and over Flower, and compares the bits."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch

from consilience.core.settings import Invalid, nearest
from consilience.engines.ray import session
from consilience.experiments import runner
from consilience.experiments.config import config as configs
from consilience.experiments.config.catalogue import KINDS, has_own_default, section_options
from consilience.flower.deploy import template
from consilience.flower.deploy.local_deployment import LocalDeployment
from consilience.flower.deploy.processes import ProcessFailed, alive
from consilience.flower.deploy.up import Say, facts_of, shares
from consilience.runs import toml_text
from consilience.wire import arrays

ALGORITHMS = (
    *("fedavg", "fedprox", "simprox", "scaffold", "fedsplit"),
    *("fedsiam_da", "simfedswap", "fedbn", "duw_fedavg"),
)
ENGINES = ("vectorised", "ray", "flower")
WORKERS = (1, 2)  # of Ray
NEEDED: dict[str, dict[str, Any]] = {"fedsplit": {"step": 1.0}, "fedprox_fedsplit": {"step": 1.0}}
STANDARD: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 4, "alpha": 0.5},
    "model": {"name": "siamese", "backbone": "mlp", "backbone_options": {"hidden": [16]}, "projection": 8},
    "algorithm": {"name": "fedavg", "lr": 0.1, "epochs": 1, "batch_size": 32},
}
"""The default experiment: every algorithm of `ALGORITHMS` can train this model."""
NORMALISED = {"model": {"name": "resnet20"}, "algorithm": {"name": "fedbn", "lr": 0.1, "epochs": 0.1, "batch_size": 32}}
"""FedBN needs trained batch norm; the standard model has it only in a head that siamese algorithms use."""
PATIENCE = {"deadline": 240.0, "wait": 180.0, "retries": 1}


class Outcome(NamedTuple):
    """The result of one experiment on one engine; `why` says why there is nothing to compare."""

    algorithm: str
    engine: str
    model: str = ""
    metrics: str = ""
    seconds: float = 0.0
    why: str = ""
    skipped: bool = False


def verify(
    given: Mapping[str, Any],
    *,
    algorithms: Sequence[str] = ALGORITHMS,
    engines: Sequence[str] = ENGINES,
    rounds: int = 2,
    nodes: int = 2,
    say: Say = print,
) -> list[Outcome]:
    """Run every algorithm on every engine: float64, one client after another, one thread."""
    for name in engines:
        if name not in ENGINES:
            raise Invalid(f"--engines {name!r} is not one of {', '.join(ENGINES)}{nearest(name, ENGINES)}")
    tables = {name: _table(given, name, rounds) for name in algorithms}
    checked = {name: configs.from_table(table) for name, table in tables.items()}  # all are checked before any runs
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="consilience-verify-") as place:
        if "vectorised" in engines:
            outcomes += _locally(checked, "vectorised", Path(place) / "vectorised", say)
        if "ray" in engines:
            outcomes += _ray(tables, Path(place), say)
        if "flower" in engines:
            outcomes += _flower(tables, Path(place) / "flower", nodes, say)
    return outcomes


def differing(outcomes: Sequence[Outcome]) -> list[str]:
    """The algorithms whose engines do not agree, or failed."""
    found = []
    for name in dict.fromkeys(outcome.algorithm for outcome in outcomes):
        mine = [one for one in outcomes if one.algorithm == name and not one.skipped]
        if len({(one.model, one.metrics) for one in mine}) > 1 or any(one.why for one in mine):
            found.append(name)
    return found


def _table(given: Mapping[str, Any], algorithm: str, rounds: int) -> dict[str, Any]:
    """The settings of one experiment: those given, this algorithm's, and those that make results equal bit for bit."""
    name, recipe = KINDS["algorithm"].find(algorithm)
    if given is STANDARD and name == "fedbn":
        given = {**STANDARD, **NORMALISED}
    own = given.get("algorithm", {})
    own = {"name": own} if isinstance(own, str) else dict(own)
    if own.get("name") != name:
        known = section_options("algorithm", name)
        own = {key: value for key, value in own.items() if key in known and not has_own_default(recipe, key)}
    clients = _clients(given)
    if name.startswith("duw_") and not {"weighting", "schedule"} & set(own):
        own["weighting"] = {"name": "schedule", "table": _schedule(rounds, clients)}
    kept = {
        key: value for key, value in given.items() if key not in ("engine", "deploy", "compare", "algorithm", "runs")
    }
    return {
        **kept,
        "name": name,
        "rounds": rounds,
        "threads": 1,
        "algorithm": {**NEEDED.get(name, {}), **own, "name": name},
        "engine": {"device": "cpu", "dtype": "float64", "lane": "serial"},
    }


def _clients(given: Mapping[str, Any]) -> int:
    section = given.get("partition", {})
    found = section.get("clients") if isinstance(section, Mapping) else None
    if not isinstance(found, int) or found < 1:
        raise Invalid("partition.clients is missing: verify needs to know how many clients there are, a few at most")
    return found


def _schedule(rounds: int, clients: int) -> list[list[float]]:
    """Weights that differ by round and client, and sum to one."""
    rows = [[1.0 + (turn + client) % clients for client in range(clients)] for turn in range(rounds)]
    return [[value / sum(row) for value in row] for row in rows]


def _locally(checked: Mapping[str, Any], engine: str, place: Path, say: Say) -> list[Outcome]:
    found: list[Outcome] = []
    for name, config in checked.items():
        began = time.perf_counter()
        with _explained(name, engine, found, say):
            folder = runner.execute(config, folder=place / name).folder
            assert folder is not None
            found.append(_outcome(name, engine, folder, time.perf_counter() - began))
    return found


def _ray(tables: Mapping[str, Mapping[str, Any]], place: Path, say: Say) -> list[Outcome]:
    if importlib.util.find_spec("ray") is None:
        why = "Ray is not installed"
        return [Outcome(name, "ray", why=why, skipped=True) for name in tables]
    found: list[Outcome] = []
    session.join(None, max(WORKERS))  # once for all runs
    try:
        for workers in WORKERS:
            engine = {"name": "ray", "workers": workers}
            made = {
                name: configs.from_table({**table, "engine": {**engine, **table["engine"]}})
                for name, table in tables.items()
            }
            found += _locally(made, f"ray, {workers} worker{'s' if workers > 1 else ''}", place / f"ray-{workers}", say)
    finally:
        session.leave()
    return found


def _flower(tables: Mapping[str, Mapping[str, Any]], place: Path, nodes: int, say: Say) -> list[Outcome]:
    if importlib.util.find_spec("flwr") is None:
        return [Outcome(name, "flower", why="Flower is not installed", skipped=True) for name in tables]
    clients = _clients(next(iter(tables.values())))
    app, runs = place / "app", place / "runs"
    write_app(app, tables, clients)
    found: list[Outcome] = []
    with LocalDeployment(
        app, shares=shares(clients, min(nodes, clients)), place=place / "stage", secure=False
    ) as stage:
        run = stage.run(runs=str(runs), cases=" ".join(tables))
        began = time.perf_counter()
        for name in tables:
            with _explained(name, "flower", found, say):
                _wait_for(runs / name, stage, run)
                found.append(_outcome(name, "flower", runs / name, time.perf_counter() - began))
                began = time.perf_counter()
    return found


def write_app(app: Path, tables: Mapping[str, Mapping[str, Any]], clients: int) -> None:
    """A Flower app of several experiments, whose data and model the configs name."""
    (app / "cases").mkdir(parents=True)
    (app / "pyproject.toml").write_text(template.project("verify", more="/cases/*.toml"), encoding="utf-8")
    (app / "server_app.py").write_text(template.SERVER, encoding="utf-8")
    (app / "client_app.py").write_text(template.CLIENT, encoding="utf-8")
    for name, table in tables.items():
        text = toml_text.dumps({**table, "deploy": {"clients": clients, **PATIENCE}})
        (app / "cases" / f"{name}.toml").write_text(text, encoding="utf-8")


def _wait_for(folder: Path, stage: LocalDeployment, run: Any) -> None:
    """Wait until the run in this folder has finished; `ProcessFailed` if its processes have ended before."""
    while True:
        ended, facts = run.code is not None, facts_of(folder)
        if facts.get("status") == "finished":
            return
        if facts.get("status") in ("diverged", "too few clients", "refused"):
            raise ProcessFailed(str(facts.get("reason")))
        pid = facts.get("server_pid")
        if pid is not None:
            stage.servers.add(pid)
        if ended or (pid is not None and not alive(pid)):
            raise ProcessFailed(f"the ServerApp ended early:\n{run.tail()}")
        stage.check()
        time.sleep(0.2)


@contextlib.contextmanager
def _explained(name: str, engine: str, found: list[Outcome], say: Say) -> Iterator[None]:
    """Record a failure as an outcome."""
    try:
        yield
    except Exception as problem:
        found.append(Outcome(name, engine, why=f"{type(problem).__name__}: {problem}"))
    last = found[-1]
    say(f"{name} on {engine}: {last.why or f'{last.seconds:.1f} s'}")


def _outcome(name: str, engine: str, folder: Path, seconds: float) -> Outcome:
    """SHA-256 of the final model's tensors and of the metrics, which hold no wall time."""
    tensors = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    metrics = hashlib.sha256((folder / "metrics.jsonl").read_bytes()).hexdigest()
    model = arrays.digest({key.replace("/", "."): value for key, value in tensors.items()})
    return Outcome(name, engine, model, metrics, seconds)
