"""The runner needs nothing of an engine but `RunnerEngine`: sixty lines of plain Python satisfy it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from declared import build

from consilience.core import plans, rng, tree
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.federation import Federation
from consilience.core.protocols import Channel, ClientRule, KeepsTime, PlansSteps, RunnerEngine
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.experiments import runner
from consilience.experiments.config import catalogue, config
from consilience.experiments.config.config import Config
from consilience.experiments.retest import retest
from consilience.reporting import report
from consilience.runs.folder import RunFolder
from consilience.task.task import Task

pytestmark = pytest.mark.usefixtures("untraced")


class InMemory:
    """One client after another, in a Python loop."""

    def __init__(self, task: Task, federation: Federation) -> None:
        self.task, self._federation = task, federation
        self.sizes, self.test_rows = federation.train.sizes.numpy(), federation.test
        self.test_sizes = None if federation.test is None else federation.test.sizes.numpy()
        self.resolved_settings: dict[str, Any] = {}
        self._memory: Tree = {}  # by client
        self.open = True

    def start(self) -> Tree:
        return self.task.start()

    def place(self, values: Tree) -> Tree:
        return values

    def close(self) -> None:
        self.open = False

    def available(self, round: int, seed: int) -> np.ndarray:
        return np.ones(len(self.sizes), dtype=bool)

    def recall(self) -> Tree:
        return dict(self._memory)

    def restore(self, memory: Tree) -> None:
        self._memory = dict(memory)

    @torch.no_grad()
    def exchange(
        self, client: ClientRule, channel: Channel, broadcast: Broadcast, ids: np.ndarray, *, round: int, seed: int
    ) -> Cohort:
        rows = self._federation.train if client.work.rows == "train" else self._federation.test
        assert rows is not None
        places = np.flatnonzero(rows.sizes.numpy()[ids] > 0)
        work, who = client.work, ids[places]
        steps = work.steps_per_epoch(rows.sizes.numpy()[who]) * (int(work.epochs) if work.trains else 1)
        replies = []
        for row, k, count in zip(places, who.tolist(), steps):
            message = {**broadcast.shared, **tree.rows(broadcast.personal, int(row)), "round": torch.tensor(round)}
            start = self.start()
            kept = self._memory.get(str(k)) or {"client": client.init(start), "channel": channel.init(start)}
            plan = plans.draw(work, rows, np.array([k]), np.array([count]), seed=seed, round=round)
            carry = client.begin(self.task, message, kept.get("client", {}))
            for step in range(count):
                carry = client.step(self.task, carry, plan.single(step, 0, rows), message, kept.get("client", {}))
            reply, mine = client.end(self.task, carry, message, kept.get("client", {}))
            key = torch.from_numpy(rng.fold(rng.key(seed, "channel", round), np.array([k])))[0]
            sent, encoder = channel.encode(reply, message, kept.get("channel", {}), key)
            replies.append(sent)
            if work.trains:
                self._memory[str(k)] = {"client": mine, "channel": encoder}
        sizes = torch.from_numpy(rows.sizes.numpy()[who].astype(np.float64))
        stacked = tree.stack(replies) if replies else {}
        return Cohort(reply=stacked, ids=who, examples=sizes, steps=steps, round=round)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[InMemory]:
    """The engines that runs with engine=memory have built so far."""
    found: list[InMemory] = []

    def make(task: Task, federation: Federation, *, environment: Any = None, rounds_ahead: Any = None) -> RunnerEngine:
        found.append(InMemory(task, federation))
        return found[-1]

    monkeypatch.setitem(catalogue.ENGINES, "memory", make)
    return found


def settings(tmp_path: Path, *more: str) -> Config:
    small = ("rounds=4", "model=logistic", "partition.clients=5", "threads=1", "checkpoint.every=1", f"runs={tmp_path}")
    return config.load(None, [*small, "algorithm=scaffold", "algorithm.epochs=1", *more])


def metrics(folder: Path) -> bytes:
    return (folder / "metrics.jsonl").read_bytes()


def test_it_has_sixty_lines_and_no_optional_ability() -> None:
    assert len(inspect.getsource(InMemory).splitlines()) <= 60
    engine: RunnerEngine = InMemory(Task(tiny.mlp()), tiny.federation())
    assert not isinstance(engine, (KeepsTime, PlansSteps))
    with pytest.raises(Invalid, match="InMemory cannot plan"):  # its server must know each client's steps beforehand
        next(run(build("duw_fednova"), engine, rounds=1))


def test_it_runs_resumes_and_reports_in_an_ordinary_run_folder(tmp_path: Path, made: list[InMemory]) -> None:
    whole = runner.execute(settings(tmp_path, "engine=memory", "name=whole"))
    with runner.start(settings(tmp_path, "engine=memory", "name=stopped")) as live:
        for observation in live.observations():
            if observation.round.number == 2:
                break
        stopped = live.folder.path
    rest = runner.proceed(stopped)
    assert whole.folder is not None and rest.folder == stopped
    assert len(rest.history) == 4 and metrics(stopped) == metrics(whole.folder)
    assert (stopped / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()
    assert RunFolder.open(stopped).facts()["status"] == "finished"
    assert retest(stopped).scores["accuracy"] == rest.history[-1]["accuracy"] > 0.3
    assert "stopped" in report.write([stopped], pictures=False).read_text()
    assert len(made) == 4 and not any(engine.open for engine in made[:3])  # the last one only tested


def test_it_gives_the_numbers_of_the_vectorised_engine(tmp_path: Path, made: list[InMemory]) -> None:
    mine = runner.execute(settings(tmp_path, "engine=memory", "name=mine"))
    usual = runner.execute(settings(tmp_path, "engine.lane=serial", "engine.device=cpu", "name=usual"))
    assert made and tiny.gap(mine.values, usual.values) < 1e-5
    for row, other in zip(mine.history, usual.history, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4) and row["cohort"] == other["cohort"]
