"""Several models at once: clusters that clients choose, clusters that are cut, edges under a cloud."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from consilience.algorithms.clustered_fl import clustered_fl
from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.hierarchical import hierarchical
from consilience.algorithms.ifca import ifca
from consilience.core import tree
from consilience.core.exchange import Cohort
from consilience.core.federation import Federation
from consilience.core.rounds import Round, run
from consilience.core.settings import Invalid
from consilience.core.tree import Tree
from consilience.environments.environment import Environment
from consilience.selection import Uniform
from consilience.server.rules.bipartition import Bipartition, bipartition, cosine_similarity
from consilience.server.rules.chosen_clusters import ChosenClusters
from consilience.server.rules.edge_cloud import EdgeCloud
from consilience.server.rules.grouping import largest


def model(*w: float) -> Tree:
    return {"params": {"w": torch.tensor(w, dtype=torch.float64)}, "buffers": {}}


def cohort(
    ends: list[Tree], ids: list[int], *, round: int = 50, rows: list[float] | None = None, **said: Any
) -> Cohort:
    return Cohort(
        reply={"model": tree.stack(ends), **{key: torch.tensor(value) for key, value in said.items()}},
        ids=np.array(ids),
        examples=torch.tensor(rows or [1.0] * len(ids), dtype=torch.float64),
        steps=np.ones(len(ids), dtype=np.int64),
        round=round,
    )


# --- IFCA ------------------------------------------------------------------------------------------------------------


def test_each_model_is_averaged_over_those_who_chose_it() -> None:
    server = ChosenClusters(clusters=3)
    state = server.init(model(0, 0), 5)
    said = cohort(
        [model(2, 0), model(4, 8), model(0, 6), model(1, 1)], [0, 1, 2, 4], rows=[1, 3, 1, 1], cluster=[2, 0, 0, 0]
    )
    after, notes = server.update(state, said)
    w = after["groups"]["model"]["params"]["w"]
    assert w[0].tolist() == pytest.approx([13 / 5, 31 / 5], abs=1e-12) and w[2].tolist() == [2, 0]
    assert torch.equal(w[1], state["groups"]["model"]["params"]["w"][1])  # nobody's choice
    assert after["cluster"].tolist() == [2, 0, 0, -1, 0]
    assert notes["weights"].tolist() == pytest.approx([1 / 4, 9 / 20, 3 / 20, 3 / 20], abs=1e-12)
    assert torch.equal(server.model(after)["params"]["w"], w[0])


def test_clusters_start_from_the_same_values_in_another_order() -> None:
    start = {**model(1, 2, 3, 4, 5, 6), "buffers": {"mean": torch.ones(2)}}
    groups = ChosenClusters(clusters=3).init(start, 4)["groups"]["model"]
    w = groups["params"]["w"]
    assert w[0].tolist() == [1, 2, 3, 4, 5, 6] and len({tuple(row.tolist()) for row in w}) == 3
    assert [sorted(row.tolist()) for row in w] == [[1, 2, 3, 4, 5, 6]] * 3
    other = ChosenClusters(clusters=3, seed=1).init(start, 4)["groups"]["model"]["params"]["w"]
    assert torch.equal(other[0], w[0]) and not torch.equal(other[1], w[1])


def two_kinds() -> Federation:
    """Clients 0, 2, 4 label by the sign of the first feature, 1 and 3 by its opposite."""
    draw = torch.Generator().manual_seed(0)

    def client(kind: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(rows, 2, generator=draw, dtype=torch.float64)
        return x, ((x[:, 0] > 0) ^ bool(kind)).to(torch.int64)

    sizes = (30, 21, 30, 17, 25)
    clients = [client(k % 2, rows) for k, rows in enumerate(sizes)]
    return Federation.from_clients(clients, client_tests=[client(k % 2, 40) for k in range(5)], classes=2)


def linear() -> nn.Module:
    return tiny.seeded(lambda: nn.Linear(2, 2))


def accuracy(one: Round, data: Federation, client: int, values: Tree) -> float:
    assert data.test is not None
    x, y = data.test.of(client)
    output = x @ values["params"]["weight"].T + values["params"]["bias"]
    return float((output.argmax(1) == y).double().mean())


def test_ifca_finds_two_kinds_of_clients_where_one_model_fails() -> None:
    data = two_kinds()
    *_, one = run(ifca(clusters=2, lr=0.5, batch_size=10), tiny.engine(linear, data), rounds=15, seed=1)
    *_, single = run(fedavg(lr=0.5, batch_size=10), tiny.engine(linear, data), rounds=15, seed=1)
    cluster = one.snapshot.server["cluster"].tolist()
    assert cluster[0] == cluster[2] == cluster[4] != cluster[1] == cluster[3]
    assert one.snapshot.memory["client"]["cluster"].tolist() == cluster  # clients know it themselves
    models = one.snapshot.server["groups"]["model"]
    mine = [accuracy(one, data, k, tree.rows(models, cluster[k])) for k in range(5)]
    common = [accuracy(single, data, k, single.model) for k in range(5)]
    assert min(mine) > 0.9 and min(common) < 0.6
    assert tiny.same(one.model, tree.rows(models, cluster[0]))  # of the largest cluster


def test_a_client_trains_the_model_with_the_least_loss_on_all_its_rows() -> None:
    data = two_kinds()
    algorithm = ifca(clusters=3, lr=0.5, batch_size=10, cluster_seed=5)
    (one,) = run(algorithm, tiny.engine(linear, data), rounds=1, seed=1)
    models = algorithm.server.init(tiny.engine(linear, data).start(), 5)["groups"]["model"]["params"]
    for k in range(5):
        x, y = data.train.of(k)
        losses = [nn.functional.cross_entropy(x @ w.T + b, y) for w, b in zip(models["weight"], models["bias"])]
        assert int(one.cohort.reply["cluster"][k]) == int(torch.stack(losses).argmin())


def test_one_cluster_is_fedavg() -> None:
    ones = list(run(ifca(clusters=1, batch_size=4), tiny.engine(tiny.convnet), rounds=3, seed=1))
    for one, other in zip(ones, run(fedavg(batch_size=4), tiny.engine(tiny.convnet), rounds=3, seed=1)):
        assert tiny.gap(one.model, other.model) <= 1e-12
        assert one.bytes_down == other.bytes_down and one.bytes_up == other.bytes_up + 8 * 5  # which cluster


# --- clustered federated learning ------------------------------------------------------------------------------------


@given(st.integers(2, 7), st.integers(0, 10**6))
def test_the_cut_is_the_best_of_all_cuts(count: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    updates = torch.from_numpy(draw.normal(size=(count, 4)))
    similarity = cosine_similarity(updates).numpy()
    side = bipartition(similarity)
    assert side[0] and not side.all()

    def across(one: np.ndarray) -> float:
        return float(similarity[np.ix_(one, ~one)].max())

    cuts = [np.array([True, *rest]) for rest in itertools.product([True, False], repeat=count - 1)]
    assert across(side) == min(across(cut) for cut in cuts if not cut.all())


def test_cosines() -> None:
    found = cosine_similarity(torch.tensor([[1e200, 0], [0, 2e-200], [-3.0, 3.0], [0, 0]], dtype=torch.float64))
    half = 0.5**0.5
    expected = [[1, 0, -half, 0], [0, 1, half, 0], [-half, half, 1, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-15)


PULLING = [model(2, 0), model(1.8, 0.2), model(-2, 0), model(-1.8, -0.2)]  # from the origin: mean 0, lengths about 2


def cut(server: Bipartition, ends: list[Tree], *, round: int = 50, **changes: Any) -> tuple[Tree, dict[str, Any]]:
    said = cohort(ends, list(range(len(ends))), round=round)
    return server.update(server.init(model(0, 0), changes.get("clients", len(ends))), said)


def test_clients_that_pull_apart_are_told_apart() -> None:
    after, notes = cut(Bipartition(), PULLING)
    assert after["cluster"].tolist() == [0, 0, 1, 1] and int(after["count"]) == 2
    w = after["groups"]["model"]["params"]["w"]
    assert w[0].tolist() == pytest.approx([1.9, 0.1]) and w[1].tolist() == pytest.approx([-1.9, -0.1])
    assert notes["cluster"].tolist() == [0, 0, 1, 1] and notes["weights"].tolist() == [0.25] * 4
    sent = Bipartition().broadcast(after, np.array([1, 2]))
    assert torch.equal(sent.personal["model"]["params"]["w"], w[:2])


@pytest.mark.parametrize(
    ("server", "ends", "round"),
    [
        (Bipartition(), PULLING, 19),  # still warming up
        (Bipartition(), [model(2, 0)] * 4, 50),  # the cluster moves on together
        (Bipartition(), [model(0.1, 0), model(-0.1, 0)] * 2, 50),  # everyone has arrived
        (Bipartition(gamma=1.0), PULLING, 50),  # not different enough: sqrt((1 - a) / 2) is below one
        (Bipartition(max_clusters=1), PULLING, 50),  # no room
    ],
)
def test_a_cluster_is_not_cut_without_need(server: Bipartition, ends: list[Tree], round: int) -> None:
    after, _ = cut(server, ends, round=round)
    assert after["cluster"].tolist() == [0] * 4 and int(after["count"]) == 1


def test_a_cluster_is_not_cut_while_one_of_its_clients_is_away() -> None:
    server = Bipartition()
    state, _ = server.update(server.init(model(0, 0), 6), cohort([model(0, 0)] * 5, [0, 1, 2, 3, 4]))
    state, _ = server.update(state, cohort(PULLING, [0, 1, 2, 3]))
    assert int(state["count"]) == 1
    moved = tree.map_leaves(torch.add, tree.stack([*PULLING, PULLING[0]]), tree.repeat(server.model(state), 5))
    state, _ = server.update(state, cohort([tree.rows(moved, k) for k in range(5)], [0, 1, 2, 3, 4]))
    assert state["cluster"].tolist() == [0, 0, 1, 1, 0, 0]  # the last one has never been there


def test_parts_can_be_cut_again() -> None:
    server = Bipartition(warm_up=0)
    state, _ = cut(server, PULLING)
    models = tree.rows(state["groups"]["model"], state["cluster"])
    pull = tree.stack([model(0, 2), model(0, -2), model(0, 0.1), model(0, 0.1)])
    ends = tree.map_leaves(torch.add, models, pull)
    state, _ = server.update(state, cohort([tree.rows(ends, k) for k in range(4)], [0, 1, 2, 3]))
    assert state["cluster"].tolist() == [0, 2, 1, 1] and int(state["count"]) == 3
    w = state["groups"]["model"]["params"]["w"]
    assert w[0].tolist() == pytest.approx([1.9, 2.1]) and w[2].tolist() == pytest.approx([1.9, -1.9])


def test_clustered_fl_separates_two_kinds() -> None:
    data = two_kinds()
    algorithm = clustered_fl(lr=0.5, batch_size=None, epochs=3, warm_up=3, eps_1=0.3, eps_2=0.1, max_clusters=2)
    *_, one = run(algorithm, tiny.engine(linear, data), rounds=25, seed=1)
    cluster = one.snapshot.server["cluster"].tolist()
    assert cluster[0] == cluster[2] == cluster[4] != cluster[1] == cluster[3]
    models = one.snapshot.server["groups"]["model"]
    assert min(accuracy(one, data, k, tree.rows(models, cluster[k])) for k in range(5)) > 0.85


# --- edges and a cloud -----------------------------------------------------------------------------------------------


def test_edges_average_every_round_and_the_cloud_every_other() -> None:
    server = EdgeCloud(edges=2, cloud_every=2)
    state = server.init(model(0), 4)
    assert state["edge"].tolist() == [0, 0, 1, 1]
    state, notes = server.update(
        state, cohort([model(1), model(3), model(10), model(20)], [0, 1, 2, 3], rows=[1, 3, 2, 2])
    )
    assert state["groups"]["model"]["params"]["w"].flatten().tolist() == [2.5, 15]
    assert float(server.model(state)["params"]["w"]) == (4 * 2.5 + 4 * 15) / 8 and not notes["cloud"]
    sent = server.broadcast(state, np.array([1, 2])).personal["model"]["params"]["w"]
    assert sent.flatten().tolist() == [2.5, 15]
    state, notes = server.update(state, cohort([model(4), model(8)], [0, 3], rows=[1, 2]))
    assert notes["cloud"] and state["groups"]["model"]["params"]["w"].flatten().tolist() == [6, 6]  # 4 and 4 rows
    assert float(server.model(state)["params"]["w"]) == 6
    assert state["rows"].tolist() == [0, 0, 0, 0]


def test_an_edge_that_heard_from_nobody_does_not_count() -> None:
    server = EdgeCloud(edges=2, cloud_every=1, edge_of=(1, 0, 1))
    state, _ = server.update(server.init(model(0), 3), cohort([model(4)], [1]))
    assert state["groups"]["model"]["params"]["w"].flatten().tolist() == [4, 4]


@pytest.mark.parametrize(
    "options", [{"edges": 1, "cloud_every": 3}, {"edges": 2, "cloud_every": 1}, {"edges": 5, "cloud_every": 1}]
)
def test_one_edge_or_a_cloud_in_every_round_is_fedavg(options: dict[str, int]) -> None:
    usual = {"batch_size": 4, "lr": 0.05, "selection": Uniform(count=4)}
    ones = list(run(hierarchical(**options, **usual), tiny.engine(tiny.convnet), rounds=3, seed=1))
    for one, other in zip(ones, run(fedavg(**usual), tiny.engine(tiny.convnet), rounds=3, seed=1)):
        assert tiny.gap(one.model, other.model) <= 1e-12


def test_edges_are_checked() -> None:
    with pytest.raises(Invalid, match="edge 2, but edges = 2"):
        EdgeCloud(edge_of=(0, 2))
    with pytest.raises(Invalid, match="2 entries for 3 clients"):
        EdgeCloud(edge_of=(0, 1)).init(model(0), 3)


def test_the_largest_group() -> None:
    assert largest(torch.tensor([-1, 2, 0, 2, 0]), 3) == 0 and largest(torch.tensor([1, 2, 2]), 4) == 2
    assert largest(torch.tensor([-1, -1]), 3) == 0


def test_stale_clients_of_groups_work() -> None:
    """A deadline and silence do no harm to groups."""
    poor = Environment(communication=0.6, rows_per_second=5.0, deadline=2.0)
    for algorithm in (
        ifca(batch_size=4),
        clustered_fl(batch_size=4, warm_up=0, eps_1=9.0, eps_2=0.0),
        hierarchical(batch_size=4),
    ):
        for one in run(algorithm, tiny.engine(environment=poor), rounds=4, seed=1, max_bad_rounds=9):
            assert tiny.finite(one.snapshot.server) and 3 not in one.cohort.ids
