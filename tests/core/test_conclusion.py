"""Rounds that are concluded before the device has tested the replies: the same results, and one wait for the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny
import torch

import consilience as cs
from consilience.algorithms.fedavg import fedavg
from consilience.core import conclusion, tree
from consilience.core.algorithm import Plain
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.prefetch import Prefetcher
from consilience.core.rounds import Round, run
from consilience.core.screening import Limits
from consilience.server.averaging.averaging import Averaging

pytestmark = pytest.mark.usefixtures("untraced")


@dataclass(frozen=True, kw_only=True)
class Spoiling(Plain):
    """The channel that multiplies the second client's reply in the second round."""

    factor: float = 1.0

    def decode(self, cohort: Cohort, received: Broadcast, key: int) -> Cohort:
        if cohort.round != 1:
            return cohort
        times = torch.ones(len(cohort), dtype=torch.float64)
        times[1] = self.factor
        spoilt = tree.map_leaves(
            lambda leaf: leaf * times.reshape(-1, *(1,) * (leaf.dim() - 1)).to(leaf.dtype), cohort.reply["model"]
        )
        return replace(cohort, reply={**cohort.reply, "model": spoilt})


def rounds_of(monkeypatch: pytest.MonkeyPatch, algorithm: Any, *, on_gpu: bool, **options: Any) -> list[Round]:
    monkeypatch.setattr(conclusion, "_on_gpu", lambda cohort: on_gpu)
    return list(run(algorithm, tiny.engine(), rounds=3, seed=3, **options))


def assert_equal(early: list[Round], usual: list[Round]) -> None:
    for one, other in zip(early, usual, strict=True):
        assert tiny.same(one.model, other.model) and tiny.same(one.snapshot.server, other.snapshot.server)
        assert one.cohort.ids.tolist() == other.cohort.ids.tolist() and one.cohort.counts == other.cohort.counts
        assert [each.detail for each in one.cohort.refusals] == [each.detail for each in other.cohort.refusals]
        assert one.snapshot.bad_rounds == other.snapshot.bad_rounds
        assert one.snapshot.losses.dense().tolist() == pytest.approx(
            other.snapshot.losses.dense().tolist(), abs=0, nan_ok=True
        )
        assert one.notes.keys() == other.notes.keys()


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "feddyn", "fedadam", "fedprox_fedsplit", "simprox", "fedgen"])
def test_results_are_those_of_a_round_that_tests_replies_first(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    options = {"step": 1.0} if name == "fedprox_fedsplit" else {}
    algorithm = getattr(cs, name)(lr=0.1, batch_size=4, **options)
    early = rounds_of(monkeypatch, algorithm, on_gpu=True)
    assert_equal(early, rounds_of(monkeypatch, algorithm, on_gpu=False))


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e200, 1e30, 1e5])
@pytest.mark.parametrize("recipe", [fedavg, cs.fedgen])
def test_a_reply_that_is_not_usable_is_refused_all_the_same(
    monkeypatch: pytest.MonkeyPatch, recipe: Any, factor: float
) -> None:
    algorithm = replace(recipe(lr=0.1), channel=Spoiling(factor=factor))
    early = rounds_of(monkeypatch, algorithm, on_gpu=True)
    assert_equal(early, rounds_of(monkeypatch, algorithm, on_gpu=False))
    assert [len(one.cohort.refusals) for one in early] == [0, 1, 0]


@pytest.mark.parametrize(
    "limits", [Limits(min_valid=6), Limits(max_norm=0.01), Limits(max_growth=2.0), Limits(max_ratio=None)]
)
def test_limits_hold(monkeypatch: pytest.MonkeyPatch, limits: Limits) -> None:
    algorithm = replace(fedavg(lr=0.1), channel=Spoiling(factor=50.0))
    early = rounds_of(monkeypatch, algorithm, on_gpu=True, limits=limits, max_bad_rounds=9)
    assert_equal(early, rounds_of(monkeypatch, algorithm, on_gpu=False, limits=limits, max_bad_rounds=9))


@dataclass(frozen=True, kw_only=True)
class Exploding(Averaging):
    """The server that multiplies the average."""

    factor: float = 1.0

    def update(self, state: Any, cohort: Cohort) -> Any:
        after, notes = super().update(state, cohort)
        weights = notes["weights"] if self.factor else torch.zeros(len(cohort))
        model = tree.map_leaves(lambda leaf: (leaf * (self.factor or 1.0)).to(leaf.dtype), after["model"])
        return {**after, "model": model}, {**notes, "weights": weights}


@pytest.mark.parametrize(("factor", "why"), [(float("nan"), "NaN"), (1e300, "overflow"), (0.0, "all zero")])
def test_a_model_and_weights_that_are_not_usable_are_refused_all_the_same(
    monkeypatch: pytest.MonkeyPatch, factor: float, why: str
) -> None:
    algorithm = replace(fedavg(lr=0.1), server=Exploding(factor=factor))
    for on_gpu in (True, False):
        with pytest.raises(conclusion.Diverged, match=f"round 1: .*{why}"):
            rounds_of(monkeypatch, algorithm, on_gpu=on_gpu)


def test_the_host_waits_once_and_after_everything_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fetched, update, screen = conclusion._fetched, Averaging.update, conclusion.screen_replies
    monkeypatch.setattr(conclusion, "_fetched", lambda *given: done.append("wait") or fetched(*given))
    monkeypatch.setattr(Averaging, "update", lambda *given: done.append("update") or update(*given))
    monkeypatch.setattr(conclusion, "screen_replies", lambda *given: done.append("screen") or screen(*given))
    monkeypatch.setattr(Prefetcher, "prepare", lambda *_: done.append("prepare"))
    for recipe in (fedavg, cs.fedgen):  # fedgen reads single replies, on the device
        done.clear()
        rounds_of(monkeypatch, recipe(lr=0.1), on_gpu=True)
        assert done == ["update", "prepare", "wait", "update", "prepare", "wait", "update", "wait"]
    done.clear()
    rounds_of(monkeypatch, cs.simprox(lr=0.1), on_gpu=True)
    alone = ["screen", "update"]  # this rule reads single replies on the host, so they are tested first
    assert done == ["prepare", *alone, "prepare", *alone, *alone]
