"""Real Ray processes: any number of workers gives the bits of one process, even when workers are killed."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kind_tasks
import numpy as np
import pytest
import tiny
import torch
from declared import COMBINED, build

from consilience import algorithms
from consilience.algorithms.fedavg import fedavg
from consilience.core import tree
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.evaluate import Evaluate
from consilience.core.exchange import Broadcast
from consilience.core.federation import Federation
from consilience.core.remote import RemoteTensor
from consilience.core.rounds import Round, Snapshot, run
from consilience.core.settings import Invalid
from consilience.engines.ray import cluster as ray_cluster
from consilience.engines.ray import pool
from consilience.engines.ray import session as ray_session
from consilience.engines.ray.cluster import RayCluster
from consilience.engines.ray.pool import ActorPool
from consilience.engines.ray.replies import RemoteReplies
from consilience.engines.ray.transfer import WorkerReplies, balanced_owners
from consilience.engines.vectorised.engine import Vectorised
from consilience.engines.vectorised.tuning import LaneChoice
from consilience.environments.environment import Environment
from consilience.experiments import runner
from consilience.experiments.config import config
from consilience.experiments.model_checks import try_model
from consilience.selection.by_loss import PowerOfChoice
from consilience.task.task import Task

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'consilience[ray]'")

SETTINGS: dict[str, Any] = {"dtype": "float64", "lane": "serial", "device": "cpu"}
# some replies do not arrive, and the clients differ in speed: what a clock needs for a buffer to fill out of order
ENVIRONMENT = Environment(communication=0.85, rows_per_second=20.0, upload=1e5, speed_spread=0.7, jitter=0.3)
OPTIONS: dict[str, dict[str, Any]] = {"fedbuff": {"buffer": 2, "concurrency": 4}}
NAMES = (
    *("fedavg", "simprox", "scaffold", "fedsplit", "fedsiam_da", "simfedswap", "fedbn", "duw_fedavg", "fedper", "krum"),
    *("fedbuff", "ifca", "fedfa", "asking", "combined"),  # ifca looks first, fedfa looks back
)
model = functools.partial(tiny.with_heads, tiny.mlp)
PLAIN = ("dp_fedavg", "fedma")  # that need a chain of layers without batch norm


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    """One Ray for all; tensors of more than 100 bytes a client stay with the workers, so that both kinds occur."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers do
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ray_cluster, "LARGE", 100)
        ray_session.join(None, 16)
        yield
        ray_session.leave()
    torch.set_num_threads(before)


@functools.cache
def _cluster(workers: int, plain: bool = False) -> RayCluster:
    task = Task(tiny.mlp() if plain else model())
    return RayCluster(task, tiny.federation(), workers=workers, environment=ENVIRONMENT, **SETTINGS)


@pytest.fixture(scope="module")
def cluster(session: None) -> Iterator[Callable[..., RayCluster]]:
    """Workers that many tests share: a run begins by forgetting all."""
    yield _cluster
    for made in (_cluster(1), _cluster(2), _cluster(4), _cluster(2, True)):
        made.close()
    _cluster.cache_clear()


def _algorithm(name: str) -> Algorithm:
    if name == "asking":
        return build("fedavg", selection=PowerOfChoice(count=3, candidates=4))
    if name == "combined":
        return fedavg(**COMBINED)
    return build(name, **OPTIONS.get(name, {}))


@functools.cache
def _alone(name: str, rounds: int = 3) -> list[Round]:
    task = Task(tiny.mlp() if name in PLAIN else model())
    engine = Vectorised(task, tiny.federation(), environment=ENVIRONMENT, **SETTINGS)
    return list(run(_algorithm(name), engine, rounds=rounds, seed=3))


