"""Whatever the partition and the data: every row once, same seed same split, or a refusal that explains itself."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.core.settings import Invalid
from consilience.data.partition import (
    PARTITIONS,
    ClassesPerClient,
    Dirichlet,
    FeatureShift,
    Iid,
    LabelSets,
    MissingModality,
    Mixture,
    Natural,
    Quantity,
    Shards,
    Stored,
    save,
)


def quantity(exponent: float, **options: Any) -> Quantity:
    """The exponent counts in a power law alone."""
    return Quantity(**options, **({"exponent": exponent} if options["kind"] == "power_law" else {}))


clients = st.integers(1, 12)
positive = st.floats(1e-4, 100)
skews = st.sampled_from(["power_law", "log_normal", "half_normal"])
simple = st.one_of(
    st.builds(Iid, clients=clients),
    st.builds(Dirichlet, clients=clients, alpha=positive, balance=st.booleans(), min_size=st.sampled_from([0, 0, 1])),
    st.builds(ClassesPerClient, clients=clients, classes_per_client=st.integers(1, 4), skew=skews),
    st.builds(Shards, clients=clients, shards_per_client=st.integers(1, 3)),
    st.builds(quantity, clients=clients, kind=skews, exponent=positive, min_size=st.integers(0, 2)),
    st.builds(Natural),
)
shifted = st.one_of(
    simple,
    st.builds(FeatureShift, inner=simple, kind=st.sampled_from(["rotation", "noise", "domain"])),
)
mixed = st.one_of(
    shifted,
    st.builds(lambda a, b: Mixture(parts=((0.25, a), (0.75, b))), shifted, shifted),
)
rows = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=60)


def test_every_row_goes_to_exactly_one_client():
    tried, refused = [], []

    @given(partition=mixed, rows=rows, seed=st.integers(0, 2**32))
    @settings(max_examples=400, deadline=None)
    def try_one(partition, rows, seed):
        labels, groups = np.array(rows).T
        tried.append(partition)
        try:
            parts = partition.split(labels, groups=groups, seed=seed)
        except Invalid as problem:
            assert re.search(r"\w: \w", str(problem))  # what is wrong, and what would work
            refused.append(partition)
            return
        together = np.concatenate(parts)
        assert together.dtype == np.int64
        assert np.array_equal(np.sort(together), np.arange(len(labels)))
        again = partition.split(labels, groups=groups, seed=seed)
        assert len(parts) == len(again)
        assert all(np.array_equal(a, b) for a, b in zip(parts, again))

    try_one()
    assert 0 < len(refused) < len(tried) / 2, "most of them can be dealt"
    assert not any(isinstance(partition, (Iid, Natural)) for partition in refused), "nothing stands in their way"


@pytest.mark.parametrize(
    "partition",
    [
        Iid(clients=7),
        Dirichlet(clients=7, alpha=0.3),
        Dirichlet(clients=7, alpha=0.3, balance=True, min_size=3),
        ClassesPerClient(clients=7, classes_per_client=2),
        ClassesPerClient(clients=7, classes_per_client=2, skew="log_normal"),
        Shards(clients=7, shards_per_client=2),
        Quantity(clients=7, kind="power_law"),
        Quantity(clients=7, kind="log_normal"),
        Quantity(clients=7, kind="half_normal"),
        LabelSets(labels=((0, 1), (1, 2, 3), (3, 4))),
        FeatureShift(inner=Dirichlet(clients=3, alpha=0.5), kind="domain"),
        Mixture(parts=((0.5, Iid(clients=3)), (0.5, Dirichlet(clients=4, alpha=0.1)))),
    ],
)
def test_the_seed_and_nothing_else_decides(partition):
    labels = np.arange(300) % 5
    groups = np.arange(300) % 3
    first = partition.split(labels, groups=groups, seed=11)
    np.random.seed(5)
    state = np.random.get_state()[1].copy()
    second = partition.split(labels, groups=groups, seed=11)
    assert np.array_equal(state, np.random.get_state()[1])  # global numbers neither used nor moved
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    other = partition.split(labels, groups=groups, seed=12)
    assert any(not np.array_equal(a, b) for a, b in zip(first, other))
    assert np.array_equal(np.sort(np.concatenate(first)), np.arange(300))


def test_inputs_are_not_modified():
    labels, groups = np.arange(60) % 4, np.arange(60) % 3
    labels.setflags(write=False)
    groups.setflags(write=False)
    for partition in (
        Dirichlet(clients=4, alpha=1.0, balance=True),
        ClassesPerClient(clients=4, classes_per_client=2),
        Shards(clients=4),
        Natural(),
        Mixture(parts=((0.5, Natural()), (0.5, Iid(clients=2)))),
    ):
        parts = partition.split(labels, groups=groups, seed=0)  # read-only arrays would not let themselves be changed
        assert sorted(np.concatenate(parts)) == list(range(60))


def test_iid_sizes_differ_by_at_most_one_and_small_sets_leave_clients_empty():
    sizes = [len(p) for p in Iid(clients=4).split(np.zeros(10, int), groups=None, seed=0)]
    assert sorted(sizes) == [2, 2, 3, 3]
    few = Iid(clients=5).split(np.zeros(2, int), groups=None, seed=0)
    assert sorted(len(p) for p in few) == [0, 0, 0, 1, 1]


def test_iid_takes_targets_that_are_not_classes():
    parts = Iid(clients=2).split(np.random.default_rng(0).random((10, 3)), groups=None, seed=0)
    assert [len(p) for p in parts] == [5, 5]


@pytest.mark.parametrize(
    "partition",
    [
        Dirichlet(clients=2, alpha=1.0),
        Shards(clients=2),
        ClassesPerClient(clients=2, classes_per_client=1),
        LabelSets(labels=((0,),)),
    ],
)
def test_partitions_by_class_refuse_targets_that_are_not_classes(partition):
    with pytest.raises(Invalid, match=r"float64 of shape \(10,\).*use iid, quantity or natural"):
        partition.split(np.linspace(0, 1, 10), groups=None, seed=0)


def test_no_rows_and_bad_seeds_are_refused(tmp_path):
    save([np.arange(2)], tmp_path / "p.npz")
    parts = [
        Iid(clients=2),
        Dirichlet(clients=2, alpha=1.0),
        Shards(clients=2),
        ClassesPerClient(clients=2, classes_per_client=1),
        LabelSets(labels=((0,),)),
        Quantity(clients=2),
        Natural(),
        FeatureShift(inner=Iid(clients=2), kind="noise"),
        MissingModality(inner=Iid(clients=2), modality="picture"),
        Mixture(parts=((1.0, Iid(clients=2)),)),
        Stored(path=str(tmp_path / "p.npz")),
    ]
    assert {type(p) for p in parts} == set(PARTITIONS.values())
    for partition in parts:
        with pytest.raises(Invalid, match="labels is empty"):
            partition.split(np.empty(0, int), groups=np.empty(0, int), seed=0)
    for seed in (-1, 1.5, True, None):
        with pytest.raises(Invalid, match="seed"):
            Iid(clients=2).split(np.zeros(3, int), groups=None, seed=seed)
