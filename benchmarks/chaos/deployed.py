"""Deployments on this machine, disturbed: real SuperLink, ServerApp and SuperNodes, and a hostile member."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from many_nodes import attacks
from many_nodes.node import Node

from chaos import faults
from chaos.faults import Clock, Fault, Line
from chaos.local import Broken, checkpoints, rows
from consilience.core.rounds import run
from consilience.engines.vectorised.engine import Vectorised
from consilience.flower.deploy import template
from consilience.flower.deploy.local_deployment import LocalDeployment
from consilience.flower.deploy.processes import Process, alive
from consilience.flower.deploy.settings import load
from consilience.flower.deploy.sources import source_of
from consilience.wire import arrays

HONEST, ROUNDS = 2, 5
ATTACKS: tuple[attacks.Attack, ...] = (
    *(attacks.wrong_kind, attacks.scalar, attacks.declared_huge, attacks.broken_array, attacks.million_keys),
    *(attacks.many_examples, attacks.another_client),
)
"""Attacks that answer at once, and whose replies must all be refused."""
ALGORITHMS = ('name = "fedavg"', 'name = "fedprox", mu = 0.1', 'name = "fedavgm"')
CONFIG = """
name = "chaos"
rounds = {rounds}
threads = 1
algorithm = {{ {algorithm}, lr = 0.1, epochs = 1, batch_size = 8, selection = "everyone" }}
engine = {{ dtype = "float64", device = "cpu", lane = "serial" }}
limits = {{ max_growth = 1e6, examples_ratio = 1e6 }}
deploy = {{ clients = 3, classes = 3, min_available = 2, deadline = 120, wait = 120, retries = 3, pause = 1 }}
"""
FEDERATION = """
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def data(client, node):
    draw = torch.Generator().manual_seed(client)
    y = torch.randint(0, 3, (40 + 7 * client,), generator=draw)
    x = torch.randn(len(y), 12, generator=draw, dtype=torch.float64) + y[:, None]
    return x, y


def test():
    return data(99, {})
