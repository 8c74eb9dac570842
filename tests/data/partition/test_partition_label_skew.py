"""Classes per client, shards and label sets written out."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.core.settings import Invalid
from consilience.data.partition import ClassesPerClient, LabelSets, Shards


def counts_of(parts, labels):
    return np.array([np.bincount(labels[p], minlength=labels.max() + 1) for p in parts])


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    clients=st.integers(1, 12),
    each=st.integers(1, 6),
    skew=st.sampled_from(["equal", "power_law", "log_normal", "half_normal"]),
    least=st.integers(1, 3),
)
@settings(max_examples=300, deadline=None)
def test_every_client_has_exactly_its_number_of_classes_or_no_split_exists(sizes, clients, each, skew, least):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    partition = ClassesPerClient(clients=clients, classes_per_client=each, skew=skew, min_per_class=least)
    room = sum(min(size // least, clients) for size in sizes)
    possible = each <= len(sizes) <= clients * each and min(sizes) >= least and room >= clients * each
    if not possible:
        with pytest.raises(Invalid, match="ClassesPerClient"):
            partition.split(labels, groups=None, seed=0)
        return
    counts = counts_of(partition.split(labels, groups=None, seed=0), labels)
    assert ((counts > 0).sum(1) == each).all()
    assert (counts[counts > 0] >= least).all()
    assert np.array_equal(counts.sum(0), sizes)


def test_equal_classes_have_equally_many_holders_and_equal_shares():
    labels = np.repeat(np.arange(10), 600)
    counts = counts_of(ClassesPerClient(clients=100, classes_per_client=2).split(labels, groups=None, seed=0), labels)
    assert ((counts > 0).sum(0) == 20).all()
    assert set(np.unique(counts)) == {0, 30}
    pairs = {tuple(np.flatnonzero(row)) for row in counts}
    assert len(pairs) > 25  # of 45: drawn, not dealt in a pattern


def test_large_classes_have_more_holders():
    labels = np.repeat([0, 1, 2], [600, 300, 100])
    counts = counts_of(ClassesPerClient(clients=10, classes_per_client=1).split(labels, groups=None, seed=0), labels)
    assert (counts > 0).sum(0).tolist() == [6, 3, 1]
    assert (counts.sum(1) == 100).all()


def test_power_law_with_two_digits_looks_like_the_fedprox_split():
    labels = np.arange(60000) % 10
    partition = ClassesPerClient(clients=1000, classes_per_client=2, skew="power_law", exponent=0.67, min_per_class=5)
    deviations = []
    for seed in range(5):
        parts = partition.split(labels, groups=None, seed=seed)
        sizes = np.array([len(p) for p in parts])
        assert ((counts_of(parts, labels) > 0).sum(1) == 2).all()
        assert sizes.sum() == 60000 and sizes.min() >= 10
        deviations.append(sizes.std())
    assert np.mean(deviations) == pytest.approx(106, rel=0.02)  # Table 1; its mean of 69 counts test rows, too


def test_refusals_say_what_works_and_it_does():
    labels = np.repeat([0, 1, 2], [4, 2, 1])
    with pytest.raises(Invalid) as refusal:
        ClassesPerClient(clients=5, classes_per_client=2).split(labels, groups=None, seed=0)
    found = re.search(r"at most clients = (\d+), or classes_per_client = (\d+)", str(refusal.value))
    assert found
    ClassesPerClient(clients=int(found[1]), classes_per_client=2).split(labels, groups=None, seed=0)
    ClassesPerClient(clients=5, classes_per_client=int(found[2])).split(labels, groups=None, seed=0)
    with pytest.raises(
        Invalid, match="leaves 1 of 3 classes to nobody: at least classes_per_client = 2, or clients = 3"
    ):
        ClassesPerClient(clients=2, classes_per_client=1).split(labels, groups=None, seed=0)
    with pytest.raises(Invalid, match="at most classes_per_client = 3"):
        ClassesPerClient(clients=2, classes_per_client=4).split(labels, groups=None, seed=0)
    with pytest.raises(Invalid, match="at most min_per_class = 1"):
        ClassesPerClient(clients=2, classes_per_client=2, min_per_class=2).split(labels, groups=None, seed=0)


def test_shards_are_label_sorted_slices():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))
    parts = Shards(clients=100, shards_per_client=2).split(labels, groups=None, seed=0)
    assert {len(p) for p in parts} == {6}
    counts = counts_of(parts, labels)
    assert ((counts > 0).sum(1) <= 2).all()  # 3 divides 60: no shard straddles two classes
    assert (counts % 3 == 0).all()
    assert ((counts > 0).sum(1) == 2).sum() > 75  # dealt at random: a pair is of one class in 19 of 199 cases


def test_uneven_shards_differ_by_one_row_and_too_many_are_refused():
    labels = np.arange(11) % 2
    sizes = [len(p) for p in Shards(clients=2, shards_per_client=2).split(labels, groups=None, seed=0)]
    assert sum(sizes) == 11 and max(sizes) <= 6
    with pytest.raises(Invalid, match="cuts 12 shards from 11 rows: at most 1 each, or 5 clients"):
        Shards(clients=6, shards_per_client=2).split(labels, groups=None, seed=0)


def test_label_sets_without_sizes_share_each_class_equally():
    labels = np.repeat([0, 1, 2], [10, 9, 4])
    counts = counts_of(LabelSets(labels=((0, 1), (1,), (2, 0))).split(labels, groups=None, seed=0), labels)
    assert counts.tolist() == [[5, 5, 0], [0, 4, 0], [5, 0, 4]]


def test_label_sets_with_sizes_take_as_many_of_each():
    labels = np.repeat([0, 1, 2], [10, 9, 4])
    partition = LabelSets(labels=((0, 1), (2,)), sizes=(7, 3), allow_rest=True)
    counts = counts_of(partition.split(labels, groups=None, seed=0), labels)
    assert counts.tolist() == [[4, 3, 0], [0, 0, 3]]


def test_label_sets_refuse_what_they_cannot_give():
    labels = np.repeat([0, 1, 2], [10, 9, 4])
    with pytest.raises(Invalid, match="ask for 5 rows of class 2, but there are 4"):
        LabelSets(labels=((2,),), sizes=(5,), allow_rest=True).split(labels, groups=None, seed=0)
    with pytest.raises(Invalid, match="leaves 4 of 4 rows of class 2 to nobody: set allow_rest"):
        LabelSets(labels=((0, 1),)).split(labels, groups=None, seed=0)
    with pytest.raises(Invalid, match=r"labels\[0\] names class 7, which the data lack: they have 0, 1, 2"):
        LabelSets(labels=((7,),)).split(labels, groups=None, seed=0)
    for bad in ({"labels": ()}, {"labels": ((),)}, {"labels": ((1, 1),)}, {"labels": ((1,),), "sizes": (1, 2)}):
        with pytest.raises(Invalid, match="LabelSets"):
            LabelSets(**bad)
