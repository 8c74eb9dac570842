"""One client sends other values than training gave it: whatever the algorithm, the run goes on and stays bounded.

`python -m pytest tests/faults/test_hostile_values.py -m slow` tries every recipe with every value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from declared import build, model_of
from strangers import Strangers, Tamper
from torch import Tensor

from consilience import algorithms
from consilience.core.rounds import Round, run
from consilience.core.screening import Limits
from consilience.flower.deploy.settings import DEPLOYED
from consilience.selection.by_loss import ByLoss, PowerOfChoice
from consilience.wire.admission import Arrival
from consilience.wire.arrays import from_bytes, to_bytes

pytestmark = pytest.mark.usefixtures("untraced")

ATTACKER, ROUNDS = 3, 4
LIMITS = Limits(**DEPLOYED)  # type: ignore[arg-type]
VALUES = {
    "huge": lambda leaf: torch.full_like(leaf, 1e10),
    "as large as allowed": lambda leaf: torch.full_like(leaf, 1e150),
    "negative": lambda leaf: torch.full_like(leaf, -1.0),
    "far below zero": lambda leaf: torch.full_like(leaf, -1e3),
    "zeros": torch.zeros_like,
    "nearly nothing": lambda leaf: torch.full_like(leaf, 1e-300),
}
NUMBERS = {"no such number": 10**15, "below zero": -7}


def sends(value: Callable[[Tensor], Tensor], *, model: bool, number: int | None = None) -> Tamper:
    """The attacker's floating values, of its model or of all else, and with `number` its whole numbers, replaced."""

    def changed(path: str, leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf if number is None or leaf.dtype == torch.bool else torch.full_like(leaf, number)
        return value(leaf) if path.startswith("model/") == model else leaf

    def change(one: Arrival) -> Arrival:
        leaves = {path: from_bytes(it.data, it.shape, it.dtype) for path, it in (one.packed or {}).items()}
        sent = {path: to_bytes(changed(path, leaf)) for path, leaf in leaves.items()}
        return replace(one, packed=sent, digest=None)

    return lambda arrivals, now: [change(one) if one.client == ATTACKER else one for one in arrivals]


def attacked(name: str, kind: str, tamper: Tamper) -> list[Round]:
    engine = Strangers(tamper, LIMITS, model=model_of(name, kind))
    return list(run(build(name), engine, rounds=ROUNDS, seed=5, limits=LIMITS))


@functools.cache
def honest(name: str, kind: str) -> list[Round]:
    return attacked(name, kind, lambda arrivals, now: arrivals)


def length(one: Round) -> float:
    return float(torch.cat([leaf.flatten() for leaf in one.model["params"].values()]).norm())


def check(name: str, kind: str, tamper: Tamper) -> None:
    for one, other in zip(attacked(name, kind, tamper), honest(name, kind), strict=True):
        assert tiny.finite(one.model) and length(one) < 10 * length(other) + 10
        assert set(other.cohort.ids.tolist()) - {ATTACKER} <= set(one.cohort.ids.tolist())
        assert {refusal.client for refusal in one.cohort.refusals} <= {ATTACKER}


@pytest.mark.parametrize("name", ["fedavg", "fedamp", "clustered_averaging", "hierarchical", "simfedswap", "ifca"])
def test_a_model_far_away_is_refused_by_every_server_that_sends_several(name: str) -> None:
    check(name, "mlp", sends(VALUES["huge"], model=True))


@pytest.mark.parametrize("name", ["scaffold", "feddc", "qffl", "fedaf"])
def test_what_is_sent_beside_a_model_is_bounded(name: str) -> None:
    check(name, "mlp", sends(VALUES["huge"], model=False))
    found = attacked(name, "mlp", sends(VALUES["huge"], model=False))
    assert all(one.cohort.counts["clipped_updates"] >= 1 for one in found)


def test_one_client_does_not_take_all_weight_by_its_loss() -> None:
    found = attacked("qffl", "mlp", sends(VALUES["huge"], model=False))
    assert max(float(one.notes["weights"].max()) for one in found) < 5 / 9 + 0.05  # 5 of 5 + 1 + 1 + 1 + 1


@pytest.mark.parametrize("name", ["fedavg", "feddf", "fedadp"])
def test_a_negative_variance_is_refused(name: str) -> None:
    check(name, "convnet", sends(VALUES["negative"], model=True))
    (first, *_) = attacked(name, "convnet", sends(VALUES["negative"], model=True))
    assert [(one.client, one.reason) for one in first.cohort.refusals] == [(ATTACKER, "implausible")]


@pytest.mark.parametrize("number", list(NUMBERS.values()), ids=list(NUMBERS))
def test_a_cluster_that_does_not_exist_ends_no_run(number: int) -> None:
    check("ifca", "mlp", sends(lambda leaf: leaf, model=False, number=number))
    for one in attacked("ifca", "mlp", sends(lambda leaf: leaf, model=False, number=number)):
        assert np.isin(one.notes["cluster"].numpy(), (0, 1)).all()


QUERIES = {"a negative loss": {"loss": -5.0}, "no rows": {"rows": 0.0}, "fewer than none": {"rows": -3.0}}


@pytest.mark.parametrize("lie", list(QUERIES))
@pytest.mark.parametrize(
    "selection",
    [
        ByLoss(count=3),
        ByLoss(count=3, proportional_to="total"),
        ByLoss(count=3, proportional_to="softmax"),
        ByLoss(count=3, fresh_losses=False),
        PowerOfChoice(count=3),
    ],
    ids=["loss", "total", "softmax", "reported", "power of choice"],
)
def test_a_loss_that_cannot_be_ends_no_selection(selection: Any, lie: str) -> None:
    def tamper(arrivals: list[Arrival], now: int) -> list[Arrival]:
        def change(one: Arrival) -> Arrival:
            sent = {key: to_bytes(torch.tensor(value, dtype=torch.float64)) for key, value in QUERIES[lie].items()}
            packed = one.packed or {}
            return replace(one, packed={**packed, **{k: v for k, v in sent.items() if k in packed}}, digest=None)

        return [change(one) if one.client == ATTACKER else one for one in arrivals]

    algorithm = build("fedavg", selection=selection)
    rounds = list(run(algorithm, Strangers(tamper, LIMITS), rounds=ROUNDS, seed=5, limits=LIMITS))
    assert all(tiny.finite(one.model) and len(one.cohort) == 3 for one in rounds)


@pytest.mark.slow
@pytest.mark.parametrize("value", list(VALUES))
@pytest.mark.parametrize("name", [name for name in algorithms.names() if name not in ("centralised", "dp_fedavg")])
def test_every_recipe_with_every_value(name: str, value: str) -> None:
    for kind in tiny.MODELS:
        check(name, kind, sends(VALUES[value], model=True))
        for number in (None, *NUMBERS.values()) if value == "huge" else (None,):
            check(name, kind, sends(VALUES[value], model=False, number=number))
