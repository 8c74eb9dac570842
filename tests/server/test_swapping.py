"""The swapping server: schedule, who holds what, silence, averages, room, traffic."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.fedswap import fedswap
from consilience.algorithms.simfedswap import simfedswap
from consilience.client.terms.proximal import Proximal
from consilience.core import tree
from consilience.core.exchange import Cohort
from consilience.core.rounds import Round, run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.environments.environment import Environment
from consilience.experiments.assembly import assemble
from consilience.experiments.config import config
from consilience.selection import Everyone, SlidingWindow, Uniform
from consilience.selection.fixed_for_rounds import FixedForRounds
from consilience.server.averaging.ledgers.drift import MeanDrift
from consilience.server.averaging.weighting.by_size import UniformWeights
from consilience.server.geometry.model_similarity import Layerwise
from consilience.server.geometry.pairing import ExactMatching, Greedy, MinimumSimilarity, Random
from consilience.server.rules.swapping import Swapping, traffic

pytestmark = pytest.mark.usefixtures("untraced")
USUAL: dict[str, Any] = {"lr": 0.05, "epochs": 1, "batch_size": 4}


def model(value: float) -> Tree:
    """One weight matrix, one vector, one float buffer and one counter, all told apart by `value`."""
    weight = torch.tensor([[value, 1.0], [0.0, value], [2.0, -1.0]], dtype=torch.float64)
    return {
        "params": {"weight": weight, "bias": torch.full((3,), value, dtype=torch.float64)},
        "buffers": {"mean": torch.full((2,), 10 * value, dtype=torch.float64), "count": torch.tensor(int(value))},
    }


def cohort(values: dict[int, float], round: int, *, examples: tuple[int, ...] = (), **options: Any) -> Cohort:
    """Clients that sent `model(value)`."""
    m = len(values)
    return Cohort(
        reply={"model": tree.stack([model(value) for value in values.values()])},
        ids=np.array(list(values)),
        examples=torch.tensor(examples or (1,) * m, dtype=torch.float64),
        steps=np.ones(m, dtype=np.int64),
        round=round,
        **options,
    )


def holds(server: Swapping, state: Tree, clients: int) -> list[float]:
    """The value of the model that each client would be sent, once parameters and buffers agree about it."""
    sent = server.broadcast(state, np.arange(clients))
    assert sent.shared == {}
    models = sent.personal["model"]
    values = models["params"]["bias"][:, 0].tolist()
    if len(set(values)) > 1:  # not just averaged
        for k, value in enumerate(values):
            assert tiny.same(tree.rows(models, k), model(value)), "a model must travel whole"
    return values


class Scripted:
    """A similarity that says what it is told."""

    def __init__(self, *pairs: tuple[int, int], m: int) -> None:
        self.matrix = torch.ones(m, m, dtype=torch.float64)
        for rank, (a, b) in enumerate(pairs):
            self.matrix[a, b] = self.matrix[b, a] = rank / 100

    def compare(self, models: Tree, ancestor: Tree) -> torch.Tensor:
        return self.matrix


def test_two_cycles_by_hand() -> None:
    server = Swapping(every=3, similarity=Scripted((0, 2), (1, 3), m=4))
    state = server.init(model(0), 4)
    assert holds(server, state, 4) == [0, 0, 0, 0]
    state, notes = server.update(state, cohort({0: 1, 1: 2, 2: 3, 3: 4}, round=0))
    assert holds(server, state, 4) == [3, 4, 1, 2]
    assert notes["model_of"].tolist() == [2, 3, 0, 1]
    assert float(server.model(state)["params"]["bias"][0]) == 2.5  # what an average now would give
    state, _ = server.update(state, cohort({0: 30, 1: 40, 2: 10, 3: 20}, round=1))
    assert holds(server, state, 4) == [10, 20, 30, 40]
    state, notes = server.update(state, cohort({0: 8, 1: 4, 2: 2, 3: 2}, round=2))
    assert holds(server, state, 4) == [4, 4, 4, 4] and "model_of" not in notes
    assert float(server.model(state)["buffers"]["mean"][0]) == 40 and int(server.model(state)["buffers"]["count"]) == 8
    state, _ = server.update(state, cohort({0: 1, 1: 2, 2: 3, 3: 4}, round=3))
    assert holds(server, state, 4) == [3, 4, 1, 2]


@pytest.mark.parametrize("every", [1, 2, 4])
def test_every_so_manyth_event_is_an_average(every: int) -> None:
    server = Swapping(every=every, pairing=Random())
    state = server.init(model(0), 2)
    swaps = []
    for number in range(9):
        state, notes = server.update(state, cohort({0: 1, 1: 2}, round=number))
        swaps.append("model_of" in notes)
    assert swaps == [(number + 1) % every != 0 for number in range(9)]  # no average after the very first step


def test_an_average_weighs_by_the_rows_of_the_holder() -> None:
    server = Swapping(every=2, similarity=Scripted((0, 1), m=2))
    state, _ = server.update(server.init(model(0), 2), cohort({0: 1, 1: 2}, round=0, examples=(3, 1)))
    assert holds(server, state, 2) == [2, 1]
    # the model that client 1 trained is with client 0 now, and counts with client 0's three rows
    state, notes = server.update(state, cohort({0: 2, 1: 1}, round=1, examples=(3, 1)))
    assert notes["weights"].tolist() == [0.75, 0.25] and holds(server, state, 2) == [1.75, 1.75]


@pytest.mark.parametrize(
    ("clients", "share", "swaps"), [(7, 1.0, 3), (7, 0.5, 1), (8, 0.5, 2), (9, 0.3, 1), (1, 1.0, 0)]
)
@pytest.mark.parametrize("pairing", [Random(), Greedy(), MinimumSimilarity(), ExactMatching()])
def test_the_swap_percentage_is_of_the_pairs_rounded_down(clients: int, share: float, swaps: int, pairing: Any) -> None:
    server = Swapping(pairing=pairing, swap_percentage=share)
    sent = {client: float(client + 1) for client in range(clients)}
    state, _ = server.update(server.init(model(0), clients), cohort(sent, round=0))
    after = holds(server, state, clients)
    assert sorted(after) == sorted(sent.values())  # nothing lost, nothing doubled
    assert sum(after[client] != value for client, value in sent.items()) == 2 * swaps


def test_a_swap_percentage_that_is_exact_loses_no_pair_to_rounding() -> None:
    assert 0.29 * 100 < 29  # in binary
    server = Swapping(pairing=Random(), swap_percentage=0.29)
    sent = {client: float(client + 1) for client in range(200)}
    _, notes = server.update(server.init(model(0), 200), cohort(sent, round=0))
    assert int((notes["model_of"] != torch.arange(200)).sum()) == 58


def test_swapping_does_not_change_the_uniform_mean() -> None:
    server = Swapping(pairing=Random(), weighting=UniformWeights())
    state, _ = server.update(
        server.init(model(0), 5), cohort({k: k * k for k in range(5)}, round=0, examples=(5, 1, 1, 1, 9))
    )
    assert float(server.model(state)["params"]["bias"][0]) == pytest.approx(np.mean(holds(server, state, 5)))


# --- who is missing ---------------------------------------------------------------------------------------------------


def test_who_does_not_answer_keeps_the_model_it_had() -> None:
    server = Swapping(every=4, pairing=Random())
    state, _ = server.update(server.init(model(0), 3), cohort({0: 1, 1: 2, 2: 3}, round=0))
    before = holds(server, state, 3)
    state, _ = server.update(state, cohort({0: 5, 1: 6}, round=1))
    assert holds(server, state, 3) == [6, 5, before[2]]
    state, _ = server.update(state, cohort({2: 7}, round=2))  # alone: nobody to swap with
    assert holds(server, state, 3) == [6, 5, 7]
    state, _ = server.update(state, cohort({1: 9}, round=3))  # an average over those that answered
    assert holds(server, state, 3) == [9, 9, 9]


def test_a_broadcast_model_counts_in_an_average_and_is_not_swapped() -> None:
    server = Swapping(every=2, similarity=Scripted((0, 1), m=2))
    heard = np.array([True, False, True])
    state, notes = server.update(server.init(model(0), 3), cohort({0: 1, 1: 0, 2: 3}, round=0, heard=heard))
    assert holds(server, state, 3) == [3, 0, 1] and notes["model_of"].tolist() == [2, 1, 0]
    state, _ = server.update(state, cohort({0: 3, 1: 0, 2: 3}, round=1, heard=heard))
    assert holds(server, state, 3) == [2, 2, 2]


def test_a_newcomer_starts_from_the_last_average() -> None:
    server = Swapping(every=3, pairing=Random())
    state = server.init(model(7), 4)
    state, _ = server.update(state, cohort({0: 1, 1: 2}, round=0))
    assert holds(server, state, 4) == [2, 1, 7, 7]


def test_when_an_average_is_lost_everyone_goes_on_with_what_it_holds() -> None:
    server = Swapping(every=2, pairing=Random())
    state, _ = server.update(server.init(model(0), 2), cohort({0: 1, 1: 2}, round=0))
    # round 1 brought no reply, so that `update` was never called
    state, _ = server.update(state, cohort({0: 3, 1: 4}, round=2))
    assert holds(server, state, 2) == [4, 3]


def test_the_shelf_has_room_for_the_participants_only() -> None:
    assert int(Swapping(room=2).init(model(0), 9)["room"]) == 2
    assert int(Swapping(room=0.3).init(model(0), 20)["room"]) == 6
    assert int(Swapping(room=50).init(model(0), 9)["room"]) == 9
    server = Swapping(room=2, every=5, pairing=Random())
    state = server.init(model(0), 9)
    state, _ = server.update(state, cohort({3: 1, 4: 2}, round=0))
    shape = tiny.structure(state)
    state, _ = server.update(state, cohort({4: 5}, round=1))
    assert sorted(state["holders"].tolist()) == [3, 4] and tiny.structure(state) == shape
    state, _ = server.update(state, cohort({6: 1, 7: 2}, round=2))  # others: those before have to go
    assert sorted(state["holders"].tolist()) == [6, 7] and tiny.structure(state) == shape
    with pytest.raises(
        Invalid, match=r"3 clients take part, and the server has room for 2 models: raise Swapping\.room"
    ):
        server.update(state, cohort({0: 1, 1: 2, 2: 3}, round=3))


def test_the_order_of_arrival_does_not_matter_in_a_swap() -> None:
    sent = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0, 4: 5.0}
    for pairing in (Random(), Greedy(), MinimumSimilarity(), ExactMatching()):
        server = Swapping(pairing=pairing)
        state = server.init(model(0), 5)
        expected, _ = server.update(state, cohort(sent, round=1, seed=3, examples=(1, 2, 3, 4, 5)))
        turned = {client: sent[client] for client in (3, 1, 4, 0, 2)}
        got, _ = server.update(state, cohort(turned, round=1, seed=3, examples=(4, 2, 5, 1, 3)))
        assert tiny.gap(got, expected) <= 1e-12


# --- whole runs -------------------------------------------------------------------------------------------------------


def train(algorithm: Any, rounds: int = 4, seed: int = 1, **options: Any) -> list[Round]:
    engine = tiny.engine(tiny.convnet, **options)
    return list(run(algorithm, engine, rounds=rounds, seed=seed))


def np_cka(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(0), y - y.mean(0)
    return float((np.square(x.T @ y).sum()) / np.sqrt(np.square(x.T @ x).sum() * np.square(y.T @ y).sum()))


def np_similarity(models: list[dict[str, np.ndarray]]) -> np.ndarray:
    m = len(models)
    found = np.zeros((m, m))
    for a, b in itertools.product(range(m), repeat=2):
        layers = []
        for name, value in models[a].items():
            if value.ndim > 1:
                x, y = value.reshape(len(value), -1), models[b][name].reshape(len(value), -1)
                layers.append(np_cka(x, y) if x.shape[0] >= x.shape[1] else np_cka(x.T, y.T))
        found[a, b] = np.mean(layers)
    return found


def np_mss(similarity: np.ndarray) -> dict[int, int]:
    left, partner = set(range(len(similarity))), {}
    while len(left) > 1:
        a, b = min(itertools.combinations(sorted(left), 2), key=lambda pair: similarity[pair])
        partner[a], partner[b] = b, a
        left -= {a, b}
    return partner


def test_a_run_swaps_what_an_independent_reading_of_the_paper_swaps() -> None:
    algorithm = simfedswap(h2=3, **USUAL)
    for one in train(algorithm, rounds=5):
        reply = one.cohort.reply["model"]
        sent = algorithm.server.broadcast(one.snapshot.server, one.chosen).personal["model"]
        if one.number % 3 == 0:
            shares = np.array(tiny.SIZES) / sum(tiny.SIZES)
            for name, value in reply["params"].items():
                expected = np.tensordot(shares, value.numpy(), 1)
                np.testing.assert_allclose(sent["params"][name][2].numpy(), expected, atol=1e-12)
            continue
        models = [{name: value[k].numpy() for name, value in reply["params"].items()} for k in range(5)]
        partner = np_mss(np_similarity(models))
        assert len(partner) == 4  # the fifth is left out
        for k in range(5):
            assert tiny.same(tree.rows(sent, k), tree.rows(reply, partner.get(k, k)))


def test_averaging_at_every_event_is_fedavg() -> None:
    for one, other in zip(train(simfedswap(h2=1, **USUAL)), train(fedavg(**USUAL)), strict=True):
        assert tiny.gap(one.model, other.model) <= 1e-12


def test_h1_steps_are_so_many_epochs() -> None:
    assert simfedswap(h1=5, epochs=2).client.work.epochs == 10
    once, thrice = (train(fedswap(h1=h1, h2=1, **{**USUAL, "epochs": e}), 2) for h1, e in ((1, 3), (3, 1)))
    assert tiny.same(once[-1].model, thrice[-1].model)


def test_random_swaps_follow_the_seed_of_the_run() -> None:
    def partners(seed: int) -> list[list[int]]:
        return [one.notes["model_of"].tolist() for one in train(fedswap(h2=9, **USUAL), rounds=6, seed=seed)]

    assert partners(1) == partners(1) != partners(2)
    assert len({tuple(one) for one in partners(1)}) > 1


def test_participants_change_at_averages_only() -> None:
    algorithm = simfedswap(h2=3, selection=Uniform(count=3), **USUAL)
    assert algorithm.selection == FixedForRounds(inner=Uniform(count=3), rounds=3)
    assert algorithm.server.room == 3
    chosen = [one.chosen.tolist() for one in train(algorithm, rounds=9)]
    assert all(chosen[k] == chosen[k - k % 3] for k in range(9)) and chosen[0] != chosen[3]


def test_room_follows_the_selection() -> None:
    for selection, room in ((Everyone(), None), (Uniform(fraction=0.5), 0.5), (SlidingWindow(fraction=0.3), 0.3)):
        assert fedswap(selection=selection).server.room == room
    held = FixedForRounds(inner=Uniform(count=2), rounds=3)
    assert fedswap(selection=held).selection == held and fedswap(selection=held).server.room == 2


@pytest.mark.parametrize("metric", ["cka_rbf", "cka_debiased", "cka_deconfounded", "cca", "hsic", "osad"])
def test_every_metric_drives_a_run(metric: Any) -> None:
    for pairing in (Greedy(), ExactMatching()):
        for one in train(simfedswap(metric=metric, pairing=pairing, h2=2, **USUAL), rounds=3):
            assert tiny.finite(one.snapshot.server)
            if one.number % 2:
                assert one.notes["similarity"].shape == (5, 5) and bool(one.notes["similarity"].isfinite().all())


def test_a_client_that_is_away_keeps_its_model_in_a_run() -> None:
    away = Environment(communication=(1.0, 1.0, 0.0, 1.0, 1.0))
    start = tiny.engine(tiny.convnet).start()
    algorithm = fedswap(h2=4, **USUAL)
    for one in train(algorithm, rounds=3, environment=away):
        sent = algorithm.server.broadcast(one.snapshot.server, np.array([2])).personal["model"]
        assert tiny.same(tree.rows(sent, 0), start)


# --- combinations -----------------------------------------------------------------------------------------------------


def test_fedprox_under_swapping_pulls_towards_the_model_received() -> None:
    held = train(fedswap(h2=9, terms=(Proximal(mu=19.0),), **USUAL), rounds=3)
    free = train(fedswap(h2=9, **USUAL), rounds=3)

    def moved(rounds: list[Round]) -> float:
        server = fedswap(h2=9).server
        received = server.broadcast(rounds[1].snapshot.server, np.arange(5)).personal["model"]["params"]
        reply = rounds[2].cohort.reply["model"]["params"]
        return sum(float((reply[name] - received[name]).square().sum()) for name in reply)

    assert moved(held) < 0.7 * moved(free)
    spread = held[1].snapshot.server["held"]["params"]["0.weight"]
    assert float((spread[0] - spread[1]).abs().max()) > 1e-6  # the models received do differ


def test_everything_can_be_said_in_a_config() -> None:
    settings = config.load(
        None,
        [
            "algorithm=simfedswap",
            "algorithm.h2=2",
            "algorithm.pairing=exact_matching",
            "algorithm.terms=[{name='proximal', mu=0.5}]",
            "algorithm.selection={name='uniform', count=4}",
            "algorithm.weighting=uniform",
            "algorithm.similarity={name='mixed', parts=[{name='layerwise', metric='osad'}, {name='layerwise'}]}",
        ],
    )
    algorithm = assemble(settings).algorithm
    assert algorithm.client.terms == (Proximal(mu=0.5),)
    assert algorithm.selection == FixedForRounds(inner=Uniform(count=4), rounds=2)
    server = algorithm.server
    assert isinstance(server, Swapping) and server.pairing == ExactMatching() and server.weighting == UniformWeights()
    assert server.similarity.parts == (Layerwise(metric="osad"), Layerwise())


def test_combinations_without_sense_are_refused() -> None:
    with pytest.raises(Invalid, match="metric = 'cca' and similarity both say how models are compared"):
        simfedswap(metric="cca", similarity=Layerwise())
    with pytest.raises(Invalid, match="selection is held for 5 rounds, but h2 = 3"):
        simfedswap(selection=FixedForRounds(inner=Everyone(), rounds=5))
    with pytest.raises(
        Invalid, match="is incompatible with swapping: a ledger follows one global model from round to round"
    ):
        fedswap(ledgers=(MeanDrift(),))
    with pytest.raises(Invalid, match=r"Swapping\.swap_percentage = 1\.5 is out of range"):
        Swapping(swap_percentage=1.5)


# --- traffic ----------------------------------------------------------------------------------------------------------


def test_the_formula_gives_the_printed_savings() -> None:
    cost = {m: traffic(m, clients=10, model_bytes=400, h1=5, h2=3) for m in ("fedavg", "fedswap", "simfedswap")}
    assert cost == {"fedavg": 2 * 10 * 400 * 15, "fedswap": 4 * 10 * 400, "simfedswap": 2 * 10 * 400 * 3}
    assert 1 - cost["fedswap"] / cost["fedavg"] == pytest.approx(0.8666, abs=1e-4)
    assert 1 - cost["simfedswap"] / cost["fedavg"] == pytest.approx(0.8)
    with pytest.raises(Invalid, match="method = 'fedprox' is not one of"):
        traffic("fedprox", clients=1, model_bytes=1, h1=1, h2=1)  # type: ignore[arg-type]


def test_measured_bytes_beside_the_formula() -> None:
    size = tree.nbytes(tiny.engine(tiny.convnet).start())
    for recipe in (fedswap, simfedswap):
        rounds = train(recipe(h1=2, h2=3, **USUAL), rounds=3)
        down, up = (sum(getattr(one, key) for one in rounds) for key in ("bytes_down", "bytes_up"))
        formula = traffic("simfedswap", clients=5, model_bytes=size, h1=2, h2=3)
        assert down == 5 * size * 3 and up == down + 5 * 8 * 3  # a reply also tells its loss
        assert down + up == formula + 120


def test_the_state_holds_models_of_clients_that_took_part_since_the_last_average() -> None:
    algorithm = simfedswap(selection=Uniform(count=2), **USUAL)
    fresh = algorithm.server.init(tiny.engine(tiny.convnet).start(), 5)
    for one in train(algorithm, rounds=7, environment=Environment(communication=0.6)):
        now, held = one.snapshot.server, tree.flatten(one.snapshot.server["held"])
        kept = {name: value for name, value in now.items() if name not in ("held", "holders")}
        assert tiny.structure(kept) == tiny.structure({name: fresh[name] for name in kept})
        assert {len(leaf) for leaf in held.values()} == {len(now["holders"])}
        assert all(leaf.shape[1:] == held[path].shape[1:] for path, leaf in tree.flatten(fresh["held"]).items())
        holders = one.snapshot.server["holders"].tolist()
        if len(one.cohort):  # after an average nobody holds a model; after a swap those who replied do
            assert not holders if one.number % 3 == 0 else set(one.cohort.ids.tolist()) <= set(holders)
