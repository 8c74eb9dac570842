"""Rows 18 to 31 of the fault table: numbers that go wrong, and clients that have next to nothing."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from declared import DECLARED, Declared, build, in_lanes, model_of
from torch import Tensor, nn

from consilience import algorithms
from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.simprox import simprox
from consilience.core import tree
from consilience.core.algorithm import Algorithm, Plain
from consilience.core.capabilities import PreTrainingPass, ReceivesSchedule, capability
from consilience.core.exchange import Cohort, Pool
from consilience.core.federation import Federation
from consilience.core.rounds import Diverged, Round, run
from consilience.core.settings import Invalid
from consilience.environments.environment import Environment
from consilience.selection import Everyone
from consilience.server import Averaging, SimProxWeights, UniformWeights
from consilience.server.averaging.combining.weighted_mean import weighted_mean
from consilience.task.task import Task

pytestmark = pytest.mark.usefixtures("untraced")
SIMILAR = Averaging(weighting=SimProxWeights())
PLAIN = Averaging(weighting=UniformWeights())


def cohort_of(models: Tensor, **buffers: Tensor) -> Cohort:
    """Stacked models [m, d] of clients with different numbers of rows."""
    count = len(models)
    return Cohort(
        reply={"model": {"params": {"w": models}, "buffers": buffers}},
        ids=np.arange(count),
        examples=torch.arange(1, count + 1, dtype=torch.float64),
        steps=np.ones(count, dtype=np.int64),
        round=0,
    )


def merged(server: Averaging, start: Tensor, cohort: Cohort) -> tuple[Tensor, Tensor]:
    """(new parameters, weights) of one server update."""
    buffers = tree.rows(cohort.reply["model"]["buffers"], 0)
    state, notes = server.update(server.init({"params": {"w": start}, "buffers": buffers}, len(cohort)), cohort)
    return server.model(state)["params"]["w"], notes["weights"]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_row_18_a_client_that_did_not_move_and_a_model_of_zeros() -> None:
    """No movement is a movement of 0: no 0/0. A model of zeros has no direction, and is refused by name (S0-7)."""
    start = random(9)
    models = torch.stack([start, start + random(9, seed=1), start + 2 * random(9, seed=2)])
    model, weights = merged(SIMILAR, start, cohort_of(models))
    assert bool(weights.isfinite().all()) and float(weights.sum()) == pytest.approx(1, abs=1e-12)
    assert int(weights.argmax()) == 0 and bool(model.isfinite().all())
    still, uniform = merged(SIMILAR, start, cohort_of(start.repeat(3, 1)))  # nobody moved
    assert uniform.tolist() == [1 / 3] * 3
    torch.testing.assert_close(still, start, rtol=0, atol=1e-15)
    models[1] = 0
    with pytest.raises(Invalid, match="is all zeros, so its cosine similarity is undefined"):
        merged(SIMILAR, start, cohort_of(models))
    with pytest.raises(Invalid, match="the global model is all zeros"):
        merged(SIMILAR, torch.zeros(9, dtype=torch.float64), cohort_of(models))


@pytest.mark.parametrize("count", [2, 3, 7])
def test_row_19_identical_clients_are_averaged_exactly_as_by_the_plain_mean(count: int) -> None:
    start, same = random(50), random(50, seed=1).repeat(count, 1)
    model, weights = merged(SIMILAR, start, cohort_of(same))
    plain, uniform = merged(PLAIN, start, cohort_of(same))
    assert torch.equal(weights, uniform) and torch.equal(model, plain)


@pytest.mark.parametrize("distance", [104.0, 746.0, 1e3, 1e8])
def test_row_20_underflow_of_exp_for_all_clients(distance: float) -> None:
    start = random(400)
    moves = random(5, 400, seed=1)
    moves = moves / moves.norm(dim=1, keepdim=True)
    models = start + (distance + torch.arange(5.0, dtype=torch.float64)[:, None]) * moves
    for server in (SIMILAR, Averaging(weighting=SimProxWeights(softmax=False))):
        model, weights = merged(server, start, cohort_of(models))
        assert bool(weights.isfinite().all()) and abs(float(weights.sum()) - 1) <= 1e-12
        assert int(weights.argmax()) == 0 and bool(model.isfinite().all())


def test_row_21_norms_of_huge_float32_entries() -> None:
    """Equal directions of 1e30 entries have cosine 1, not 0 by overflow."""
    start = torch.full((8,), 1e30)
    models = torch.stack([start, 2 * start, -start])
    state = SIMILAR.init({"params": {"w": start}, "buffers": {}}, 3)
    _, notes = SIMILAR.update(state, cohort_of(models))
    share = float(notes["lambda"])
    distance = 8**0.5 * 1e30 * torch.tensor([[0.0, 1, 2], [1, 0, 3], [2, 3, 0]], dtype=torch.float64)
    gaussian = torch.exp(-0.5 * (distance / (distance.sum() / 6)) ** 2)
    cosine = torch.tensor([[1.0, 1, -1], [1, 1, -1], [-1, -1, 1]], dtype=torch.float64)
    torch.testing.assert_close(notes["similarity"], share * cosine + (1 - share) * gaussian, rtol=0, atol=1e-6)
    assert bool(notes["weights"].isfinite().all())


@pytest.mark.parametrize("count", [2, 10, 100])
def test_row_22_float16_sums_do_not_overflow(count: int) -> None:
    models = torch.full((count, 4), 60_000.0, dtype=torch.float16)
    for server in (PLAIN, Averaging()):
        model, _ = merged(server, models[0], cohort_of(models))
        assert model.dtype == torch.float16 and model.tolist() == [60_000.0] * 4


def test_row_23_bfloat16_is_carried_exactly() -> None:
    values = torch.tensor([1.0, 2**-126, -3.0e38, 1 + 2**-7], dtype=torch.bfloat16)
    start = {"model": {"params": {"w": values}, "buffers": {"n": torch.tensor(3)}}}
    assert tiny.same(tree.unflatten(tree.flatten(tree.clone(start))), start)
    assert tiny.same(tree.rows(tree.stack([start, start]), 1), start)
    assert tree.nbytes(start) == 4 * 2 + 8
    alone = weighted_mean(values.unsqueeze(0), torch.ones(1, dtype=torch.float64))
    assert alone.dtype == torch.bfloat16 and torch.equal(alone, values)
    several = weighted_mean(values.repeat(4, 1), torch.full((4,), 0.25, dtype=torch.float64))
    assert torch.equal(several, values)
    assert tree.all_finite(tree.stack([start, start])).tolist() == [True, True]


class Counted(nn.Module):
    """Batch norm's counter, a mask and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.head = nn.Linear(36, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int32))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(1)
        return self.head(self.norm(self.linear(x.flatten(1))) * self.mask)


