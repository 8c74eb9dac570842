"""Batches that are drawn a round before they are needed: the same results, whoever is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tiny

from consilience.algorithms.fedavg import fedavg
from consilience.core import plans
from consilience.core.exchange import Pool
from consilience.core.rounds import Round, run
from consilience.engines.vectorised.engine import Vectorised
from consilience.environments.environment import Environment
from consilience.selection import ByLoss, Everyone, Uniform

pytestmark = pytest.mark.usefixtures("untraced")


@dataclass(frozen=True)
class Worst:
    """The three clients with the largest loss as last reported; those that have reported none come first."""

    def choose(self, round: int, pool: Pool, seed: int) -> np.ndarray:
        return np.sort(np.argsort(-np.nan_to_num(pool.losses, nan=np.inf), kind="stable")[:3])


def rounds_of(selection: Any, environment: Environment | None = None, rounds: int = 4) -> list[Round]:
    engine = tiny.engine(data=tiny.federation((5, 9, 3, 7, 4, 6)), environment=environment, clients_at_once=2)
    return list(run(fedavg(lr=0.1, batch_size=2, selection=selection), engine, rounds=rounds, seed=3))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[int, ...]]]:
    """(round, clients) of every plan that is drawn, by an engine that prepares rounds as one with a GPU does."""
    found: list[tuple[int, tuple[int, ...]]] = []
    draw = plans.draw

    def noted(work: Any, store: Any, ids: np.ndarray, steps: np.ndarray, **options: Any) -> Any:
        found.append((options["round"], tuple(ids.tolist())))
        return draw(work, store, ids, steps, **options)

    monkeypatch.setattr(plans, "draw", noted)
    monkeypatch.setattr(Vectorised, "prepares_ahead", property(lambda self: True))
    return found


@pytest.mark.parametrize("selection", [Everyone(), Uniform(count=4), ByLoss(count=3), Worst()])
def test_results_are_those_of_a_run_that_prepares_nothing(
    monkeypatch: pytest.MonkeyPatch, drawn: list[Any], selection: Any
) -> None:
    prepared = rounds_of(selection)
    monkeypatch.setattr(Vectorised, "prepares_ahead", property(lambda self: False))
    plain = rounds_of(selection)
    for one, other in zip(prepared, plain):
        assert (one.chosen == other.chosen).all()
        assert tiny.same(one.model, other.model)


def test_every_plan_is_drawn_once_where_the_choice_does_not_depend_on_replies(drawn: list[Any]) -> None:
    rounds_of(Uniform(count=4))
    assert len(drawn) == len(set(drawn)) == 4 * 2  # two groups a round


def test_a_choice_by_replies_is_guessed_until_it_is_wrong(drawn: list[Any]) -> None:
    done = rounds_of(Worst(), rounds=8)
    assert len({tuple(one.chosen) for one in done}) > 1
    assert len(drawn) == (8 + 1) * 2  # two groups a round, and those of the one wrong guess


def test_the_last_round_prepares_no_other(drawn: list[Any]) -> None:
    rounds_of(Everyone(), rounds=2)
    assert {number for number, _ in drawn} == {0, 1}
