"""Runs that train together give what they give alone, whatever they differ in."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tiny

from consilience import algorithms
from consilience.compare.together import Barrier
from consilience.core.algorithm import Algorithm
from consilience.core.rounds import run
from consilience.core.tree import Tree
from consilience.engines.vectorised.engine import Vectorised
from consilience.engines.vectorised.joint import Joint, Request
from consilience.environments.environment import Environment
from consilience.selection.uniform import Uniform
from consilience.task.task import Task

LOCAL: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 4}


def alone(engine: Vectorised, algorithm: Algorithm, seed: int, rounds: int) -> Tree:
    *_, last = run(algorithm, engine, rounds=rounds, seed=seed)
    return {"server": last.snapshot.server, "memory": last.snapshot.memory}


def jointly(engines: list[Vectorised], jobs: list[tuple[Algorithm, int]], rounds: int, same: list[int]) -> list[Tree]:
    """The same runs in threads that meet."""
    barrier, found = Barrier(runs=len(jobs)), dict[int, Tree]()

    def work(number: int) -> None:
        try:
            found[number] = alone(engines[number], *jobs[number], rounds)
        finally:
            barrier.leave(number)

    for number, engine in enumerate(engines):
        engine.delegate(lambda *parts, number=number, **at: barrier.ask(Request(number, *parts, **at)))
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    barrier.serve(Joint(engines, same, [0] * len(engines)))
    for thread in threads:
        thread.join(timeout=60)
    return [found[number] for number in range(len(jobs))]


def build(name: str, **more: Any) -> Algorithm:
    return algorithms.recipe(name)(**LOCAL, selection=Uniform(count=3), **more)


@pytest.mark.parametrize("lane", ["batched", "serial"])
@pytest.mark.parametrize("model", ["mlp", "convnet"])
def test_together_is_alone(lane: str, model: str, untraced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds (with other data), three methods: models, ledgers and memories agree to rounding."""
    jobs = [(build("fedavg"), 0), (build("fedavg"), 1), (build("scaffold"), 0), (build("scaffold"), 1)]
    jobs += [(build("simprox"), 0), (build("ditto", lam=0.1), 1)]
    environment = Environment(stragglers=0.4, communication=0.8)

    def engines() -> list[Vectorised]:
        build = tiny.MODELS[model]
        sizes = {0: (9, 4, 1, 12, 6), 1: (2, 7, 3, 3, 5)}
        return [
            tiny.engine(build, tiny.federation(sizes[seed], seed=seed), lane=lane, environment=environment)
            for _, seed in jobs
        ]

    met: list[int] = []
    inner = Joint._together

    def counted(self: Joint, asked: list[Request]) -> list[Tree]:
        met.append(len(asked))
        return inner(self, asked)

    monkeypatch.setattr(Joint, "_together", counted)
    separate = [alone(engine, *job, 3) for engine, job in zip(engines(), jobs)]
    together = jointly(engines(), jobs, 3, [seed for _, seed in jobs])
    for mine, theirs, (algorithm, seed) in zip(together, separate, jobs):
        assert tiny.gap(mine, theirs) < 1e-12, (algorithm, seed)
    assert met.count(3) == 3 and met.count(2) == 3, "SimProx's clients are FedAvg's; SCAFFOLD's two runs met, too"


def test_different_modules_are_kept_apart(untraced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal shapes are not enough: another kind, or other frozen parameters, and every run works alone."""
    monkeypatch.setattr(Joint, "_together", lambda self, asked: pytest.fail("worked together"))
    jobs = [(build("fedavg"), 0), (build("fedavg"), 1)]
    joint = Joint([tiny.engine(), tiny.engine()], [0, 0], ["relu", "tanh"])
    assert len(set(joint._kinds)) == 2
    frozen = [tiny.seeded(tiny.mlp, seed) for seed in (0, 1)]
    for seed, module in enumerate(frozen):
        module[1].requires_grad_(False).weight.data.fill_(seed)
    engines = [Vectorised(Task(module), tiny.federation(), device="cpu", lane="serial") for module in frozen]
    assert len(set(Joint(engines, [0, 0], ["same", "same"])._kinds)) == 2
    found = jointly(engines, jobs, 1, [0, 0])
    assert len(found) == 2


def test_a_run_that_fails_or_ends_early_does_not_hold_up_the_others(untraced: None) -> None:
    engines = [tiny.engine(), tiny.engine(), tiny.engine()]
    jobs = [(build("fedavg"), 0), (build("fedavg"), 1), (build("fedavg"), 2)]
    barrier, found, failures = Barrier(runs=3), dict[int, Tree](), []

    def work(number: int) -> None:
        try:
            if number == 1:
                raise RuntimeError("broken before its first round")
            found[number] = alone(engines[number], *jobs[number], 1 + number)
        except RuntimeError as problem:
            failures.append(str(problem))
        finally:
            barrier.leave(number)

    for number, engine in enumerate(engines):
        engine.delegate(lambda *parts, number=number, **at: barrier.ask(Request(number, *parts, **at)))
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    barrier.serve(Joint(engines, [0, 0, 0], [0, 0, 0]))
    for thread in threads:
        thread.join(timeout=60)
    assert failures == ["broken before its first round"] and set(found) == {0, 2}
    assert tiny.gap(found[2], alone(tiny.engine(), *jobs[2], 3)) < 1e-12


def test_what_goes_wrong_together_reaches_every_run(untraced: None) -> None:
    engines = [tiny.engine(), tiny.engine()]
    barrier, failures = Barrier(runs=2), []

    def work(number: int) -> None:
        try:
            alone(engines[number], build("fedavg"), 0, 1)
        except ValueError as problem:
            failures.append(str(problem))
        finally:
            barrier.leave(number)

    class Broken(Joint):
        def run_clients(self, requests: Any) -> list[Tree]:
            raise ValueError("out of memory")

    for number, engine in enumerate(engines):
        engine.delegate(lambda *parts, number=number, **at: barrier.ask(Request(number, *parts, **at)))
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    barrier.serve(Broken(engines, [0, 0], [0, 0]))
    for thread in threads:
        thread.join(timeout=60)
    assert failures == ["out of memory"] * 2
