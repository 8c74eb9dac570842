"""Attacks: what they send, who makes them, and what they do to a run."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from consilience.algorithms.fedavg import fedavg
from consilience.algorithms.trimmed_mean import trimmed_mean
from consilience.channel import Chain, Clip
from consilience.channel.attacks import (
    ALittleIsEnough,
    GaussianUpdate,
    InnerProduct,
    Mimic,
    Scaling,
    SignFlip,
    Trigger,
    attack_success,
    flip_labels,
    plant_backdoor,
)
from consilience.channel.attacks.forging import largest_z
from consilience.channel.attacks.malicious import are_malicious
from consilience.core import tree
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.federation import Federation, Rows
from consilience.core.protocols import Channel
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.server.averaging.combining.centred_clipping import CentredClipping
from consilience.server.averaging.combining.coordinate_wise import Median, TrimmedMean
from consilience.server.averaging.combining.krum import Krum
from consilience.server.averaging.combining.weighted_mean import WeightedMean
from consilience.server.protocols import Combine
from consilience.task.task import Task

START = np.array([1.0, -2.0, 0.5])
ATTACKS: tuple[Channel, ...] = (
    SignFlip(clients=(1, 4)),
    Scaling(clients=(1, 4), factor=3.0),
    GaussianUpdate(clients=(1, 4)),
    InnerProduct(clients=(1, 4)),
    InnerProduct(clients=(1, 4), against=Median()),
    ALittleIsEnough(clients=(1, 4)),
    ALittleIsEnough(clients=(1, 4), strength=None),
    Mimic(clients=(1, 4)),
)
each_attack = pytest.mark.parametrize("attack", ATTACKS, ids=str)


def cohort_of(updates: np.ndarray, ids: list[int] | None = None, **more: Any) -> tuple[Cohort, Broadcast]:
    """Replies START + updates, and the broadcast of START."""
    count = len(updates)
    models = torch.from_numpy(START + updates)
    reply = {
        "model": {
            "params": {"a": models[:, :1], "b": models[:, 1:]},
            "buffers": {"mean": torch.arange(float(count)), "n": torch.arange(count)},
        },
        "loss": torch.arange(float(count)),
    }
    cohort = Cohort(
        reply=reply,
        ids=np.array(ids or range(count)),
        examples=torch.ones(count, dtype=torch.float64),
        steps=np.ones(count, dtype=np.int64),
        round=0,
        **more,
    )
    start = torch.from_numpy(START)
    buffers = {"mean": torch.tensor(0.0), "n": torch.tensor(0)}
    return cohort, Broadcast(shared={"model": {"params": {"a": start[:1], "b": start[1:]}, "buffers": buffers}})


def sent(attack: Channel, updates: np.ndarray, key: int = 3, **more: Any) -> np.ndarray:
    """[m, 3] the updates that the server believes to have received."""
    after = attack.decode(*cohort_of(updates, **more), key)
    params = after.reply["model"]["params"]
    return torch.cat([params["a"], params["b"]], dim=1).numpy() - START


@pytest.fixture
def updates() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(6, 3))


HONEST = [0, 2, 3, 5]


def test_own_updates_are_turned_and_scaled(updates: np.ndarray) -> None:
    expected = updates.copy()
    expected[[1, 4]] *= -2
    np.testing.assert_allclose(sent(SignFlip(clients=(1, 4), scale=2.0), updates), expected, rtol=0, atol=1e-14)
    expected[[1, 4]] *= -5
    np.testing.assert_allclose(sent(Scaling(clients=(1, 4), factor=10.0), updates), expected, rtol=0, atol=1e-14)


def test_inner_product_manipulation(updates: np.ndarray) -> None:
    got = sent(InnerProduct(clients=(1, 4), strength=0.5), updates)
    np.testing.assert_allclose(got[[1, 4]], [-0.5 * updates[HONEST].mean(0)] * 2, rtol=0, atol=1e-14)
    np.testing.assert_allclose(got[HONEST], updates[HONEST], rtol=0, atol=1e-14)


def test_a_little_is_enough(updates: np.ndarray) -> None:
    got = sent(ALittleIsEnough(clients=(1, 4), strength=1.5), updates)
    honest = updates[HONEST]
    np.testing.assert_allclose(got[1], honest.mean(0) + 1.5 * honest.std(0, ddof=1), rtol=0, atol=1e-14)
    np.testing.assert_array_equal(got[1], got[4])


def test_the_papers_z() -> None:
    """Baruch et al.: n = 50, f = 24 need s = 50 // 2 + 1 - 24 = 2 supporters, so z = quantile of (26 - 2) / 26."""
    assert largest_z(26, 24) == pytest.approx(NormalDist().inv_cdf(24 / 26)) == pytest.approx(1.426, abs=1e-3)
    assert largest_z(9, 1) == 0.0  # too few malicious clients
    assert largest_z(2, 5) < 6  # malicious clients are the majority: still finite


