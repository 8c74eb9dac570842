"""Test rows follow training rows, names and feature shifts arrive, and nothing is lost."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.core.settings import Invalid
from consilience.data.dataset import Dataset
from consilience.data.federate import federate
from consilience.data.partition import (
    Dirichlet,
    FeatureShift,
    Iid,
    LabelSets,
    Mixture,
    Natural,
    Quantity,
)


def numbered(labels, test_labels, *, classes=..., groups=None, test_groups=None, names=()):
    """A data set whose single feature is the row number, so that rows can be followed."""
    y, test_y = torch.as_tensor(labels), torch.as_tensor(test_labels)
    return Dataset(
        name="numbered",
        x=torch.arange(len(y), dtype=torch.float32).unsqueeze(1),
        y=y,
        test_x=torch.arange(len(test_y), dtype=torch.float32).unsqueeze(1),
        test_y=test_y,
        classes=int(max(y.max(), test_y.max())) + 1 if classes is ... else classes,
        groups=None if groups is None else torch.as_tensor(groups),
        test_groups=None if test_groups is None else torch.as_tensor(test_groups),
        group_names=names,
    )


def pictures(rows, test_rows=8, size=4):
    x = torch.arange(rows * size * size, dtype=torch.float32).reshape(rows, 1, size, size)
    test_x = -torch.arange(test_rows * size * size, dtype=torch.float32).reshape(test_rows, 1, size, size)
    y, test_y = torch.arange(rows) % 2, torch.arange(test_rows) % 2
    return Dataset(name="pictures", x=x, y=y, test_x=test_x, test_y=test_y, classes=2)


def class_counts(rows, classes):
    found = [torch.bincount(rows.of(k)[1], minlength=classes) for k in range(len(rows.sizes))]
    return torch.stack(found).numpy()


def test_the_repr_fits_a_line():
    assert repr(pictures(1200)) == "Dataset(pictures, 1,200 training rows, 8 test rows, 2 classes)"


def test_training_rows_are_the_partitions():
    dataset = numbered(np.arange(50) % 5, np.arange(20) % 5)
    federation, parts = federate(dataset, Dirichlet(clients=4, alpha=0.5), seed=7)
    again = Dirichlet(clients=4, alpha=0.5).split(dataset.y.numpy(), groups=None, seed=7)
    for k in range(4):
        x, y = federation.train.of(k)
        assert np.array_equal(x[:, 0].numpy(), parts[k]) and np.array_equal(parts[k], again[k])
        assert torch.equal(y, dataset.y[parts[k]])
    assert federation.names == ("0", "1", "2", "3") and federation.classes == 5


def test_exact_shares_are_given_exactly():
    labels = np.repeat([0, 1, 2], [40, 40, 20])
    partition = LabelSets(labels=((0, 1), (1, 2)), sizes=None, allow_rest=True)
    dataset = numbered(labels, np.repeat([0, 1, 2], [6, 10, 4]))
    for seed in range(10):
        federation, _ = federate(dataset, partition, seed=seed)
        assert class_counts(federation.test, 3).tolist() == [[6, 5, 0], [0, 5, 4]]


@given(
    train=st.lists(st.integers(0, 3), min_size=1, max_size=80),
    test=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    clients=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_each_class_is_cut_in_proportion_and_every_test_row_is_kept_once(train, test, clients, seed):
    dataset = numbered(train, test, classes=5)
    federation, parts = federate(dataset, Dirichlet(clients=clients, alpha=0.4), seed=seed)
    assert sorted(federation.test.x[:, 0].tolist()) == list(range(len(test)))
    held = np.array([np.bincount(np.array(train)[p], minlength=5) for p in parts])
    got = class_counts(federation.test, 5)
    there = np.bincount(test, minlength=5)
    for c in range(5):
        if held[:, c].sum() == 0:
            assert got[:, c].sum() == 0
            continue
        share = held[:, c] * there[c] / held[:, c].sum()
        assert got[:, c].sum() == there[c]
        assert (got[:, c] >= np.floor(share - 1e-9)).all() and (got[:, c] <= np.ceil(share + 1e-9)).all()


def test_a_class_that_nobody_trains_on_comes_last():
    dataset = numbered([0, 0, 1, 1], [2, 0, 2, 1])
    federation, _ = federate(dataset, Iid(clients=2), seed=0)
    assert federation.test.sizes.sum() == 2
    assert federation.test.y.tolist()[2:] == [2, 2] and federation.test.x[2:, 0].tolist() == [0, 2]


def test_small_clients_get_their_share_on_average():
    labels = np.zeros(100, int)
    partition = Quantity(clients=4, kind="sizes", sizes=(70, 20, 9, 1))
    dataset = numbered(labels, np.zeros(10, int))
    sizes = np.array([federate(dataset, partition, seed=s)[0].test.sizes.numpy() for s in range(400)])
    # Shares 7, 2, 0.9, 0.1: the last two are Bernoulli.
    assert (sizes[:, 0] == 7).all() and (sizes[:, 1] == 2).all()
    assert sizes[:, 2].mean() == pytest.approx(0.9, abs=4 * np.sqrt(0.09 / 400))
    assert sizes[:, 3].mean() == pytest.approx(0.1, abs=4 * np.sqrt(0.09 / 400))


def test_targets_that_are_not_classes_are_cut_by_size():
    dataset = numbered(np.linspace(0, 1, 40), np.linspace(0, 1, 20), classes=None)
    partition = Quantity(clients=2, kind="sizes", sizes=(30, 10))
    federation, _ = federate(dataset, partition, seed=0)
    assert federation.test.sizes.tolist() == [15, 5] and federation.classes is None
    sequences = Dataset(
        name="characters",
        x=torch.zeros(40, 7, dtype=torch.int64),
        y=torch.zeros(40, 7, dtype=torch.int64),
        test_x=torch.zeros(20, 7, dtype=torch.int64),
        test_y=torch.zeros(20, 7, dtype=torch.int64),
        classes=80,
    )
    assert federate(sequences, partition, seed=0)[0].test.sizes.tolist() == [15, 5]


def test_natural_clients_keep_their_groups_test_rows_and_names():
    dataset = numbered(
        [0, 1, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
        groups=[0, 0, 2, 2, 2],
        test_groups=[2, 0, 2, 1, 0, 3],
        names=("Basel", "Budapest", "Zurich", "Cleveland"),
    )
    federation, _ = federate(dataset, Natural(), seed=0)
    assert federation.names == ("Basel", "Zurich")
    assert sorted(federation.test.of(0)[0][:, 0].tolist()) == [1, 4]
    assert sorted(federation.test.of(1)[0][:, 0].tolist()) == [0, 2]
    assert federation.test.x[4:, 0].tolist() == [3, 5]  # groups without a client come last


def test_a_natural_client_gets_its_test_rows_even_of_classes_it_never_saw():
    dataset = numbered([0, 0, 1], [1, 0], groups=[0, 0, 1], test_groups=[0, 0], names=("a", "b"))
    federation, _ = federate(dataset, Natural(), seed=0)
    assert federation.test.sizes.tolist() == [2, 0]


def test_without_test_groups_natural_clients_share_by_class():
    dataset = numbered([0, 0, 1], [1, 0, 1], groups=[0, 0, 1], names=("a", "b"))
    federation, _ = federate(dataset, Natural(), seed=0)
    assert class_counts(federation.test, 2).tolist() == [[1, 0], [0, 2]]


def test_domain_clients_share_their_domains_test_rows():
    groups = np.repeat([0, 1], [80, 40])
    test_groups = np.repeat([0, 1], [20, 12])
    labels, test_labels = np.arange(120) % 4, np.arange(32) % 4
    dataset = numbered(labels, test_labels, groups=groups, test_groups=test_groups, names=("photo", "sketch"))
    partition = FeatureShift(inner=Dirichlet(clients=2, alpha=0.3), kind="domain")
    federation, parts = federate(dataset, partition, seed=1)
    assert federation.names == ("photo-0", "photo-1", "sketch-0", "sketch-1")
    got = class_counts(federation.test, 4)
    for k in range(4):
        rows = federation.test.of(k)[0][:, 0].long().numpy()
        assert (test_groups[rows] == k // 2).all()
        held = np.bincount(labels[parts[k]], minlength=4)
        domain = held + np.bincount(labels[parts[k ^ 1]], minlength=4)
        there = np.bincount(test_labels[test_groups == k // 2], minlength=4)
        assert (np.abs(got[k] - held * there / domain) < 1).all()
    assert federation.test.sizes.sum() == 32


def test_a_mixture_of_groups_and_drawn_clients_is_numbered():
    dataset = numbered(np.arange(40) % 2, [0, 1], groups=np.arange(40) % 2, test_groups=[0, 1], names=("a", "b"))
    mixture = Mixture(parts=((0.5, Natural()), (0.5, Iid(clients=2))))
    federation, _ = federate(dataset, mixture, seed=0)
    assert federation.names == ("0", "1", "2", "3") and federation.test.sizes.sum() == 2


def test_rotation_turns_training_and_test_rows_of_each_client():
    dataset = pictures(12)
    before, test_before = dataset.x.clone(), dataset.test_x.clone()
    partition = FeatureShift(inner=Iid(clients=3), kind="rotation", angles=(0.0, 90.0, 180.0))
    federation, parts = federate(dataset, partition, seed=0)
    plain, _ = federate(dataset, Iid(clients=3), seed=0)
    for k in range(3):
        assert torch.equal(federation.train.of(k)[0], torch.rot90(dataset.x[parts[k]], k, (-2, -1)))
        assert torch.equal(federation.test.of(k)[0], torch.rot90(plain.test.of(k)[0], k, (-2, -1)))
    assert torch.equal(dataset.x, before) and torch.equal(dataset.test_x, test_before)


def test_noise_grows_with_the_client_number_and_is_seeded():
    zeros = torch.zeros(3000, 50)
    dataset = Dataset(
        name="zeros", x=zeros, y=torch.arange(3000) % 2, test_x=zeros, test_y=torch.arange(3000) % 2, classes=2
    )
    partition = FeatureShift(inner=Iid(clients=3), kind="noise", sigma=0.9)
    federation, _ = federate(dataset, partition, seed=4)
    for split in (federation.train, federation.test):
        for k, level in enumerate((0.3, 0.6, 0.9)):
            noise = split.of(k)[0]
            assert float(noise.std()) == pytest.approx(level, rel=0.02)
            assert abs(float(noise.mean())) < 4 * level / np.sqrt(noise.numel())
    assert not torch.equal(federation.train.of(0)[0], federation.test.of(0)[0])
    assert torch.equal(federate(dataset, partition, seed=4)[0].train.x, federation.train.x)
    assert not torch.equal(federate(dataset, partition, seed=5)[0].train.x, federation.train.x)


def test_shifts_reach_into_trees_and_leave_the_rest_alone():
    picture, tokens = torch.rand(10, 3, 4, 4), torch.arange(30).reshape(10, 3)
    dataset = Dataset(
        name="both",
        x={"picture": picture, "tokens": tokens},
        y=torch.zeros(10, dtype=torch.int64),
        test_x={"picture": picture, "tokens": tokens},
        test_y=torch.ones(10, dtype=torch.int64),
        classes=2,
    )
    partition = FeatureShift(inner=Iid(clients=1), kind="rotation", angles=(90.0,))
    federation, parts = federate(dataset, partition, seed=0)
    assert torch.equal(federation.train.x["picture"], torch.rot90(picture[parts[0]], 1, (-2, -1)))
    assert torch.equal(federation.train.x["tokens"], tokens[parts[0]])
    assert torch.equal(federation.test.x["picture"], picture)  # nobody's rows: as they were


def test_shifts_apply_in_order_inner_first():
    dataset = pictures(4)
    turned = FeatureShift(inner=Iid(clients=1), kind="rotation", angles=(90.0,))
    twice = FeatureShift(inner=turned, kind="rotation", angles=(90.0,))
    federation, parts = federate(dataset, twice, seed=0)
    assert torch.equal(federation.train.x, torch.rot90(dataset.x[parts[0]], 2, (-2, -1)))


def test_empty_clients_and_absent_test_rows_are_fine():
    dataset = numbered([0, 1], [0, 1])
    federation, _ = federate(dataset, Iid(clients=5), seed=0)
    assert len(federation) == 5 and federation.train.sizes.sum() == 2 and federation.test.sizes.sum() == 2
    noisy = FeatureShift(inner=Iid(clients=5), kind="noise")
    assert len(federate(dataset, noisy, seed=0)[0]) == 5
    nobody = torch.empty(0, dtype=torch.int64)
    bare = Dataset(name="bare", x=dataset.x, y=dataset.y, test_x=nobody, test_y=nobody, classes=2)
    assert federate(bare, Iid(clients=2), seed=0)[0].test is None


def test_rows_left_out_are_not_in_the_federation():
    dataset = numbered(np.zeros(10, int), np.zeros(4, int))
    partition = Quantity(clients=2, kind="sizes", sizes=(2, 3), allow_rest=True)
    federation, parts = federate(dataset, partition, seed=0)
    assert len(federation.train.y) == 5
    assert set(federation.train.x[:, 0].tolist()) == set(np.concatenate(parts).tolist())


def test_partitions_by_group_need_groups():
    with pytest.raises(Invalid, match="natural needs data that say"):
        federate(numbered([0, 1], [0, 1]), Natural(), seed=0)


def test_a_thousand_clients_take_no_time():
    rng = np.random.default_rng(0)
    dataset = numbered(rng.integers(0, 10, 60_000), rng.integers(0, 10, 10_000))
    began = time.process_time()
    federation, _ = federate(dataset, Dirichlet(clients=1000, alpha=0.1), seed=0)
    assert time.process_time() - began < 2  # measured: 0.06 s
    assert federation.test.sizes.sum() == 10_000
