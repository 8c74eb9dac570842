"""Natural groups, feature shift and mixtures: what they know beyond rows."""

import numpy as np
import pytest
import torch

from consilience.core.settings import Invalid
from consilience.data.partition import Dirichlet, FeatureShift, Iid, Mixture, Natural, Quantity, assign
from consilience.data.partition.shifts import Noise, Rotation, apply

LABELS = np.arange(120) % 4
GROUPS = np.repeat([0, 2, 5], [60, 40, 20])


def test_natural_clients_are_the_groups():
    found = assign(Natural(), LABELS, groups=GROUPS, seed=0)
    assert [len(p) for p in found.parts] == [60, 40, 20]
    assert found.owners == [0, 2, 5]
    assert all((GROUPS[p] == g).all() for p, g in zip(found.parts, found.owners))


def test_natural_leaves_out_small_groups_and_keeps_a_drawn_number():
    assert [len(p) for p in Natural(min_size=30).split(LABELS, groups=GROUPS, seed=0)] == [60, 40]
    kept = [tuple(assign(Natural(max_clients=2), LABELS, groups=GROUPS, seed=s).owners) for s in range(30)]
    assert set(kept) == {(0, 2), (0, 5), (2, 5)}
    with pytest.raises(Invalid, match="leaves no client: the largest group has 60 rows, the median one 40"):
        Natural(min_size=61).split(LABELS, groups=GROUPS, seed=0)


def test_natural_needs_groups_that_fit():
    with pytest.raises(Invalid, match="natural needs data that say which natural client"):
        Natural().split(LABELS, groups=None, seed=0)
    with pytest.raises(Invalid, match=r"groups has shape \(3,\) for 120 rows"):
        Natural().split(LABELS, groups=GROUPS[:3], seed=0)


def test_domain_splits_each_group_by_the_inner_partition():
    found = assign(FeatureShift(inner=Iid(clients=2), kind="domain"), LABELS, groups=GROUPS, seed=0)
    assert [len(p) for p in found.parts] == [30, 30, 20, 20, 10, 10]
    assert found.owners == [0, 0, 2, 2, 5, 5]
    assert all((GROUPS[p] == g).all() for p, g in zip(found.parts, found.owners))
    assert found.shifts == [()] * 6
    with pytest.raises(Invalid, match=r"FeatureShift.inner cannot split group 5: .*min_size = 15 for 2 clients"):
        FeatureShift(inner=Quantity(clients=2, min_size=15), kind="domain").split(LABELS, groups=GROUPS, seed=0)


def test_shifts_are_dealt_to_clients_in_order():
    turned = FeatureShift(inner=Iid(clients=3), kind="rotation", angles=(0.0, 45.0))
    assert assign(turned, LABELS, groups=None, seed=0).shifts == [
        (Rotation(angle=0.0),),
        (Rotation(angle=45.0),),
        (Rotation(angle=0.0),),
    ]
    noisy = FeatureShift(inner=turned, kind="noise", sigma=0.6)
    levels = [shift[1].sigma for shift in assign(noisy, LABELS, groups=None, seed=0).shifts]
    assert levels == pytest.approx([0.2, 0.4, 0.6])
    rows = turned.split(LABELS, groups=None, seed=0)
    inner = Iid(clients=3).split(LABELS, groups=None, seed=0)
    assert all(np.array_equal(a, b) for a, b in zip(rows, inner))


def test_quarter_turns_are_exact_for_any_type():
    x = torch.arange(9, dtype=torch.uint8).reshape(1, 1, 3, 3)
    rng = np.random.default_rng(0)
    assert Rotation(angle=90.0)(x, rng)[0, 0].tolist() == [[2, 5, 8], [1, 4, 7], [0, 3, 6]]
    assert torch.equal(Rotation(angle=-90.0)(x, rng), Rotation(angle=270.0)(x, rng))
    assert torch.equal(Rotation(angle=720.0)(x, rng), x)


@pytest.mark.parametrize("shape", [(9, 9), (8, 8)])
def test_free_angles_turn_the_same_way_as_quarter_turns(shape):
    x = torch.rand(2, 3, *shape, dtype=torch.float64)
    rng = np.random.default_rng(0)
    almost = Rotation(angle=90.0 + 1e-9)(x, rng)
    assert torch.allclose(almost, Rotation(angle=90.0)(x, rng), atol=1e-6)