def _assert_same(one: Round, other: Round) -> None:
    assert np.array_equal(one.cohort.ids, other.cohort.ids) and one.cohort.counts == other.cohort.counts
    assert np.array_equal(one.cohort.steps, other.cohort.steps) and torch.equal(
        one.cohort.examples, other.cohort.examples
    )
    assert (one.bytes_up, one.bytes_down, one.clock) == (other.bytes_up, other.bytes_down, other.clock)
    for mine, theirs in (
        (one.model, other.model),
        (one.snapshot.server, other.snapshot.server),
        (one.snapshot.memory, other.snapshot.memory),
        (one.snapshot.pending, other.snapshot.pending),
        (one.cohort.reply, other.cohort.reply),
    ):
        assert tiny.same(tree.here(mine), tree.here(theirs))
    assert np.array_equal(one.snapshot.losses, other.snapshot.losses, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_two_workers_give_the_bits_of_one_process(name: str, cluster: Callable[[int], RayCluster]) -> None:
    found = run(_algorithm(name), cluster(2), rounds=3, seed=3)
    for one, other in itertools.zip_longest(_alone(name), found):
        _assert_same(one, other)
        assert not any(
            isinstance(leaf, RemoteTensor) and not leaf.source.lasting for leaf in tree.leaves(other.snapshot.server)
        )


ADAPTERS: tuple[dict[str, Any], ...] = (
    *({"name": "flora"}, {"name": "flexlora", "ranks": (2, 1)}, {"name": "ffa_lora"}),
    *({"name": "fedit"}, {"name": "hetlora", "ranks": (2, 1)}),
)


@pytest.fixture(scope="module")
def spread(session: None) -> Iterator[Callable[[Task], RayCluster]]:
    """Two workers for each form of the task: three of these methods train the same one."""
    made: dict[Any, RayCluster] = {}

    def of(task: Task) -> RayCluster:
        form = (*tiny.structure(task.start()).items(), task.frozen_digest)
        if form not in made:
            made[form] = RayCluster(task, tiny.federation(), workers=2, environment=ENVIRONMENT, **SETTINGS)
        return made[form]

    yield of
    for cluster in made.values():
        cluster.close()


@pytest.mark.parametrize("options", ADAPTERS, ids=lambda options: options["name"])
def test_adapters_are_merged_to_the_same_bits(options: dict[str, Any], spread: Callable[[Task], RayCluster]) -> None:
    algorithm = build(**options)
    task = algorithm.prepared(Task(tiny.lora_mlp()))
    alone = Vectorised(task, tiny.federation(), environment=ENVIRONMENT, **SETTINGS)
    found = [list(run(algorithm, engine, rounds=2, seed=3)) for engine in (alone, spread(task))]
    for one, other in zip(*found, strict=True):
        _assert_same(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*algorithms.names()} - {*NAMES} - {options["name"] for options in ADAPTERS}))