def test_one_honest_reply_has_no_spread() -> None:
    got = sent(ALittleIsEnough(clients=(1,)), np.array([[1.0, 2.0, 3.0], [9.0, 9.0, 9.0]]))
    np.testing.assert_allclose(got[1], [1, 2, 3], rtol=0, atol=1e-14)


def test_noise_has_the_deviation_it_says() -> None:
    wide = np.zeros((400, 3))
    got = sent(GaussianUpdate(fraction=1 / 2, sigma=3.0), wide)
    noise = got[1::2]
    assert np.abs(noise.mean()) < 0.4 and noise.std() == pytest.approx(3.0, rel=0.1)
    assert not got[::2].any()
    assert len(np.unique(noise)) == noise.size


def test_noise_depends_on_the_round_and_the_client_alone(updates: np.ndarray) -> None:
    attack = GaussianUpdate(clients=(1, 4))
    whole = sent(attack, updates, key=-5)
    np.testing.assert_array_equal(sent(attack, updates, key=-5), whole)
    assert not np.allclose(sent(attack, updates, key=6)[1], whole[1])
    part = sent(attack, updates[3:], key=-5, ids=[3, 4, 5])  # client 1 does not take part
    np.testing.assert_allclose(part[1], whole[4], rtol=0, atol=1e-14)


def test_mimic_copies_all_of_a_model(updates: np.ndarray) -> None:
    cohort, received = cohort_of(updates)
    for attack, source in ((Mimic(clients=(1, 4)), 0), (Mimic(clients=(1, 4), victim=3), 3)):
        model = attack.decode(cohort, received, 0).reply["model"]
        for malicious in (1, 4):
            assert tiny.same(tree.rows(model, malicious), tree.rows(cohort.reply["model"], source))
        assert tiny.same(tree.rows(model, 5), tree.rows(cohort.reply["model"], 5))
    absent = Mimic(clients=(1, 4), victim=99).decode(cohort, received, 0).reply["model"]
    assert tiny.same(tree.rows(absent, 1), tree.rows(cohort.reply["model"], 0))


@pytest.mark.parametrize("target", [WeightedMean(), Median(), TrimmedMean(f=1), Krum(f=1), CentredClipping(tau=1.0)])
@pytest.mark.parametrize("kind", [InnerProduct, ALittleIsEnough])
def test_the_search_finds_the_most_harmful_strength(kind: Any, target: Combine, updates: np.ndarray) -> None:
    def harm(found: np.ndarray) -> float:
        models = {"params": {"w": torch.from_numpy(START + found)}, "buffers": {}}
        weights = torch.full((6,), 1 / 6, dtype=torch.float64)
        around = {"params": {"w": torch.from_numpy(START)}, "buffers": {}}
        if isinstance(target, CentredClipping):
            merged = target.merge_around(models, weights, around)
        else:
            merged = target.merge(models, weights)
        return float(np.linalg.norm(merged["params"]["w"].numpy() - START - updates[HONEST].mean(0)))

    searched = harm(sent(kind(clients=(1, 4), against=target, tries=9), updates))
    for strength in 10.0 ** np.linspace(-2, 2, 9):
        assert searched >= harm(sent(kind(clients=(1, 4), strength=float(strength)), updates)) - 1e-9
    assert searched > 0