def test_a_free_angle_moves_a_point_where_geometry_says_also_in_oblong_pictures():
    x = torch.zeros(1, 1, 41, 61)
    x[0, 0, 20, 30 + 10] = 1.0  # ten to the right of the centre
    turned = Rotation(angle=30.0)(x, np.random.default_rng(0))[0, 0]
    row, column = (int(v) for v in np.unravel_index(int(turned.argmax()), turned.shape))
    # Counter-clockwise on the screen: up by 10 sin 30 = 5, right by 10 cos 30 = 8.66.
    assert (20 - row, column - 30) == (5, 9)


def test_shifts_refuse_what_they_do_not_fit():
    rng = np.random.default_rng(0)
    with pytest.raises(Invalid, match="pictures of 2 x 3 into another shape"):
        Rotation(angle=90.0)(torch.zeros(1, 1, 2, 3), rng)
    with pytest.raises(Invalid, match=r"needs pictures in floating point, not torch.uint8"):
        Rotation(angle=30.0)(torch.zeros(1, 1, 3, 3, dtype=torch.uint8), rng)
    with pytest.raises(Invalid, match=r"needs pictures .* but the data are torch.float32"):
        apply(Rotation(angle=90.0), torch.zeros(5, 4), rng)
    with pytest.raises(Invalid, match=r"needs floating-point features, but the data are torch.int64"):
        apply(Noise(sigma=1.0), torch.zeros(5, 4, dtype=torch.int64), rng)
    for bad in ({"angles": ()}, {"angles": (float("nan"),)}, {"sigma": -1.0}, {"kind": "blur"}):
        with pytest.raises(Invalid, match=f"FeatureShift.{next(iter(bad))}"):
            FeatureShift(**{"inner": Iid(clients=2), "kind": "rotation", **bad})
    with pytest.raises(Invalid, match=r"FeatureShift.inner = 3 is no Partition"):
        FeatureShift(inner=3, kind="noise")


def test_a_mixture_gives_each_component_its_share_of_rows():
    mixture = Mixture(parts=((0.25, Iid(clients=3)), (0.75, Dirichlet(clients=2, alpha=0.01))))
    parts = mixture.split(LABELS, groups=None, seed=0)
    assert len(parts) == 5
    assert [len(p) for p in parts[:3]] == [10, 10, 10] and sum(len(p) for p in parts[3:]) == 90
    even = np.bincount(LABELS[np.concatenate(parts[:3])], minlength=4)
    assert even.min() >= 2  # drawn from all classes


def test_equal_components_of_a_mixture_draw_apart():
    half = Dirichlet(clients=2, alpha=0.5)
    labels = np.arange(4000) % 4
    parts = Mixture(parts=((0.5, half), (0.5, half))).split(labels, groups=None, seed=0)
    first, second = (np.bincount(labels[parts[k]], minlength=4) / 500 for k in (0, 2))
    assert np.abs(first - second).max() > 0.2


def test_a_mixture_keeps_what_its_components_know():
    mixture = Mixture(parts=((0.5, Natural()), (0.5, FeatureShift(inner=Iid(clients=1), kind="noise", sigma=1.0))))
    found = assign(mixture, LABELS, groups=GROUPS, seed=0)
    assert found.owners == [0, 2, 5, None]
    assert found.shifts == [(), (), (), (Noise(sigma=1.0),)]
    assert all((GROUPS[p] == g).all() for p, g in zip(found.parts[:3], (0, 2, 5)))


def test_a_mixture_refuses_shares_and_parts_that_do_not_work():
    with pytest.raises(Invalid, match=r"add up to 0.9"):
        Mixture(parts=((0.5, Iid(clients=1)), (0.4, Iid(clients=1))))
    with pytest.raises(Invalid, match=r"Mixture.parts\[0\]\[0\] = 0.0"):
        Mixture(parts=((0.0, Iid(clients=1)), (1.0, Iid(clients=1))))
    with pytest.raises(Invalid, match=r"Mixture.parts\[1\]\[1\] = 'iid' is no Partition"):
        Mixture(parts=((0.5, Iid(clients=1)), (0.5, "iid")))
    with pytest.raises(Invalid, match="add up to 0"):
        Mixture(parts=())
    tiny = Mixture(parts=((0.01, Iid(clients=1)), (0.99, Iid(clients=1))))
    with pytest.raises(Invalid, match=r"Mixture.parts\[0\] has share 0.01 of 5 rows, which is none"):
        tiny.split(np.zeros(5, int), groups=None, seed=0)
