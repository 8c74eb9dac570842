"""`consilience deploy up`: the whole deployment on this machine, until the run ends."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from consilience.core.settings import Invalid
from consilience.flower.deploy.local_deployment import LocalDeployment
from consilience.flower.deploy.processes import Process, ProcessFailed, alive
from consilience.flower.deploy.serving import refuse_another_run
from consilience.flower.deploy.settings import CONFIG, DeployedConfig, load
from consilience.flower.secure.eligibility import refuse_shared_nodes
from consilience.runs.disk import open_file
from consilience.runs.failures import BAD_SETTINGS, DIVERGED, INTERRUPTED, TOO_FEW_CLIENTS, UNEXPECTED
from consilience.runs.folder import DEPLOY_LOG, RunFolder
from consilience.runs.row_log import RecordError

Say = Callable[[str], None]
CODES = {
    "finished": 0,
    "diverged": DIVERGED,
    "too few clients": TOO_FEW_CLIENTS,
    "refused": BAD_SETTINGS,
    "interrupted": INTERRUPTED,
    "failed": UNEXPECTED,
}
RESTARTS = 1  # restarts of a server that died: more would hide a bug


class ServerLost(RuntimeError):
    """The SuperLink or the ServerApp died; finished rounds are saved."""


def up(
    app: Path,
    *,
    nodes: int | None = None,
    secure: bool = True,
    host: str = "127.0.0.1",
    overrides: tuple[str, ...] = (),
    say: Say = print,
) -> tuple[int, Path]:
    """Start everything, run the app, follow it, stop everything: (exit code, run folder)."""
    config = load(app, overrides=overrides)
    if not (Path(app) / "pyproject.toml").exists():
        raise Invalid(f"{app} is no Flower app: `consilience deploy init {app}` makes one around {CONFIG}")
    folder = (Path(app) / "runs" / config.label).resolve()
    held = shares(config.deploy.clients, nodes or config.deploy.clients)
    if config.deploy.secure_aggregation:
        refuse_shared_nodes(held)
    if _is_done(folder, config):
        say(f"{folder} is finished: give it more rounds, or another name, in {CONFIG}")
        return 0, folder
    if facts_of(folder):
        refuse_another_run(RunFolder.open(folder), config)
    stage = LocalDeployment(
        app,
        shares=held,
        place=Path(app) / "local",
        secure=secure,
        host=host,
    )
    run_config: dict[str, Any] = {"runs": str(folder.parent), "settings": " ".join(overrides)}
    for attempt in range(RESTARTS + 1):
        try:
            safety = "TLS and node keys" if secure else "no TLS"
            say(f"starting a SuperLink and {stage.size} SuperNodes on {host} ({safety})")
            with stage:
                follow(stage, stage.run(**run_config), folder, say)
            break
        except ServerLost as problem:
            if attempt == RESTARTS:
                raise ProcessFailed(f"{problem}, again: {folder} can be continued with the same command") from problem
            say(f"{problem}; starting again from the last checkpoint, once")
    return outcome(folder), folder


def follow(stage: LocalDeployment, run: Process, folder: Path, say: Say) -> None:
    """Print the server's log until the run ends; `ServerLost` if its processes die before."""
    log, before = folder / DEPLOY_LOG, facts_of(folder).get("server_pid")
    place = log.stat().st_size if log.exists() else 0
    dead: set[str] = set()
    while True:
        ended = run.code is not None
        place = _pass_on(log, place, say)
        facts = facts_of(folder)
        started = facts.get("server_pid") not in (None, before)
        if started:
            stage.servers.add(facts["server_pid"])
        lost = stage.link is not None and stage.link.code is not None
        if started and facts.get("status") in CODES and not (lost and facts["status"] in ("interrupted", "failed")):
            run.wait(10)
            _pass_on(log, place, say)
            return
        if lost:  # checked first: Flower's own command and the ServerApp end as a consequence
            raise ServerLost("the SuperLink died")
        if ended:
            raise ProcessFailed(f"the run ended without a result; Flower's log, {run.log}, ends with:\n{run.tail()}")
        if started and not alive(facts["server_pid"]):
            raise ServerLost("the ServerApp died")
        for node in stage.nodes:
            if node.code is not None and node.name not in dead:
                dead.add(node.name)
                say(f"{node.name} ended with code {node.code}: see {node.log}")
        time.sleep(0.3)


def outcome(folder: Path) -> int:
    """The exit code for a run's status."""
    return CODES.get(str(facts_of(folder).get("status")), UNEXPECTED)


def shares(clients: int, nodes: int) -> list[list[int]]:
    """The clients of each SuperNode, as evenly as possible."""
    if not 1 <= nodes <= clients:
        raise Invalid(f"--local {nodes}: there are {clients} clients (deploy.clients), so 1 to {clients} SuperNodes")
    return [part.tolist() for part in np.array_split(np.arange(clients), nodes)]


def _pass_on(log: Path, place: int, say: Say) -> int:
    with contextlib.suppress(OSError), os.fdopen(open_file(log, os.O_RDONLY), "rb") as file:
        file.seek(place)
        for line in file:
            if not line.endswith(b"\n"):
                break
            place += len(line)
            say(line.decode(errors="replace").rstrip())
    return place


def facts_of(folder: Path) -> dict[str, Any]:
    """The facts in a run's run.json; empty if there is none yet."""
    if not (folder / "run.json").exists():
        return {}
    with contextlib.suppress(RecordError, OSError):
        return RunFolder.open(folder).facts()
    return {}


def _is_done(folder: Path, config: DeployedConfig) -> bool:
    if facts_of(folder).get("status") != "finished":
        return False
    return len(RunFolder.open(folder).rows().rows) >= config.rounds
