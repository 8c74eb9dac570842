"""Every measure of heterogeneity against tiny federations computed by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from torch import Tensor, nn

from consilience.algorithms.fedavg import fedavg
from consilience.core.federation import Federation, Rows
from consilience.core.plans import Work
from consilience.diagnose import holdings, probe, shift
from consilience.diagnose.effort import effort
from consilience.engines.vectorised.engine import Vectorised
from consilience.environments.environment import Environment
from consilience.task.task import Task

counts = st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=2, max_size=6).map(np.array)


# --- labels and sizes ------------------------------------------------------------------------------------------------


def test_two_clients_with_disjoint_labels() -> None:
    found = holdings.label_skew(np.array([[4, 0], [0, 4]]), seed=0)
    assert found.total_variation.tolist() == [0.5, 0.5] and found.mean == 0.5
    # p_k = (1, 0), p = (1/2, 1/2), middle (3/4, 1/4): divergence (log2 4/3 + log2(2/3)/2 + 1/2) / 2
    divergence = (math.log2(4 / 3) + 0.5 * math.log2(2 / 3) + 0.5) / 2
    assert found.jensen_shannon == pytest.approx([math.sqrt(divergence)] * 2)
    assert found.entropy.tolist() == [0.0, 0.0]


def test_clients_that_hold_what_everybody_holds() -> None:
    found = holdings.label_skew(np.array([[2, 2, 4], [1, 1, 2], [0, 0, 0]]), seed=0)
    assert found.total_variation[:2].tolist() == [0.0, 0.0] and np.isnan(found.total_variation[2])
    assert found.jensen_shannon[:2] == pytest.approx([0.0, 0.0], abs=1e-7)
    assert found.entropy[:2] == pytest.approx([1.5 / math.log2(3)] * 2) and found.mean == 0.0


@given(counts.filter(lambda c: bool(c.sum(1).all())))
def test_distances_are_scipys_and_within_bounds(held: np.ndarray) -> None:
    whole = held.sum(0) / held.sum()
    theirs = [jensenshannon(row / row.sum(), whole, base=2) for row in held]
    assert holdings.jensen_shannon(held) == pytest.approx(np.nan_to_num(theirs), abs=1e-6)
    far = holdings.total_variation(held)
    assert (far >= 0).all() and (far < 1).all() and (holdings.entropy(held) <= 1 + 1e-12).all()


def test_chance_is_what_random_hands_have() -> None:
    """Rows dealt at random are within the band that random deals give; disjoint labels are far above it."""
    rng = np.random.default_rng(0)
    dealt = rng.multinomial(40, [0.1] * 10, size=20)
    found = holdings.label_skew(dealt, seed=0)
    assert abs(found.mean - found.chance_mean) < 0.03 and found.chance_mean > 0.1
    apart = holdings.label_skew(np.eye(10, dtype=np.int64) * 40, seed=0)
    assert apart.mean == pytest.approx(0.9) and apart.chance_high < 0.25


def test_labels_are_counted_by_client_and_real_values_by_decile() -> None:
    y = torch.tensor([0, 0, 1, 2, 2, 2])
    rows = Rows(x=torch.zeros(6, 1), y=y, starts=torch.tensor([0, 3]), sizes=torch.tensor([3, 3]))
    found, binned = holdings.label_counts(rows, 3)
    assert found.tolist() == [[2, 1, 0], [0, 0, 3]] and not binned
    rising = Rows(
        x=torch.zeros(100, 1),
        y=torch.arange(100.0),
        starts=torch.tensor([0, 50]),
        sizes=torch.tensor([50, 50]),
    )
    found, binned = holdings.label_counts(rising, None)
    assert binned and found.shape == (2, 10) and found.tolist() == [[10] * 5 + [0] * 5, [0] * 5 + [10] * 5]


def test_gini_in_closed_form() -> None:
    assert holdings.gini(np.array([5, 5, 5])) == 0.0
    assert holdings.gini(np.array([0, 0, 0, 8])) == pytest.approx(3 / 4)
    for n in (2, 7, 30):
        assert holdings.gini(np.arange(1, n + 1)) == pytest.approx((n - 1) / (3 * n))


@given(st.lists(st.integers(0, 100), min_size=1, max_size=9).filter(any))
def test_gini_is_the_mean_absolute_difference(sizes: list[int]) -> None:
    x = np.array(sizes, dtype=float)
    defined = np.abs(x[:, None] - x[None, :]).sum() / (2 * len(x) ** 2 * x.mean())
    assert holdings.gini(x) == pytest.approx(defined) and holdings.gini(3 * x[::-1]) == pytest.approx(defined)


def test_quantity_skew_by_hand() -> None:
    found = holdings.quantity_skew(np.array([1, 0, 10, 4, 5]))
    assert (found.ratio, found.half, found.empty) == (10.0, 1, 1)
    assert holdings.quantity_skew(np.array([3, 3, 3, 3])).half == 2


# --- inputs ----------------------------------------------------------------------------------------------------------


def test_between_share_by_hand() -> None:
    features, owners = np.array([[-2.0], [0.0], [0.0], [2.0]]), np.array([0, 0, 1, 1])
    assert shift.between_share(features, owners, 2) == pytest.approx(4 / 8)
    assert shift.client_distances(features, owners, 3)[:2] == pytest.approx([1.0, 1.0])
    assert np.isnan(shift.client_distances(features, owners, 3)[2])
    assert shift.between_share(np.ones((4, 2)), owners, 2) == 0.0


def clients(kind: str, seed: int = 0) -> Rows:
    """Ten clients of 40 rows with two classes, whose inputs are N(class, 1) in eight dimensions."""
    draw = torch.Generator().manual_seed(seed)
    xs, ys = [], []
    for k in range(10):
        share = {"labels": 0.9 if k % 2 else 0.1}.get(kind, 0.5)
        y = (torch.rand(40, generator=draw) < share).long()
        x = torch.randn(40, 8, generator=draw) + y[:, None]
        if kind == "mean" and k < 3:
            x = x + 1.0
        if kind == "scale" and k < 5:
            x = (x - y[:, None]) * 3 + y[:, None]
        xs.append(x)
        ys.append(y)
    sizes = torch.full((10,), 40)
    return Rows(x=torch.cat(xs), y=torch.cat(ys), starts=torch.arange(10) * 40, sizes=sizes)


def shifted(kind: str, seed: int = 0) -> shift.FeatureShift:
    return shift.feature_shift(clients(kind, seed), shift.random_encoder(8, 0), "random", labels=True, seed=0)


def test_sampling_noise_is_not_called_shift() -> None:
    found = [shifted("none", seed) for seed in range(5)]
    assert sum(one.is_shown for one in found) == 0
    assert all(one.share == pytest.approx(9 / 399, rel=0.5) for one in found)  # (K - 1) / (N - 1) by chance
    assert all(one.chance == pytest.approx(9 / 399, rel=0.1) for one in found)


def test_label_skew_moves_inputs_but_not_within_classes() -> None:
    found = shifted("labels")
    assert found.p == 0.01 and not found.is_shown and found.excess < 0.02


def test_given_the_label_the_share_is_of_the_variance_within_classes() -> None:
    """x = 10 class + 3 client +- 1: within a class, (3/2)^2 of (3/2)^2 + 1 lies between the clients."""
    client, label, sign = (torch.tensor(column) for column in zip(*itertools.product((0, 1), (0, 1), (-1, 1))))
    x = (10.0 * label + 3 * client + sign).double().unsqueeze(1)
    order = torch.argsort(client.repeat(5), stable=True)
    sizes = torch.tensor([20, 20])
    rows = Rows(x=x.repeat(5, 1)[order], y=label.repeat(5)[order], starts=torch.tensor([0, 20]), sizes=sizes)
    found = shift.feature_shift(rows, lambda given: given, "inputs", labels=True, seed=0)
    assert found.given_label == pytest.approx(2.25 / 3.25)
    assert found.share == pytest.approx(2.25 / (25 + 3.25)) and found.is_shown


@pytest.mark.parametrize("kind", ["mean", "scale"])
def test_other_means_and_other_scales_are_shown(kind: str) -> None:
    found = shifted(kind)
    assert found.is_shown and found.excess > 0.02
    if kind == "mean":
        assert found.distances[:3].min() > found.distances[3:].max()


def test_rows_are_sampled_alike_from_every_client() -> None:
    rows = Rows(
        x=torch.zeros(1000, 1),
        y=torch.zeros(1000),
        starts=torch.tensor([0, 900, 999]),
        sizes=torch.tensor([900, 99, 1]),
    )
    picked, owners = shift.sample(rows, 100, 0)
    assert np.bincount(owners).tolist() == [90, 10, 1] and len(set(picked.tolist())) == len(picked)
    assert ((picked >= 900) == torch.from_numpy(owners > 0)).all()


# --- gradients and models --------------------------------------------------------------------------------------------


def linear(features: int = 2, outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(features, outputs)


def engine_of(parts: list[tuple[Tensor, Tensor]]) -> Vectorised:
    return Vectorised(Task(linear()), Federation.from_clients(parts), dtype="float64", lane="serial", device="cpu")


def some(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, generator=draw, dtype=torch.float64), torch.randint(0, 3, (rows,), generator=draw)


def test_b_of_gradients_by_hand() -> None:
    alike = torch.tensor([[1.0, 2.0], [1.0, 2.0]], dtype=torch.float64)
    across = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    against = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    even = np.array([1.0, 1.0])
    assert probe.b_of(alike, even)[0] == pytest.approx(1.0, abs=1e-12)
    b, cosines = probe.b_of(across, even)
    assert b == pytest.approx(math.sqrt(2)) and cosines.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert probe.b_of(against, even)[0] == math.inf and probe.b_of(against, even)[1][0, 1] == -1
    # weights 3/4 and 1/4: E|g|^2 = 1, |E g|^2 = 1/4
    assert probe.b_of(against, np.array([3.0, 1.0]))[0] == pytest.approx(2.0)
    assert probe.b_of(torch.zeros(2, 3, dtype=torch.float64), even)[0] == 1.0


def test_the_gradient_is_that_of_the_mean_loss_whatever_the_batches() -> None:
    parts = [some(5, 1), some(3, 2)]
    engine = engine_of(parts)
    found, losses = probe.gradients_of(engine, engine.start(), np.arange(2))
    for k, (x, y) in enumerate(parts):
        module = linear().double()
        loss = nn.functional.cross_entropy(module(x), y)
        loss.backward()
        mine = torch.cat([part.grad.flatten() for part in module.parameters() if part.grad is not None])
        assert torch.allclose(found[k], mine, atol=1e-12) and losses[k] == pytest.approx(loss.item())
    small = probe.FullGradient(work=Work(epochs=1, batch_size=2, shuffle=False, trains=False))
    sent = engine.exchange(
        small, probe.Plain(), probe.Broadcast(shared={"model": engine.start()}), np.arange(2), round=0, seed=0
    )
    flat = torch.cat([leaf.flatten(1) for leaf in probe.tree.leaves(sent.reply["gradient"])], 1)
    assert torch.allclose(flat, found, atol=1e-12)


def test_identical_clients_have_b_one_and_models_alike() -> None:
    same = some(6, 3)
    engine = engine_of([same, same, same])
    found = probe.dissimilarity(engine, engine, engine.start(), np.arange(3))
    assert found.b == pytest.approx(1.0, abs=1e-12) and found.opposed == 0.0
    alike = probe.similarity(engine, engine, fedavg(lr=0.1, batch_size=None), engine.start(), np.arange(3), 0)
    assert alike.mean == pytest.approx(1.0, abs=1e-9) and alike.of == "outputs"


def test_clients_with_opposite_labels_are_far_above_chance() -> None:
    x, _ = some(60, 4)
    engine = engine_of([(x, torch.zeros(60, dtype=torch.long)), (x, torch.full((60,), 2))])
    dealt = Vectorised(
        engine.task, probe.dealt_at_random(engine.federation, 0), dtype="float64", lane="serial", device="cpu"
    )
    found = probe.dissimilarity(engine, dealt, engine.start(), np.arange(2))
    assert found.b > 1.3 * found.chance and found.chance < 1.2


def test_rows_are_dealt_at_random_without_loss() -> None:
    parts = [some(5, 1), some(3, 2)]
    federation = Federation.from_clients(parts)
    dealt = probe.dealt_at_random(federation, 0)
    assert dealt.train.sizes.tolist() == [5, 3]
    before, after = (sorted(map(tuple, rows.x.tolist())) for rows in (federation.train, dealt.train))
    assert before == after and not torch.equal(federation.train.x, dealt.train.x)


def test_clients_are_probed_within_limits() -> None:
    federation = Federation.from_clients([some(2 if k % 2 else 0, k) if k else some(1, 0) for k in range(10)])
    assert probe.probed(federation, 10, 0).tolist() == [0, 1, 3, 5, 7, 9]
    assert len(probe.probed(federation, probe.MOST_NUMBERS, 0)) == 2


# --- machines --------------------------------------------------------------------------------------------------------


def test_waiting_and_work_by_hand() -> None:
    environment = Environment(rows_per_second=(10.0, 10.0, 5.0), epochs=(1.0, 1.0, 1.0))
    found = effort(environment, Work(epochs=1, batch_size=5), np.array([10, 10, 10]), 1000, 0)
    assert found.seconds == pytest.approx([1.0, 1.0, 2.0]) and found.waiting == pytest.approx(1 / 3)
    assert found.steps.tolist() == [2, 2, 2] and found.communication == 0.0 and found.epochs_ratio == 1.0


def test_transfer_reliability_and_unequal_epochs() -> None:
    environment = Environment(
        upload=1000.0, rows_per_second=10.0, epochs=(1.0, 4.0), communication=(1.0, 0.0), availability=(1.0, 1.0)
    )
    found = effort(environment, Work(epochs=1, batch_size=5), np.array([10, 10]), 1000, 0)
    assert found.seconds == pytest.approx([2.0, 5.0]) and found.communication == pytest.approx(2 / 7)
    assert found.epochs_ratio == 4.0 and found.heard.tolist() == [1.0, 0.0]
    nothing = effort(Environment(), Work(), np.array([4, 4]), 1000, 0)
    assert nothing.seconds.tolist() == [0, 0] and nothing.waiting == 0.0
