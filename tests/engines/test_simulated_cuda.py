"""The lanes of a GPU, with simulated graphs and streams on a CPU; `test_cuda_lanes.py` runs them on a GPU."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import simulated_cuda
import tiny
import torch
from declared import build, model_of, representatives
from torch import Tensor

from consilience import algorithms
from consilience.client import LocalTraining
from consilience.core import progress, tree
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.rounds import Round, run
from consilience.engines.vectorised import tuning
from consilience.engines.vectorised.engine import Vectorised
from consilience.engines.vectorised.lanes import cuda
from consilience.engines.vectorised.lanes.cuda import GraphBatched, GraphStreams
from consilience.engines.vectorised.program import Program
from consilience.environments.environment import Environment
from consilience.server.averaging.averaging import Averaging

LANES: dict[str, Callable[..., Any]] = {"batched": GraphBatched, "streams": GraphStreams}
UNEVEN = Environment(steps=(5, 0, 1, 2, 9), communication=0.8, silent="broadcast_model")
KINDS = representatives()
pytestmark = pytest.mark.usefixtures("untraced")
each_lane = pytest.mark.parametrize("lane", list(LANES))


@pytest.fixture(autouse=True)
def main_stream(monkeypatch: pytest.MonkeyPatch) -> simulated_cuda.Stream:
    monkeypatch.setattr(tuning, "TRIAL_SECONDS", 0.01)
    return simulated_cuda.simulate(monkeypatch)


def _engine(name: str, model: str, lane: str, **options: Any) -> Vectorised:
    made = tiny.engine(model_of(name, model), lane=lane, **options)
    made._tuner._lanes[lane] = LANES[lane](compile=False)
    return made


def _train(name: str, engine: Vectorised, rounds: int = 2) -> list[Round]:
    return list(run(build(name), engine, rounds=rounds, seed=1, max_bad_rounds=99))


def _assert_close(runs: list[Round], others: list[Round]) -> None:
    for one, other in zip(runs, others, strict=True):
        assert tiny.gap(one.model, other.model) < 1e-12
        assert tiny.gap(one.cohort.reply, other.cohort.reply) < 1e-12
        assert tiny.gap(one.snapshot.memory, other.snapshot.memory) < 1e-12


@functools.cache
def _in_turn(name: str) -> list[Round]:
    return _train(name, tiny.engine(model_of(name, "convnet"), environment=UNEVEN))


@each_lane
@pytest.mark.parametrize(
    "name", [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in algorithms.names()]
)
def test_recipes_give_what_serial_gives(name: str, lane: str) -> None:
    _assert_close(_train(name, _engine(name, "convnet", lane, environment=UNEVEN)), _in_turn(name))


def test_a_group_that_narrows_gives_what_serial_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "NARROWEST", 2)
    monkeypatch.setattr(cuda, "SHORTEST_TAIL", 1)
    engine = _engine("scaffold", "convnet", "batched", environment=UNEVEN)
    _assert_close(_train("scaffold", engine), _in_turn("scaffold"))
    assert len(engine._tuner._lanes["batched"]._captured) > 1, "no narrower graph"


@pytest.mark.parametrize(("steps", "graphs"), [((9, 9, 3, 3, 3), 2), ((5, 5, 3, 3, 3), 1)])
def test_a_group_narrows_only_for_a_long_tail(
    monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...], graphs: int
) -> None:
    """Another graph, which has to be captured, does not pay for the last two steps."""
    monkeypatch.setattr(cuda, "NARROWEST", 2)
    engine = _engine("fedavg", "mlp", "batched", environment=Environment(steps=steps))
    _train("fedavg", engine, rounds=1)
    assert len(engine._tuner._lanes["batched"]._captured) == graphs


@pytest.mark.parametrize("lane", [*LANES, "narrowing"])
def test_every_client_is_counted_once(monkeypatch: pytest.MonkeyPatch, lane: str) -> None:
    if lane == "narrowing":
        monkeypatch.setattr(cuda, "NARROWEST", 2)
        monkeypatch.setattr(cuda, "SHORTEST_TAIL", 1)
    engine = _engine("fedavg", "mlp", "streams" if lane == "streams" else "batched", environment=UNEVEN)
    counts: list[tuple[int, int]] = []
    with progress.listening(lambda done, of: counts.append((done, of))):
        for done in run(build("fedavg"), engine, rounds=2, seed=1):
            clients = len(done.cohort.ids)
            assert counts[0] == (0, clients) and counts[-1] == (clients, clients)
            assert [one for one, _ in counts] == sorted({one for one, _ in counts}), "counted beyond the last"
            counts.clear()


def test_auto_measures_the_lanes_of_a_gpu() -> None:
    engine = tiny.engine(tiny.MODELS["convnet"], lane="auto", clients_at_once=None)
    engine._tuner._device = torch.device("cuda")
    rounds = _train("scaffold", engine)
    assert engine.choice.lane in ("batched", "streams", "batched-matmul") and engine.choice.compile is False
    kinds = {type(lane) for lane in engine._tuner._lanes.values()}
    assert kinds <= {GraphBatched, GraphStreams} and len(engine._tuner._lanes) == 1
    _assert_close(rounds, _train("scaffold", tiny.engine(tiny.MODELS["convnet"])))


def test_nothing_of_a_lane_that_failed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    carries: list[weakref.ref[Tensor]] = []

    def fold(self: GraphBatched, program: Program, carry: tree.Tree, *rest: Any) -> tree.Tree:
        carries.append(weakref.ref(next(tree.leaves(carry))))
        raise torch.OutOfMemoryError("tried to allocate 94 GiB")

    monkeypatch.setattr(GraphBatched, "fold", fold)
    engine = tiny.engine(tiny.MODELS["mlp"], lane="auto")
    engine._tuner._device = torch.device("cuda")
    with pytest.warns(UserWarning, match="lane 'batched' cannot run this model"):
        _train("fedavg", engine, rounds=1)
    assert engine.choice.lane == "streams" and carries
    assert [carry() for carry in carries] == [None] * len(carries)


@each_lane
def test_memory_that_runs_out_halves_the_groups(
    monkeypatch: pytest.MonkeyPatch, main_stream: simulated_cuda.Stream, lane: str
) -> None:
    replay, left = simulated_cuda.Graph.replay, [2]

    def short(self: simulated_cuda.Graph) -> None:
        left[0] -= 1
        if not left[0]:
            main_stream.waits.clear()
            raise torch.OutOfMemoryError("out of memory")
        replay(self)

    engine = _engine("scaffold", "convnet", lane, environment=UNEVEN)
    halve, waited = engine._tuner.halve, list[int]()

    def halved(clients: int) -> bool:
        waited.append(len(main_stream.waits))
        engine._tuner._make = lambda name, compile: LANES[name](compile=compile)  # type: ignore[method-assign]
        return halve(clients)

    engine._tuner.halve = halved  # type: ignore[method-assign]
    monkeypatch.setattr(simulated_cuda.Graph, "replay", short)
    rounds = _train("scaffold", engine)
    assert engine.choice.clients_at_once == 2
    # before memory is given away, one wait for the stream of each of the five clients, although training failed
    assert waited == [5 if lane == "streams" else 0]
    _assert_close(rounds, _in_turn("scaffold"))


@each_lane
def test_no_carry_is_kept_while_the_next_group_trains(monkeypatch: pytest.MonkeyPatch, lane: str) -> None:
    """Its solver's state would take memory beside that of the group."""
    folded: list[weakref.ref[Tensor]] = []
    fold = LANES[lane].fold  # type: ignore[attr-defined]

    def noted(self: Any, *given: Any) -> tree.Tree:
        assert all(one() is None for one in folded)
        carry = fold(self, *given)
        folded.extend(weakref.ref(leaf) for leaf in tree.leaves(carry["solver"]))
        return carry

    monkeypatch.setattr(LANES[lane], "fold", noted)
    engine = _engine("fedavg", "mlp", lane, clients_at_once=2)
    for _ in run(build("fedavg", momentum=0.9), engine, rounds=2, seed=1):
        pass
    assert folded