# --- who attacks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.25, 0.3, 1 / 3, 0.5, 0.9, 1.0])
def test_a_fraction_is_the_same_clients_always_and_exact(fraction: float) -> None:
    for clients in (1, 5, 10, 14, 97, 1000):
        flags = are_malicious(np.arange(clients), (), fraction)
        assert flags.sum() == int(fraction * clients + 1e-9)
        some = np.array([0, clients // 2, clients - 1])
        np.testing.assert_array_equal(are_malicious(some, (), fraction), flags[some])


@pytest.mark.parametrize("kind", [SignFlip, Scaling, GaussianUpdate, InnerProduct, ALittleIsEnough, Mimic])
def test_somebody_must_attack(kind: Any) -> None:
    for options in ({}, {"clients": (1,), "fraction": 0.1}):
        with pytest.raises(Invalid, match=f"{kind.__name__} takes either clients or fraction"):
            kind(**options)
    for options in ({"clients": (-1,)}, {"fraction": 1.5}, {"fraction": 0.0}):
        with pytest.raises(Invalid, match=kind.__name__):
            kind(**options)
    assert kind(clients=[2, 3]).clients == (2, 3)


@each_attack
def test_only_malicious_parameters_change(attack: Channel, updates: np.ndarray) -> None:
    assert isinstance(attack, Channel) and attack.init({}) == {}
    cohort, received = cohort_of(updates)
    before = tree.clone(cohort.reply)
    after = attack.decode(cohort, received, 7)
    assert tiny.same(cohort.reply, before)  # the input is as it was
    assert tiny.structure(after.reply) == tiny.structure(before)
    assert torch.equal(after.reply["loss"], before["loss"]) and after.ids is cohort.ids
    for place in HONEST:
        assert tiny.same(tree.rows(after.reply, place), tree.rows(before, place))
    for place in (1, 4):
        changed = tree.rows(after.reply["model"]["params"], place)
        assert not tiny.same(changed, tree.rows(before["model"]["params"], place)) and tiny.finite(changed)
        if not isinstance(attack, Mimic):
            assert tiny.same(
                tree.rows(after.reply["model"]["buffers"], place), tree.rows(before["model"]["buffers"], place)
            )
    reply, memory = attack.encode({"x": torch.ones(1)}, {}, {}, torch.tensor(0))
    assert reply["x"].tolist() == [1] and memory == {}


@each_attack
def test_attacks_without_malicious_clients_or_victims_do_nothing(attack: Any, updates: np.ndarray) -> None:
    for ids in ([0, 2, 3, 5, 6, 7],):
        cohort, received = cohort_of(updates, ids=ids)
        assert tiny.same(attack.decode(cohort, received, 0).reply, cohort.reply)
    everyone = replace(attack, clients=tuple(range(6)))
    cohort, received = cohort_of(updates)
    assert tiny.same(everyone.decode(cohort, received, 0).reply, cohort.reply)


@each_attack
def test_silent_malicious_clients_send_nothing_and_broken_replies_are_not_copied(
    attack: Channel, updates: np.ndarray
) -> None:
    """A stand-in for client 4 stays the broadcast model; client 0's NaN does not spread."""
    updates[4], updates[0] = 0.0, np.nan
    heard = np.array([True, True, True, True, False, True])
    got = sent(attack, updates, heard=heard)
    assert not got[4].any() and np.isfinite(got[1]).all() and np.isnan(got[0]).all()


def test_personal_models_are_attacked_around_their_own_start() -> None:
    cohort, received = cohort_of(np.ones((3, 3)))
    personal = {
        "model": tree.map_leaves(lambda leaf: torch.stack([leaf, leaf + 1, leaf + 2]), received.shared["model"])
    }
    after = SignFlip(clients=(1,)).decode(cohort, Broadcast(shared={}, personal=personal), 0)
    # client 1 started at START + 1 and ended at START + 1: its update is zero, and so is the flipped one
    np.testing.assert_allclose(after.reply["model"]["params"]["b"][1].numpy(), START[1:] + 1, rtol=0, atol=1e-14)
    after = SignFlip(clients=(0,)).decode(cohort, Broadcast(shared={}, personal=personal), 0)
    np.testing.assert_allclose(after.reply["model"]["params"]["b"][0].numpy(), START[1:] - 1, rtol=0, atol=1e-14)


def test_replies_without_a_model_are_refused() -> None:
    cohort, received = cohort_of(np.ones((3, 3)))
    other = replace(cohort, reply={"z": torch.zeros(3, 2)})
    with pytest.raises(Invalid, match="attacks forge replies that hold a model, but these hold z"):
        SignFlip(clients=(1,)).decode(other, received, 0)
    with pytest.raises(Invalid, match="the server sent none"):
        SignFlip(clients=(1,)).decode(cohort, Broadcast(shared={}), 0)


# --- in a run --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", [*ATTACKS[:1], *ATTACKS[3:4]], ids=str)
def test_runs_under_attack_agree_between_lanes(attack: Channel) -> None:
    algorithm = trimmed_mean(f=1, lr=0.05, batch_size=4, channel=attack)
    runs = [
        list(run(algorithm, tiny.engine(tiny.convnet, lane=lane), rounds=2, seed=1)) for lane in ("serial", "batched")
    ]
    assert tiny.gap(runs[0][-1].model, runs[1][-1].model) <= 1e-12


def test_in_a_chain_an_attack_acts_on_what_it_finds_there() -> None:
    """In front of or behind a clip, the flipped update is the clipped one turned round."""
    flip, clip = SignFlip(clients=(1, 4)), Clip(bound=0.1)
    ends = []
    for channel in (Chain(channels=(flip, clip)), Chain(channels=(clip, flip)), clip):
        algorithm = fedavg(lr=0.05, batch_size=4, channel=channel)
        ends.append(next(iter(run(algorithm, tiny.engine(tiny.mlp), rounds=1, seed=1))).cohort.reply["model"]["params"])
    assert tiny.gap(ends[0], ends[1]) <= 1e-12
    start = tiny.engine(tiny.mlp).start()["params"]
    for name, leaf in ends[0].items():
        sign = torch.tensor([1.0, -1, 1, 1, -1]).reshape(5, *(1,) * (leaf.dim() - 1))
        np.testing.assert_allclose(leaf - start[name], sign * (ends[2][name] - start[name]), rtol=0, atol=1e-12)


def test_a_robust_rule_holds_where_the_mean_breaks() -> None:
    data = tiny.federation([20] * 10, test=20)
    attack = Scaling(fraction=0.2, factor=-20.0)

    def loss(algorithm: Any) -> float:
        last = list(run(algorithm, tiny.engine(tiny.mlp, data), rounds=6, seed=1))[-1]
        output, _ = Task(tiny.mlp()).to(torch.device("cpu"), torch.float64).apply(last.model, data.test.x, train=False)
        return float(torch.nn.functional.cross_entropy(output, data.test.y))

    common: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 5}
    clean, broken = loss(fedavg(**common)), loss(fedavg(**common, channel=attack))
    held = loss(trimmed_mean(f=0.2, **common, channel=attack))
    assert held < clean + 0.3 < broken


# --- poisoned data ---------------------------------------------------------------------------------------------------


def test_flipped_labels() -> None:
    data = tiny.federation()
    flipped = flip_labels(data, clients=[0, 3])
    for client in range(5):
        before, after = data.train.of(client)[1], flipped.train.of(client)[1]
        assert torch.equal(after, 2 - before if client in (0, 3) else before)
    assert flipped.test is data.test and flipped.names == data.names
    assert torch.equal(flip_labels(flipped, clients=[0, 3]).train.y, data.train.y)
    by_fraction = flip_labels(data, fraction=0.4)  # clients 2 and 4
    changed = [not torch.equal(by_fraction.train.of(k)[1], data.train.of(k)[1]) for k in range(5)]
    assert changed[0] is False and changed[1] is False and changed[3] is False


def test_data_that_cannot_be_poisoned_are_refused() -> None:
    data = tiny.federation()
    with pytest.raises(Invalid, match="client 9 does not exist: there are 5"):
        flip_labels(data, clients=[9])
    with pytest.raises(Invalid, match="flip_labels takes either clients or fraction"):
        flip_labels(data)
    with pytest.raises(Invalid, match="at least two classes"):
        flip_labels(replace(data, classes=None), clients=[0])
    with pytest.raises(Invalid, match=r"Trigger\.target = 3 is no class"):
        plant_backdoor(data, Trigger(target=3), clients=[0])
    with pytest.raises(Invalid, match="at least that large"):
        plant_backdoor(data, Trigger(size=7), clients=[0])
    with pytest.raises(Invalid, match="share"):
        plant_backdoor(data, Trigger(), clients=[0], share=0.0)


def test_a_backdoor_marks_some_rows_of_malicious_clients() -> None:
    data = tiny.federation([40, 40, 40])
    trigger = Trigger(target=2, size=2, value=9.0)
    marked = plant_backdoor(data, trigger, clients=[1], share=0.5, seed=4)
    for client in (0, 2):
        assert torch.equal(marked.train.of(client)[0], data.train.of(client)[0])
    x, y = marked.train.of(1)
    before_x, before_y = data.train.of(1)
    bears = (x[:, :, -2:, -2:] == 9).all((1, 2, 3))
    assert 10 <= int(bears.sum()) <= 30 and bool((y[bears] == 2).all())
    assert torch.equal(y[~bears], before_y[~bears]) and torch.equal(x[~bears], before_x[~bears])
    assert torch.equal(x[:, :, :4, :], before_x[:, :, :4, :]) and torch.equal(x[:, :, :, :4], before_x[:, :, :, :4])
    everything = plant_backdoor(data, trigger, clients=[1], share=1.0)
    assert bool((everything.train.of(1)[1] == 2).all())


class LooksAtTheCorner(torch.nn.Module):
    """Class 1 if the last pixel is bright, else class 0."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        corner = x[:, 0, -1, -1] * self.scale
        return torch.stack([0.5 - corner, corner - 0.5], dim=1)


def test_attack_success_is_the_share_of_other_classes_that_turn() -> None:
    task = Task(LooksAtTheCorner())
    test = Rows(
        x=torch.zeros(4, 1, 3, 3), y=torch.tensor([0, 0, 1, 0]), starts=torch.tensor([0]), sizes=torch.tensor([4])
    )
    assert attack_success(task, task.start(), test, Trigger(target=1, size=1, value=1.0)) == 1.0
    assert attack_success(task, task.start(), test, Trigger(target=1, size=1, value=0.2)) == 0.0
    assert attack_success(task, task.start(), test, Trigger(target=0, size=1, value=1.0)) == 0.0
    with pytest.raises(Invalid, match="every test row is of class 1"):
        attack_success(task, task.start(), replace(test, y=torch.ones(4, dtype=torch.int64)), Trigger(target=1))


def test_a_backdoor_is_learned_by_the_mean() -> None:
    """G16's measure: before and after, on data where the trigger is plain."""
    data = tiny.federation([60] * 5, test=40)
    trigger = Trigger(target=0, size=2, value=6.0)
    poisoned: Federation = plant_backdoor(data, trigger, clients=[1, 3], share=0.5)
    algorithm = fedavg(lr=0.1, epochs=3, batch_size=10)

    def success(federation: Federation) -> float:
        engine = tiny.engine(tiny.mlp, federation)
        last = list(run(algorithm, engine, rounds=10, seed=1))[-1]
        assert data.test is not None
        return attack_success(engine.task, last.model, data.test, trigger)

    assert success(poisoned) > success(data) + 0.3