"""
LONGEST = 300.0  # seconds for a case to go on


class Stage(LocalDeployment):
    """A deployment whose two honest nodes come over a line that can be cut; the third member is hostile."""

    def __init__(self, app: Path, place: Path, clock: Clock) -> None:
        super().__init__(app, shares=[[0], [1], [2]], place=place, lasting=True)
        self.line: Line | None = None
        self._clock = clock

    def start_link(self) -> None:
        super().start_link()
        self.line = Line(self.port)

    def start_node(self, number: int, **settings: Any) -> Any:
        if number == HONEST:
            return None
        assert self.line is not None
        direct, self.port = self.port, self.line.port
        before = {key: os.environ.get(key) for key in self._clock.environment}
        os.environ.update(self._clock.environment)
        try:
            return super().start_node(number, **settings)
        finally:
            self.port = direct
            for key, value in before.items():
                os.environ.pop(key, None) if value is None else os.environ.update({key: value})


class DeployedCases:
    """Cases one after another, each with a deployment of its own."""

    def __init__(self, place: Path) -> None:
        self._place = place
        place.mkdir(parents=True, exist_ok=True)

    def drawn(self, draw: random.Random) -> tuple[tuple[str, ...], list[Fault]]:
        """(algorithm, attack) and the faults of a case."""
        settings = (draw.choice(ALGORITHMS), draw.choice(ATTACKS).__name__)
        return settings, faults.drawn(draw, faults.DEPLOYED, ROUNDS - 1, draw.randrange(1, 4))

    def run(self, name: str, settings: tuple[str, ...], schedule: list[Fault]) -> str:
        """Play a case; how it went, in a few words."""
        algorithm, attack = settings
        app, runs = self._place / name / "app", self._place / name / "runs"
        template.init(app, clients=3)
        (app / "config.toml").write_text(CONFIG.format(rounds=ROUNDS, algorithm=algorithm))
        (app / "federation.py").write_text(FEDERATION)
        folder, clock = runs / "chaos", Clock(self._place / name / "clock")
        with Stage(app, self._place / name / "stage", clock) as stage:
            hostile = _hostile(stage, app, getattr(attacks, attack))
            hostile.start()
            try:
                starts = _play(stage, runs, folder, clock, schedule)
            finally:
                hostile.end()
                if stage.line is not None:
                    stage.line.close()
        _check(app, folder)
        return f"{starts} starts, {len(schedule)} faults, {attack} answered {hostile.answered} times"


def _hostile(stage: Stage, app: Path, attack: attacks.Attack) -> Node:
    assert stage.keys is not None
    config = load(app)
    return Node(
        HONEST,
        config=config,
        source=source_of(app, config),
        key=stage.keys.nodes[HONEST],
        attack=attack,
        address=f"127.0.0.1:{stage.port}",
        authority=stage.keys.authority,
        poll=1.0,
    )


def _play(stage: Stage, runs: Path, folder: Path, clock: Clock, schedule: list[Fault]) -> int:
    """Start the run, let the faults happen, and start it again where its server was killed; how many starts."""
    process, starts, saved = stage.run(runs=str(runs)), 1, 0
    left = list(schedule)
    end = time.monotonic() + LONGEST
    while facts(folder).get("status") != "finished":
        if time.monotonic() > end:
            raise Broken(f"round {rows(folder)} is the last after {LONGEST:g} seconds; {process.tail(5)}")
        now = max(checkpoints(folder), default=0)
        if now < saved:
            raise Broken(f"round {saved} was saved and is gone")
        saved = now
        server = facts(folder).get("server_pid")
        if server is not None:
            stage.servers.add(server)
        if left and server is not None and alive(server) and rows(folder) >= left[0].after_round:
            time.sleep(left[0].delay)
            _happen(stage, folder, clock, left.pop(0), server)
            end = time.monotonic() + LONGEST
        elif _ended(process, server, folder):
            process, starts = stage.run(runs=str(runs)), starts + 1
            if starts > 3 + 2 * len(schedule):
                raise Broken(f"the run does not end after {starts} starts: {process.tail(8)}")
        time.sleep(0.2)
    return starts


def _ended(process: Process, server: int | None, folder: Path) -> bool:
    """Whether the run is over without being finished: its ServerApp was killed, or it could not write."""
    if facts(folder).get("status") == "finished" or process.code is None:
        return False
    return server is None or not alive(server)


def _happen(stage: Stage, folder: Path, clock: Clock, fault: Fault, server: int) -> None:
    assert stage.link is not None and stage.line is not None
    happens: dict[tuple[str, str], Callable[[], None]] = {
        ("kill", "server"): lambda: faults.kill(server),
        ("kill", "link"): lambda: _restart(stage),
        ("pause", "node"): lambda: faults.pause(stage.nodes[0].pid, fault.amount),
        ("pause", "server"): lambda: faults.pause(server, fault.amount),
        ("cut", "node"): lambda: stage.line.cut(fault.amount),  # type: ignore[union-attr]
        ("clock", "node"): lambda: clock.jump(fault.amount),
        ("full", "server"): lambda: faults.fill(server, folder, fault.amount),
    }
    happens[fault.kind, fault.target]()


def _restart(stage: Stage) -> None:
    assert stage.link is not None
    faults.kill(stage.link.pid)
    stage.restart_link()


def _check(app: Path, folder: Path) -> None:
    """Every round once, the honest clients and nobody else in each, and the bits of the undisturbed run."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if [row["round"] for row in found] != list(range(1, ROUNDS + 1)):
        raise Broken(f"rounds {[row['round'] for row in found]}")
    for row in found:
        if row["cohort"] != list(range(HONEST)):
            raise Broken(
                f"round {row['round']} counted clients {row['cohort']}: {row['rejected']}, silent {row['silent']}"
            )
    stored = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    if arrays.digest(stored) != _undisturbed(app):
        raise Broken("the model differs from the undisturbed run's")


def _undisturbed(app: Path) -> str:
    config = load(app)
    source = source_of(app, config)
    engine = Vectorised(source.task, source.held(np.arange(HONEST), {}), dtype="float64", lane="serial", device="cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        *_, last = run(config.build_algorithm(), engine, rounds=ROUNDS, seed=config.seed)
    finally:
        torch.set_num_threads(threads)
    return arrays.digest({**last.model["params"], **last.model["buffers"]})


def facts(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "run.json").read_text()))
    except (OSError, ValueError):
        return {}