def test_a_capture_changes_nothing_and_a_replay_does_what_it_recorded() -> None:
    x, graph = torch.arange(3.0), simulated_cuda.Graph()
    with simulated_cuda.capturing(graph, pool=None, stream=simulated_cuda.Stream()):
        x.add_(x.square().unsqueeze_(0).sum(0))
    assert x.tolist() == [0, 1, 2]
    for expected in ([0, 2, 6], [0, 6, 42]):
        graph.replay()
        assert x.tolist() == expected
    with (
        pytest.raises(RuntimeError, match="not permitted"),
        simulated_cuda.capturing(graph, pool=None, stream=simulated_cuda.Stream()),
    ):
        float(x.sum())


def test_trials_do_not_count_clients_of_an_earlier_run() -> None:
    for _ in run(build("fedavg"), _engine("fedavg", "mlp", "streams"), rounds=1):
        pass
    counts: list[tuple[int, int]] = []
    engine = tiny.engine(tiny.MODELS["mlp"], lane="auto", environment=Environment(steps=(1,) * 5))
    engine._tuner._device = torch.device("cuda")
    with progress.listening(lambda done, of: counts.append((done, of))):
        for _ in run(build("fedavg"), engine, rounds=1):
            pass
    assert counts[0] == (0, 5) and counts[-1] == (5, 5) and counts.count((5, 5)) == 1


@dataclass(frozen=True, kw_only=True)
class Announcing(Averaging):
    """From the second round on, the server sends one more tensor."""

    def broadcast(self, state: tree.Tree, ids: np.ndarray) -> Broadcast:
        sent = super().broadcast(state, ids)
        if "announced" not in state:
            return sent
        return Broadcast(shared={**sent.shared, "bonus": torch.full((), 0.25, dtype=torch.float64)})

    def update(self, state: tree.Tree, cohort: Cohort) -> Any:
        after, notes = super().update(state, cohort)
        return {**after, "announced": torch.ones(1)}, notes


@dataclass(frozen=True, kw_only=True)
class Listening(LocalTraining):
    """Adds the bonus to every parameter after every step."""

    def step(self, task: Any, carry: Any, batch: Any, message: Any, memory: Any) -> Any:
        after = super().step(task, carry, batch, message, memory)
        bonus = message.get("bonus", 0.0)
        params = tree.map_leaves(lambda leaf: leaf + bonus, after["model"]["params"])
        return {**after, "model": {**after["model"], "params": params}}


@each_lane
def test_a_message_with_other_tensors_is_captured_anew(lane: str) -> None:
    algorithm = replace(build("fedavg"), client=Listening(), server=Announcing())

    def trained(engine: Vectorised) -> list[Round]:
        return list(run(algorithm, engine, rounds=3, seed=1))

    _assert_close(trained(_engine("fedavg", "mlp", lane)), trained(tiny.engine(tiny.MODELS["mlp"])))
