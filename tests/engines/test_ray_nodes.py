"""A Ray cluster of several machines, each a raylet here: the bits of one process, also when a machine dies."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from declared import build
from ray_machines import Machines, autoscaled, machines
from torch import nn

from consilience.core import tree
from consilience.core.rounds import Round, run
from consilience.engines.ray.cluster import RayCluster
from consilience.engines.ray.pool import ActorPool
from consilience.engines.ray.replies import RemoteReplies
from consilience.engines.vectorised.engine import Vectorised
from consilience.task.task import Task

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'consilience[ray]'")

SETTINGS: dict[str, Any] = {"dtype": "float64", "lane": "serial", "device": "cpu"}


def wide() -> nn.Module:
    """Its tensors are too large for Ray to send them with a reply: they stay on the machine that made them."""
    return tiny.seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 600), nn.Tanh(), nn.Linear(600, 3)))


@functools.cache
def _alone(name: str, rounds: int = 4) -> list[Round]:
    engine = Vectorised(Task(wide()), tiny.federation(), **SETTINGS)
    return list(run(build(name), engine, rounds=rounds, seed=3))


def _assert_same(one: Round, other: Round) -> None:
    assert np.array_equal(one.cohort.ids, other.cohort.ids) and one.cohort.counts == other.cohort.counts
    for mine, theirs in (
        (one.model, other.model),
        (one.snapshot.server, other.snapshot.server),
        (one.snapshot.memory, other.snapshot.memory),
        (one.cohort.reply, other.cohort.reply),
    ):
        assert tiny.same(tree.here(mine), tree.here(theirs))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the workers have."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two() -> Iterator[tuple[Machines, Any]]:
    """The driver's machine and another, with one core each."""
    with machines(num_cpus=1) as cluster:
        yield cluster, cluster.add(num_cpus=1)


def _nodes(engine: RayCluster) -> list[str]:
    assert engine._pool is not None
    return [process.node if process else "" for process in engine._pool.serving.by]


def _engine(cluster: Machines, **more: Any) -> RayCluster:
    return RayCluster(Task(wide()), tiny.federation(), **{"workers": 2, "address": cluster.address, **SETTINGS, **more})


def test_a_machine_that_dies_takes_no_bit_with_it(two: tuple[Machines, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clients move to the other machine with their memories, and repeat what was lost of the round."""
    cluster, other = two
    engine = _engine(cluster)
    repeat, repeated = ActorPool.repeat, []
    monkeypatch.setattr(ActorPool, "repeat", lambda *given: repeated.append(given[1]) or repeat(*given))
    rounds = run(build("scaffold"), engine, rounds=4, seed=3)
    _assert_same(_alone("scaffold")[0], next(rounds))
    assert len(set(_nodes(engine))) == 2 and other.node_id in _nodes(engine)
    begin, killed = RemoteReplies.begin, []

    def dying(self: RemoteReplies, *arguments: Any) -> Any:
        if not killed:  # all clients have replied, and the replies of some lie on the machine that dies now
            cluster.kill(other)
            killed.append(True)
        return begin(self, *arguments)

    monkeypatch.setattr(RemoteReplies, "begin", dying)
    for one, found in itertools.zip_longest(_alone("scaffold")[1:], rounds):
        _assert_same(one, found)
    assert killed and len(repeated) == 1 and set(_nodes(engine)) == {ray.get_runtime_context().get_node_id()}
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ditto", "fedbn", "simfedswap"])
def test_a_machine_that_dies_at_work_takes_no_bit_with_it(
    name: str, two: tuple[Machines, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, other = two
    engine = _engine(cluster)
    rounds = run(build(name), engine, rounds=4, seed=3)
    _assert_same(_alone(name)[0], next(rounds))
    receive, killed = ActorPool._received, []

    def dying(self: ActorPool, *arguments: Any) -> Any:
        if not killed:  # the clients are at work, or their replies wait
            cluster.kill(other)
            killed.append(True)
        return receive(self, *arguments)

    monkeypatch.setattr(ActorPool, "_received", dying)
    for one, found in itertools.zip_longest(_alone(name)[1:], rounds):
        _assert_same(one, found)
    assert killed and other.node_id not in _nodes(engine)
    engine.close()


@pytest.mark.slow
def test_workers_join_when_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    """Two of three workers wait for machines; one comes, dies and is followed by another; no bit changes."""
    with machines(num_cpus=1) as cluster:
        engine = _engine(cluster, workers=3, min_workers=1)
        expected = _alone("scaffold", 10)
        rounds = run(build("scaffold"), engine, rounds=10, seed=3)
        _assert_same(expected[0], next(rounds))
        here = ray.get_runtime_context().get_node_id()
        assert _nodes(engine) == [here] * 3 and len(_running(engine)) == 1
        second, number = cluster.add(num_cpus=1), 1
        number = _until(lambda: len(_running(engine)) == 2, expected, rounds, number, engine)
        assert sorted(map(_nodes(engine).count, (here, second.node_id))) == [1, 2]
        cluster.kill(second)
        _assert_same(expected[number], next(rounds))
        assert _nodes(engine) == [here] * 3
        third = cluster.add(num_cpus=2)
        _until(lambda: len(_running(engine)) == 3, expected, rounds, number + 1, engine)
        assert sorted(map(_nodes(engine).count, (here, third.node_id))) == [1, 2]
        engine.close()


@pytest.mark.slow
def test_the_autoscaler_makes_room() -> None:
    """Ray's own autoscaler, with machines that are raylets here: it starts those that the workers ask for."""
    with autoscaled(cpus=1, most=2) as address:
        engine = RayCluster(Task(wide()), tiny.federation(), workers=3, min_workers=1, address=address, **SETTINGS)
        expected = _alone("scaffold", 10)
        rounds = run(build("scaffold"), engine, rounds=10, seed=3)
        _assert_same(expected[0], next(rounds))
        if len(_running(engine)) < 3:
            _until(lambda: len(_running(engine)) == 3, expected, rounds, 1, engine)
        assert len(set(_nodes(engine))) == 3
        engine.close()


def _running(engine: RayCluster) -> list[Any]:
    assert engine._pool is not None
    return engine._pool.serving.processes.running


def _until(reached: Any, expected: list[Round], rounds: Any, number: int, engine: RayCluster) -> int:
    """Rounds, all as expected, until something is true; a worker takes seconds to start, so wait before each."""
    for _ in range(4):
        processes = engine._pool.serving.processes if engine._pool else None
        assert processes is not None
        ray.wait([one.started for one in processes._starting], timeout=20)
        _assert_same(expected[number], next(rounds))
        number += 1
        if reached():
            return number
    raise AssertionError(f"{len(_running(engine))} workers run after round {number}")
