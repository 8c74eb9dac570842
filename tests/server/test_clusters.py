"""Clusters of clients, and the two ways of averaging by them (eqs 5 and 6 of the SimProx paper)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from consilience.algorithms.clustered_averaging import clustered_averaging
from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.hierarchical_averaging import hierarchical_averaging
from consilience.core import tree
from consilience.core.exchange import Cohort
from consilience.core.protocols import ServerRule
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.selection import Uniform
from consilience.server import UniformWeights
from consilience.server.averaging.weighting.hierarchical import HierarchicalWeights
from consilience.server.protocols import Weighting
from consilience.server.rules.clustered import ClusteredAveraging
from consilience.server.rules.clusters import agglomerate


def cohort_of(values: Any, ids: Any = None, *, steps: Any = None) -> Cohort:
    """One model of a few parameters and a counter per client."""
    w = torch.as_tensor(values, dtype=torch.float64)
    ids = np.arange(len(w)) if ids is None else np.array(ids)
    return Cohort(
        reply={"model": {"params": {"w": w}, "buffers": {"n": torch.arange(len(w)), "mean": w[:, :1]}}},
        ids=ids,
        examples=torch.ones(len(w), dtype=torch.float64),
        steps=np.ones(len(w), np.int64) if steps is None else np.array(steps),
        round=0,
    )


def start(size: int = 2) -> tree.Tree:
    buffers = {"n": torch.tensor(0), "mean": torch.zeros(1, dtype=torch.float64)}
    return {"params": {"w": torch.zeros(size, dtype=torch.float64)}, "buffers": buffers}


@given(st.integers(2, 12), st.integers(1, 6), st.integers(0, 2**31))
def test_agglomeration_is_scipys_average_linkage(m: int, clusters: int, seed: int) -> None:
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import pdist, squareform

    points = np.random.default_rng(seed).normal(size=(m, 3))
    expected = fcluster(linkage(pdist(points), "average"), clusters, "maxclust")
    got = agglomerate(squareform(pdist(points)), clusters)
    assert got.max() + 1 == min(m, clusters) == len(set(expected))
    assert (np.equal.outer(got, got) == np.equal.outer(expected, expected)).all()
    firsts = [int(np.flatnonzero(got == number)[0]) for number in range(got.max() + 1)]
    assert firsts == sorted(firsts)


def test_who_is_alike_is_never_parted() -> None:
    assert agglomerate(np.zeros((5, 5)), 3).tolist() == [0] * 5
    points = np.array([0.0, 4, 0, 4, 9])
    assert agglomerate(np.abs(np.subtract.outer(points, points)), 5).tolist() == [0, 1, 0, 1, 2]
    assert agglomerate(np.zeros((1, 1)), 2).tolist() == [0]


def test_hierarchical_weights_by_hand() -> None:
    """{0, 1, 3} near (1, 0) and {2} at (-5, 0): 1/2 (1/3, 1/3, 1/3) and 1/2."""
    cohort = cohort_of([[1.0, 0], [1.1, 0], [-5.0, 0], [1.0, 0.1]])
    weights, state, notes = HierarchicalWeights().weigh(cohort, start(), {})
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 2, 1 / 6], abs=1e-15) and state == {}
    assert notes["clusters"].tolist() == [0, 0, 1, 0] and weights.dtype == torch.float64
    means = np.array([[1.0, 0], [1.1, 0], [1.0, 0.1]]).mean(0), np.array([-5.0, 0])  # eq (5), then eq (6)
    np.testing.assert_allclose(
        weights.numpy() @ cohort.reply["model"]["params"]["w"].numpy(), (means[0] + means[1]) / 2, atol=1e-15
    )


def test_by_direction_ignores_how_far_clients_went() -> None:
    cohort = cohort_of([[1.0, 0], [90.0, 0], [0.0, 1.0], [0, 80.0]])
    near, _, _ = HierarchicalWeights(metric="distance").weigh(cohort, start(), {})
    along, _, notes = HierarchicalWeights(metric="direction").weigh(cohort, start(), {})
    assert notes["clusters"].tolist() == [0, 0, 1, 1] and along.tolist() == [0.25] * 4
    assert near.tolist() != along.tolist()


def test_given_groups_need_no_look_at_the_replies() -> None:
    weighting = HierarchicalWeights(groups=((0, 2), (1,), (3, 4)))
    assert not weighting.needs_each_reply and HierarchicalWeights().needs_each_reply
    weighting.init(start(), 5)
    weights, _, _ = weighting.weigh(cohort_of([[1.0, 0]] * 3, ids=[0, 2, 3]), start(), {})  # nobody of the second
    assert weights.tolist() == [0.25, 0.25, 0.5]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (((0, 1), (1, 2)), "names client 1 twice: in group 0 and in group 1"),
        (((0, 1), ()), r"groups\[1\] is empty"),
        (((0, 1),), "leaves out client 2"),
        (((0, 1, 2, 3),), r"names client 3, but there are 3 \(0 to 2\)"),
    ],
)
def test_wrong_groups_are_refused_before_training(groups: Any, message: str) -> None:
    for part in (HierarchicalWeights(groups=groups), ClusteredAveraging(groups=groups)):
        with pytest.raises(Invalid, match=message):
            part.init(start(), 3)  # type: ignore[attr-defined]


@given(st.permutations(range(5)), st.integers(0, 2**31))
def test_row_26_order_does_not_matter(order: list[int], seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=(5, 3))
    for by in ("distance", "direction"):
        got, expected = (
            HierarchicalWeights(metric=by).weigh(cohort, start(3), {})[0]  # type: ignore[arg-type]
            for cohort in (cohort_of(values[order], ids=order), cohort_of(values))
        )
        assert torch.equal(got, expected[order])


def test_rows_18_19_and_28_for_hierarchical_weights() -> None:
    for by in ("distance", "direction"):
        weighting = HierarchicalWeights(metric=by, clusters=3)  # type: ignore[arg-type]
        assert weighting.weigh(cohort_of([[2.0, 1.0]] * 4), start(), {})[0].tolist() == [0.25] * 4
        assert weighting.weigh(cohort_of([[0.0, 0.0]] * 4), start(), {})[0].tolist() == [0.25] * 4
        assert weighting.weigh(cohort_of([[2.0, 1.0]]), start(), {})[0].tolist() == [1.0]
        some = weighting.weigh(cohort_of([[0.0, 0.0], [1.0, 0], [2.0, 0]]), start(), {})[0]
        assert float(some.sum()) == pytest.approx(1, abs=1e-15) and bool(some.isfinite().all())


# --- one model per cluster -------------------------------------------------------------------------------------------


def test_clustered_averaging_by_hand() -> None:
    server = ClusteredAveraging()
    state = server.init(start(), 6)
    sent = server.broadcast(state, np.array([0, 1, 2, 5]))
    assert sent.shared == {} and sent.personal["model"]["params"]["w"].tolist() == [[0.0, 0.0]] * 4

    # round 1: {0, 2} one way, {1} the other; 5 did not move and says nothing of itself
    state, notes = server.update(state, cohort_of([[1.0, 0], [-4.0, 0], [3.0, 0], [0.0, 0]], ids=[0, 1, 2, 5]))
    assert state["cluster"].tolist() == [0, 1, 0, -1, -1, -1] and notes["clusters"].tolist() == [0, 1, 0, -1]
    assert state["models"]["params"]["w"].tolist() == [[2.0, 0.0], [-4.0, 0.0]]
    assert server.model(state)["params"]["w"].tolist() == [-1.0, 0.0]  # eq (6): each cluster counts the same
    assert state["models"]["buffers"]["n"].tolist() == [2, 1] and int(server.model(state)["buffers"]["n"]) == 2
    assert server.model(state)["buffers"]["mean"].tolist() == [-1.0]
    sent = server.broadcast(state, np.array([0, 1, 3]))
    assert sent.personal["model"]["params"]["w"].tolist() == [[2.0, 0.0], [-4.0, 0.0], [-1.0, 0.0]]

    # round 2: 3 comes new and is nearest to the second cluster; the first one's model stays
    state, _ = server.update(state, cohort_of([[-6.0, 0], [-3.0, 1.0]], ids=[1, 3]))
    assert state["cluster"].tolist() == [0, 1, 0, 1, -1, -1]
    assert state["models"]["params"]["w"].tolist() == [[2.0, 0.0], [-4.5, 0.5]]
    assert server.model(state)["params"]["w"].tolist() == [-1.25, 0.25]


def test_a_first_cohort_smaller_than_the_clusters() -> None:
    server = ClusteredAveraging(clusters=4)
    state, _ = server.update(server.init(start(), 3), cohort_of([[1.0, 0], [-4.0, 0]], ids=[0, 1]))
    assert state["trained"].tolist() == [True, True, False, False]
    assert server.model(state)["params"]["w"].tolist() == [-1.5, 0.0]  # clusters nobody is in do not count


def test_given_groups_train_apart() -> None:
    server = ClusteredAveraging(groups=((0, 3), (1, 2)))
    state = server.init(start(), 4)
    assert state["cluster"].tolist() == [0, 1, 1, 0] and isinstance(server, ServerRule)
    state, _ = server.update(state, cohort_of([[1.0, 0], [2.0, 0], [4.0, 0]], ids=[0, 1, 2]))
    assert state["models"]["params"]["w"].tolist() == [[1.0, 0.0], [3.0, 0.0]]
    assert isinstance(HierarchicalWeights(), Weighting)


@pytest.mark.usefixtures("untraced")
def test_one_cluster_is_fedavg_with_equal_weights() -> None:
    def last(algorithm: Any) -> tree.Tree:
        *_, one = run(algorithm, tiny.engine(tiny.convnet), rounds=3)
        return one.model

    plain = last(fedavg(batch_size=4, weighting=UniformWeights()))
    assert tiny.gap(last(clustered_averaging(clusters=1, batch_size=4)), plain) <= 1e-12
    assert tiny.gap(last(hierarchical_averaging(clusters=1, batch_size=4)), plain) <= 1e-12
    everyone_alone = last(hierarchical_averaging(clusters=5, batch_size=4))
    assert tiny.gap(everyone_alone, plain) <= 1e-12


@pytest.mark.usefixtures("untraced")
def test_clusters_find_two_opposed_kinds_of_clients() -> None:
    """Clients whose labels are swapped end up in a cluster of their own, and its model serves them better."""
    data = tiny.federation((20,) * 6, test=10)
    flipped = {1, 2, 5}
    y = torch.cat([2 - part if client in flipped else part for client, part in enumerate(data.train.y.split(20))])
    data.train.y.copy_(y)
    engine = tiny.engine(data=data)
    *_, one = run(clustered_averaging(batch_size=None, lr=0.5, epochs=5), engine, rounds=4)
    found = one.snapshot.server["cluster"]
    assert [int(k) for k in found] == [0, 1, 1, 0, 0, 1]
    *_, partial = run(
        clustered_averaging(batch_size=4, lr=0.2, epochs=5, selection=Uniform(count=4)), engine, rounds=8, seed=1
    )
    assert set(partial.snapshot.server["cluster"].tolist()) == {0, 1}


def test_parts_that_a_cluster_cannot_use_are_refused() -> None:
    with pytest.raises(Invalid, match=r"weighting = UniformWeights\(\) has no effect in clustered_averaging"):
        clustered_averaging(weighting=UniformWeights())
    clustered_averaging(ledgers=())  # as a config writes it