@pytest.mark.parametrize("lane", ["serial", "batched"])
def test_row_24_counters_and_flags_are_not_averaged(lane: str) -> None:
    engine = tiny.engine(lambda: tiny.seeded(Counted), lane=lane, environment=Environment(steps=(3, 1, 2, 7, 0)))
    rounds = list(run(fedavg(batch_size=4), engine, rounds=2))
    # the largest of what the clients report: 7 steps on top of the global count
    assert [int(one.model["buffers"]["seen"]) for one in rounds] == [7, 14]
    assert [int(one.model["buffers"]["norm.num_batches_tracked"]) for one in rounds] == [7, 14]
    last = rounds[-1].model["buffers"]
    assert last["seen"].dtype == torch.int32 and last["norm.num_batches_tracked"].dtype == torch.int64
    assert last["mask"].tolist() == [True, False, True, True] and last["mask"].dtype == torch.bool
    assert last["norm.running_mean"].dtype == torch.float64


class Odd(nn.Module):
    """Tied weights, a tensor without entries, a 0-d parameter and a 0-d buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(36, 36, bias=False), nn.Linear(36, 36, bias=False)
        self.two.weight = self.one.weight
        self.head = nn.Linear(36, 3)
        self.nothing = nn.Parameter(torch.zeros(0, 5))
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("offset", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.two(torch.tanh(self.one(x.flatten(1))))
        return self.head(hidden) / self.temperature + self.offset + self.nothing.sum()


@pytest.mark.parametrize("lane", ["serial", "batched"])
@pytest.mark.parametrize("recipe", [fedavg, simprox])
def test_row_25_tied_empty_and_0d_tensors(lane: str, recipe: Any) -> None:
    module = tiny.seeded(Odd)
    engine = tiny.engine(lambda: module, lane=lane)
    *_, last = run(recipe(batch_size=4, lr=0.1, selection=Everyone()), engine, rounds=2)
    start = engine.start()
    assert tiny.structure(last.model) == tiny.structure(start)
    assert "two.weight" not in last.model["params"]
    assert tiny.same(tree.unflatten(tree.flatten(last.model)), last.model)
    assert float(last.model["params"]["temperature"]) != 2.0 and float(last.model["buffers"]["offset"]) == 0.5
    result = Task(module).trained(last.model)
    assert result.one.weight is result.two.weight and result.nothing.shape == (0, 5)


@dataclasses.dataclass(frozen=True)
class Fixed:
    """These clients, in this order of arrival."""

    ids: tuple[int, ...]

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        return np.array(self.ids)


def test_row_26_order_of_arrival_does_not_change_a_bit() -> None:
    def last(**options: Any) -> tree.Tree:
        selection = options.pop("selection", Everyone())
        engine = tiny.engine(tiny.convnet, **options)
        *_, one = run(fedavg(batch_size=4, selection=selection), engine, rounds=1, seed=3)
        assert one.cohort.ids.tolist() == [0, 1, 2, 3, 4]
        return one.model

    expected = last()
    for at_once in (1, 2, 3, 5):  # groups: longest client first, so replies arrive in another order than the ids
        assert tiny.same(last(clients_at_once=at_once), expected)
    for order in itertools.islice(itertools.permutations(range(5)), 1, 120, 17):
        assert tiny.same(last(selection=Fixed(order)), expected)


def test_row_27_number_of_workers_does_not_change_a_bit() -> None:
    data = tiny.federation(tuple(range(1, 13)))
    models = []
    for workers in (1, 2, 4):
        engine = tiny.engine(tiny.convnet, data, lane="streams", workers=workers)
        *_, one = run(fedavg(batch_size=4), engine, rounds=2, seed=3)
        models.append(one.model)
    assert tiny.same(models[0], models[1]) and tiny.same(models[0], models[2])


def build_for(name: str, clients: int) -> Algorithm:
    """The recipe as the contract tests build it, unless it is tied to their number of clients."""
    if name.startswith("duw_"):
        with pytest.raises(Invalid, match="schedule is for 5 clients"):
            list(run(build(name), tiny.engine(tiny.convnet, tiny.federation((3,) * clients)), rounds=1))
        pytest.skip("a schedule is made for its own clients: refused in words")
    return build(name)


@pytest.mark.parametrize(("name", "lane"), in_lanes("serial", "auto"))
def test_row_28_one_client_only(name: str, lane: str) -> None:
    engine = tiny.engine(model_of(name, "convnet"), tiny.federation((9,)), lane=lane)
    rounds = list(run(build_for(name, 1), engine, rounds=2))
    start = engine.start()
    for one in rounds:
        assert one.cohort.ids.tolist() == [0] and tiny.finite(one.model)
        if "weights" in one.notes:
            assert one.notes["weights"].tolist() == [1.0]
    assert name == "local_only" or not tiny.same(rounds[-1].model, start)


@pytest.mark.parametrize(("name", "lane"), in_lanes("serial", "batched"))
def test_row_29_a_client_without_data(name: str, lane: str) -> None:
    data = tiny.federation((5, 0, 3, 0))
    engine = tiny.engine(model_of(name, "convnet"), data, lane=lane)
    algorithm = build_for(name, 4)
    for one in run(algorithm, engine, rounds=2):
        assert one.cohort.ids.tolist() == [0, 2] and tiny.finite(one.model)
        assert np.isnan(one.snapshot.losses[[1, 3]]).all()
    if capability(algorithm.client, PreTrainingPass) or capability(algorithm.server, ReceivesSchedule):
        return  # what they are sent depends on a look at the data, or on the work ahead
    broadcast = algorithm.server.broadcast(algorithm.server.init(engine.start(), 4), np.arange(4))
    asked = engine.exchange(algorithm.client, Plain(), broadcast, np.arange(4), round=0, seed=0)
    assert asked.ids.tolist() == [0, 2] and asked.counts == {"empty_client": 2}
    nobody = engine.exchange(algorithm.client, Plain(), broadcast, np.array([1, 3]), round=0, seed=0)
    assert len(nobody) == 0 and nobody.counts == {"empty_client": 2}


@pytest.mark.parametrize(("name", "lane"), in_lanes("serial", "batched"))
def test_row_30_clients_with_one_class_or_one_row(name: str, lane: str) -> None:
    """Batch norm over one row uses what it learned before, instead of failing or dividing by zero."""
    data = tiny.federation((1, 5, 9, 1))
    y = data.train.y.clone()
    y[1:6] = 2  # client 1 knows one class only; batches of 4 leave it and client 2 a last batch of one row
    data = Federation(train=dataclasses.replace(data.train, y=y), test=data.test, classes=3)
    algorithm, model = build_for(name, 4), model_of(name, "convnet")
    for one in run(algorithm, tiny.engine(model, data, lane=lane), rounds=2):
        assert len(one.cohort) == 4 and one.cohort.counts == {} and tiny.finite(one.model)
        assert np.isfinite(one.snapshot.losses).all()
    (only,) = run(algorithm, tiny.engine(model, tiny.federation((1, 1)), lane=lane), rounds=1)
    assert tiny.finite(only.model)


@pytest.mark.parametrize("name", algorithms.names())
def test_row_31_divergence_at_every_client(name: str) -> None:
    """Two good rounds, then a rate that explodes: the model stays at the last good round, which can be resumed."""
    if DECLARED.get(name, Declared()).models:
        pytest.skip("it needs a model with heads")
    if name in ("fedsplit", "fedprox_fedsplit"):  # their proximal term makes it certain beforehand
        with pytest.raises(Invalid, match="diverges whatever the data"):
            build(name, lr=1e300, epochs=5)
        return
    good, wild = build(name), build(name, lr=1e300, epochs=5)

    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.head = nn.Linear(36, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.linear(x.flatten(1))).square()

    def engine() -> Any:
        return tiny.engine(lambda: tiny.seeded(Squares))

    *_, safe = run(good, engine(), rounds=2)
    seen: list[Round] = []
    with pytest.raises(Diverged, match=r"3 rounds in a row, up to round 5, .*5 nonfinite"):
        for one in run(wild, engine(), rounds=50, resume=safe.snapshot, max_bad_rounds=3):
            seen.append(one)
    assert [one.number for one in seen] == [3, 4, 5]
    for one in seen:
        assert one.cohort.counts == {"nonfinite": 5}
        assert tiny.same(one.snapshot.server, safe.snapshot.server) and tiny.finite(one.model)
    *_, after = run(good, engine(), rounds=6, resume=seen[-1].snapshot)
    assert tiny.finite(after.model) and after.snapshot.bad_rounds == 0
    assert all(math.isfinite(loss) for loss in after.snapshot.losses)