def test_every_other_recipe_gives_the_bits_of_one_process(name: str, cluster: Callable[..., RayCluster]) -> None:
    found = run(_algorithm(name), cluster(2, name in PLAIN), rounds=3, seed=3)
    for one, other in itertools.zip_longest(_alone(name), found):
        _assert_same(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_workers_gives_the_same_bits(
    workers: int, name: str, cluster: Callable[[int], RayCluster]
) -> None:
    for one, other in itertools.zip_longest(_alone(name), run(_algorithm(name), cluster(workers), rounds=3, seed=3)):
        _assert_same(one, other)


@pytest.mark.parametrize("name", ["fedavg", "simprox", "scaffold", "duw_fedavg", "fedsiam_da"])
def test_models_are_merged_without_coming_to_the_driver(
    name: str, cluster: Callable[[int], RayCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(self: RemoteReplies, left: Any, rows: np.ndarray) -> None:
        raise AssertionError(f"{left.path} was fetched")

    monkeypatch.setattr(RemoteReplies, "fetch", fetch)
    found = list(run(_algorithm(name), cluster(2), rounds=3, seed=3))
    assert any(isinstance(leaf, RemoteTensor) for leaf in tree.leaves(found[-1].cohort.reply))
    assert tiny.same(found[-1].model, _alone(name)[-1].model)


def test_memories_are_fetched_when_they_are_read(cluster: Callable[[int], RayCluster]) -> None:
    first, second = itertools.islice(run(_algorithm("scaffold"), cluster(2), rounds=3, seed=3), 2)
    expected = _alone("scaffold")
    for one, other in zip(expected, (first, second)):  # the second round has not changed what the first returned
        assert all(isinstance(leaf, RemoteTensor) for leaf in tree.leaves(other.snapshot.memory))
        assert tiny.same(one.snapshot.memory, tree.here(other.snapshot.memory))


def test_a_run_continues_on_either_engine(cluster: Callable[[int], RayCluster]) -> None:
    algorithm, straight = _algorithm("scaffold"), _alone("scaffold")[-1]
    alone = Vectorised(Task(model()), tiny.federation(), environment=ENVIRONMENT, **SETTINGS)
    saved = [found.snapshot for found in run(algorithm, cluster(2), rounds=2, seed=3)][-1]
    saved = Snapshot(**{**vars(saved), "memory": tree.clone(tree.here(saved.memory))})  # as a checkpoint holds it
    for engine in (alone, cluster(2)):
        (last,) = run(algorithm, engine, rounds=3, seed=3, resume=saved)
        _assert_same(straight, last)
    halfway = _alone("scaffold")[1].snapshot
    (last,) = run(algorithm, cluster(2), rounds=3, seed=3, resume=halfway)
    _assert_same(straight, last)


def _kill(engine: RayCluster, worker: int) -> None:
    """Kill a worker's process, and wait until it is gone."""
    pid = _pool(engine).pids()[worker]
    os.kill(pid, signal.SIGKILL)
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError(f"{pid} is still there")


def _pool(engine: RayCluster) -> ActorPool:
    assert engine._pool is not None
    return engine._pool


def _killing(engine: RayCluster, method: str, worker: int, monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Kill a worker as soon as it was sent its share of something; the list counts how often."""
    original, killed = getattr(ActorPool, method), []
    pids = {}

    def sending(self: ActorPool, to: int, *arguments: Any) -> Any:
        if to == worker and len(killed) < times:
            pids[to] = self.pids()[to]
        sent = original(self, to, *arguments)
        if to == worker and len(killed) < times:
            killed.append(pids[to])
            os.kill(pids[to], signal.SIGKILL)
        return sent

    monkeypatch.setattr(ActorPool, method, sending)
    return killed


def test_a_killed_worker_changes_no_bit(cluster: Callable[[int], RayCluster], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, expected = cluster(2), _alone("scaffold")
    rounds = run(_algorithm("scaffold"), engine, rounds=3, seed=3)
    _assert_same(expected[0], next(rounds))
    with monkeypatch.context() as patched:
        killed = _killing(engine, "_send", 1, patched, times=1)  # in the middle of its work
        _assert_same(expected[1], next(rounds))
        assert len(killed) == 1
    _kill(engine, 0)  # between two rounds
    with monkeypatch.context() as patched:
        killed = _killing(engine, "begin_reduce", 1, patched, times=1)  # while it merges
        _assert_same(expected[2], next(rounds))
        assert len(killed) == 1


def test_a_worker_that_keeps_dying_loses_its_clients_for_a_round(
    cluster: Callable[[int], RayCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, failures = cluster(2), 2
    monkeypatch.setattr(pool, "FAILURES", failures)
    rounds = run(_algorithm("scaffold"), engine, rounds=3, seed=3)
    first = next(rounds)
    with monkeypatch.context() as patched:
        killed = _killing(engine, "_send", 1, patched, times=failures)
        second = next(rounds)
    assert len(killed) == failures
    asked = _alone("scaffold")[1].cohort.ids
    lost = asked[engine.owner[asked] == 1]
    assert len(lost) and second.cohort.counts["worker_lost"] == len(lost)
    assert np.array_equal(second.cohort.ids, np.setdiff1d(asked, lost))
    before, after = (tree.rows(found.snapshot.memory, torch.from_numpy(lost)) for found in (first, second))
    assert tiny.same(before, after)  # they remember what they did
    third = next(rounds)
    assert (engine.owner[third.cohort.ids] == 1).any() and "worker_lost" not in third.cohort.counts


def test_what_goes_wrong_in_a_worker_is_raised_here(cluster: Callable[[int], RayCluster]) -> None:
    engine = cluster(2)
    question = Broadcast(shared={"model": {}})
    with pytest.raises(KeyError) as alone:
        Vectorised(Task(model()), tiny.federation(), **SETTINGS).exchange(
            Evaluate(), Plain(), question, np.arange(5), round=0, seed=0
        )
    with pytest.raises(KeyError) as there:
        engine.exchange(Evaluate(), Plain(), question, np.arange(5), round=0, seed=0)
    assert str(there.value) == str(alone.value)


def test_one_worker_measures_and_all_take_its_lane(session: None) -> None:
    engine = RayCluster(Task(tiny.mlp()), tiny.federation(), workers=2, dtype="float64", device="cpu")
    list(run(build("fedavg"), engine, rounds=1, seed=3))
    choice = engine.choice
    assert choice.lane in ("serial", "batched") and choice.clients_at_once and choice.compile is not None
    again = Vectorised(Task(tiny.mlp()), tiny.federation(), dtype="float64", device="cpu", lane=choice.lane)
    (one,), (other,) = (run(build("fedavg"), which, rounds=1, seed=3) for which in (engine, again))
    assert tiny.gap(one.model, other.model) < 1e-12
    engine.close()
    with pytest.raises(AssertionError):
        _pool(engine)


def test_ray_listens_on_this_machine_alone(session: None) -> None:
    assert {node["NodeManagerAddress"] for node in ray.nodes()} <= {"127.0.0.1", "::1"}


@pytest.mark.slow
def test_this_process_keeps_its_answers_to_signals() -> None:
    """Ray would abort the process on SIGTERM: seen from outside, in a process of its own."""
    script = """
import os, signal
from consilience.engines.ray import session
signal.signal(signal.SIGTERM, lambda *_: print("asked to stop", flush=True))
session.join(None, 1)
os.kill(os.getpid(), signal.SIGTERM)
session.leave()
print("left")
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert found.returncode == 0 and found.stdout.split("\n")[:2] == ["asked to stop", "left"], found.stderr


def test_rows_are_balanced_and_every_worker_has_some() -> None:
    owner = balanced_owners(np.array([9.0, 4, 1, 12, 6]), 2)
    assert owner.tolist() == [1, 0, 1, 0, 1]  # 12 + 4 and 9 + 6 + 1
    assert sorted(balanced_owners(np.array([5.0, 0, 0]), 3).tolist()) == [0, 1, 2]
    sizes = np.random.default_rng(0).integers(1, 100, 50).astype(float)
    loads = np.bincount(balanced_owners(sizes, 4), sizes)
    assert loads.max() - loads.min() <= sizes.min() + 1e-9 or loads.max() / loads.mean() < 1.02


def test_the_order_of_arrival_does_not_matter() -> None:
    """100 orders in which 4 workers could be heard, over any share of the clients: one outcome."""
    draw, outcomes = np.random.default_rng(0), set()
    values = torch.randn(12, 3, dtype=torch.float64)
    for _ in range(100):
        owner = draw.integers(0, 4, 12)
        owner[:4] = np.arange(4)
        arrived = draw.permutation(4)
        ids = [np.flatnonzero(owner == worker) for worker in arrived]
        sent = [WorkerReplies({"model": values[torch.from_numpy(mine)].numpy()}, LaneChoice()) for mine in ids]
        replies = RemoteReplies(1, sent, ids, [[]] * 4, torch.device("cpu"), lambda *_: list, lambda _: [])
        outcomes.add(replies.tree["model"].numpy().tobytes())
    assert outcomes == {values.numpy().tobytes()}


@pytest.mark.parametrize(
    ("address", "why"), [("127.0.0.1:1", "cannot be joined|does not answer"), ("ray://x:1", "client")]
)
def test_an_address_that_cannot_be_used_is_refused_at_once(address: str, why: str) -> None:
    began = time.monotonic()
    with pytest.raises(Invalid, match=why):
        ray_session._start(ray, address, 1)
    assert time.monotonic() - began < 2 * ray_session.CONNECT_SECONDS


def test_more_workers_than_clients_are_refused() -> None:
    with pytest.raises(Invalid, match="workers = 6 is more than the 5 clients"):
        RayCluster(Task(tiny.mlp()), tiny.federation(), workers=6)


def _table(folder: Path, *more: str) -> list[str]:
    settings = ["threads=1", "engine.dtype=float64", "engine.lane=serial", "engine.device=cpu", "partition.clients=6"]
    return [*settings, "algorithm=scaffold", "algorithm.epochs=1", "model.hidden=[16]", f"runs={folder}", *more]


@pytest.mark.slow
def test_run_folders_do_not_tell_the_engines_apart(tmp_path: Path, session: None) -> None:
    alone = runner.execute(config.load(None, _table(tmp_path, "rounds=4", "name=alone")))
    runner.execute(config.load(None, _table(tmp_path, "rounds=2", "name=ray", "engine=ray", "engine.workers=2")))
    third = runner.proceed(tmp_path / "ray", ["rounds=3", "engine.workers=1"])
    back = ["engine=vectorised", "engine.workers=", "engine.threads="]
    last = runner.proceed(tmp_path / "ray", ["rounds=4", *back])
    assert third.folder == last.folder
    for file in ("model.safetensors", "metrics.jsonl"):
        assert (tmp_path / "ray" / file).read_bytes() == (tmp_path / "alone" / file).read_bytes()
    assert tiny.same(alone.values, last.values)
    with pytest.raises(Invalid, match=r"engine\.threads"):
        runner.proceed(tmp_path / "ray", ["rounds=5", "engine=ray", "engine.threads=2"])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "dense" else pytest.mark.slow) for kind in kind_tasks.CASES]
)
def test_another_kind_of_task_with_weights_of_rows(kind: str) -> None:
    """Class weights, ignored entries and weights of rows reach the workers, and the sums of all metrics come back."""
    draw = torch.Generator().manual_seed(0)
    rows = kind_tasks.CASES[kind].rows
    weights = {"class_weights": (1.0, 2.0, 3.0)} if kind == "dense" else {}
    clients = [(*rows(size, draw), torch.rand(size, generator=draw) + 0.1) for size in (4, 2, 3)]
    federation = Federation.from_clients(clients, client_tests=[rows(2, draw) for _ in clients])
    task = try_model(kind_tasks.task(kind, **weights), federation, "the model", "the data")
    settings = {"device": "cpu", "dtype": "float64", "lane": "serial"}
    cluster, here = RayCluster(task, federation, workers=2, **settings), Vectorised(task, federation, **settings)
    try:
        (there,), (mine,) = (run(build("fedavg"), engine, rounds=1, seed=1) for engine in (cluster, here))
        assert tiny.same(tree.here(there.model), mine.model)
        everyone = np.arange(3)
        asked = Broadcast(shared={"model": mine.model})
        said = [e.exchange(Evaluate(), Plain(), asked, everyone, round=0, seed=0) for e in (cluster, here)]
        assert tiny.same(tree.here(said[0].reply), said[1].reply)
    finally:
        cluster.close()
