"""What clients say about tests on their own rows: what cannot be true is refused by name, and bounded otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from consilience.core import tree
from consilience.core.algorithm import Plain
from consilience.core.evaluate import Evaluate
from consilience.core.exchange import Broadcast, Cohort
from consilience.core.metrics import Metric, MetricRow
from consilience.engines.vectorised.engine import Vectorised
from consilience.experiments.client_tests import federated_test
from consilience.experiments.plausibility import plausible
from consilience.task.measures import impossible_counts
from consilience.task.scores import ClientScores
from consilience.task.task import Task

pytestmark = pytest.mark.usefixtures("untraced")
LIAR = 3


def engine() -> Vectorised:
    rows = tiny.federation().train
    federation = tiny.federation()
    return Vectorised(
        Task(tiny.MODELS["mlp"]()), replace(federation, test=rows), dtype="float64", lane="serial", device="cpu"
    )


class Lying:
    """An engine whose client 3 changes its sums, and which has no test rows of the server's own."""

    test_rows = None

    def __init__(self, change: Callable[[dict[str, Any]], None]) -> None:
        self._engine, self._change = engine(), change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def exchange(self, *given: Any, **options: Any) -> Cohort:
        said = self._engine.exchange(*given, **options)
        flat = {path: leaf.clone() for path, leaf in tree.flatten(said.reply).items()}
        place = int(np.flatnonzero(said.ids == LIAR)[0])
        mine = {path: leaf[place] for path, leaf in flat.items()}
        self._change(mine)
        for path, leaf in flat.items():
            leaf[place] = mine[path]
        return replace(said, reply=tree.unflatten(flat))


def sets(path: str, value: float) -> Callable[[dict[str, Any]], None]:
    def change(mine: dict[str, Any]) -> None:
        mine[path] = torch.full_like(mine[path], value)

    return change


LIES = {
    "a billion right decisions": ("accuracy/total", 1e9),
    "fewer than none": ("accuracy/total", -1.0),
    "more rows than it has": ("loss/count", 1e9),
    "no rows": ("loss/count", 0.0),
    "a mean over other rows": ("accuracy/count", 1e6),
    "a negative loss": ("loss/total", -3.0),
    "a loss that decides the mean alone": ("loss/total", 1e9),
    "a loss that is infinite": ("loss/total", float("inf")),
    "NaN": ("accuracy/total", float("nan")),
}


@pytest.mark.parametrize("lie", list(LIES))
def test_what_cannot_be_true_is_refused_by_name_and_the_rest_counts(lie: str) -> None:
    honest, lying = Lying(lambda mine: None), Lying(sets(*LIES[lie]))
    test = federated_test(lying)
    assert test is not None
    found = test(lying.start())
    others = federated_test(honest)(honest.start())  # type: ignore[misc,arg-type]
    assert found is not None and others is not None
    assert [(one.client, one.reason) for one in found.clients.refusals] == [(LIAR, "implausible")]
    assert found.rows == others.rows - int(others.client_rows[LIAR]) and 0 <= found.values["accuracy"] <= 1
    assert np.isnan(found.clients.values[LIAR]) and not others.clients.refusals


def test_counts_of_classes() -> None:
    right = torch.tensor([[2.0, 1.0], [3.0, 2.0], [2.0, 3.0]])
    assert impossible_counts({"counts": right}, 5) == ""
    for row, column, value in ((0, 0, 4.0), (1, 1, -1.0), (2, 0, 0.5), (0, 1, 9.0)):
        wrong = right.clone()
        wrong[row, column] = value
        assert impossible_counts({"counts": wrong}, 5)


def test_a_metric_declares_what_its_rows_may_have() -> None:
    temperature = Metric.mean(lambda output, target, mask: mask * 20.0, key="degrees", bounds=(-50.0, 60.0))
    task = Task(tiny.MODELS["mlp"](), metrics=[temperature])
    federation = tiny.federation()
    one = Vectorised(task, replace(federation, test=federation.train), dtype="float64", lane="serial", device="cpu")
    said = one.exchange(Evaluate(), Plain(), Broadcast(shared={"model": one.start()}), np.arange(5), round=0, seed=0)
    assert len(plausible(said, task, np.asarray(one.test_sizes))) == 5
    said.reply["degrees"]["total"][LIAR] = 61.0 * said.reply["degrees"]["count"][LIAR]
    kept = plausible(said, task, np.asarray(one.test_sizes))
    assert kept.ids.tolist() == [0, 1, 2, 4] and kept.refusals[0].key == "degrees"


def test_the_median_is_not_moved_by_a_lie_that_is_possible() -> None:
    row = MetricRow(key="accuracy", title="accuracy")
    reports = np.array([[0.5, 0.6, 0.7, 0.8, 0.2], [0.5, 0.6, 0.7, 0.8, 1.0]])
    honest, lying = (ClientScores(main=row, loss=values, values=values).spread() for values in reports)
    assert honest["median"] == 0.6 and lying["median"] == pytest.approx(0.7) and lying["mean"] > honest["mean"]


def sums_of_tokens(counts: list[float]) -> Any:
    """Five clients of ten rows that report as many tokens, and half of them as right."""
    count, five = torch.tensor(counts, dtype=torch.float64), torch.full((5,), 10.0, dtype=torch.float64)
    return {"loss": {"total": five, "count": five}, "accuracy": {"total": count / 2, "count": count}}


@pytest.mark.parametrize(("claimed", "refused"), [(300.0, []), (1100.0, [LIAR]), (1e12, [LIAR]), (-1.0, [LIAR])])
def test_tokens_that_nobody_else_has_do_not_count(claimed: float, refused: list[int]) -> None:
    counts = [90.0, 100.0, 110.0, 100.0, 80.0]
    counts[LIAR] = claimed
    said = Cohort(
        reply=sums_of_tokens(counts),
        ids=np.arange(5),
        examples=torch.ones(5, dtype=torch.float64),
        steps=np.ones(5, dtype=np.int64),
        round=0,
    )
    task = Task(tiny.MODELS["mlp"](), kind="tokens")
    kept = plausible(said, task, np.full(5, 10))
    assert [one.client for one in kept.refusals] == refused and set(kept.ids) == set(range(5)) - set(refused)


@pytest.mark.parametrize("sum_of", ["residual", "squares"])
def test_one_client_does_not_decide_a_regression_score(sum_of: str) -> None:
    task = Task(torch.nn.Linear(2, 1), kind="regression")
    ten = torch.full((5, 1), 10.0, dtype=torch.float64)
    mine = {name: ten.clone() for name in ("residual", "sum", "squares", "count")}
    mine[sum_of][LIAR] = 1e12
    said = Cohort(
        reply={"loss": {"total": ten[:, 0], "count": ten[:, 0]}, task.metrics.part_of["rmse"]: mine},
        ids=np.arange(5),
        examples=torch.ones(5, dtype=torch.float64),
        steps=np.ones(5, dtype=np.int64),
        round=0,
    )
    assert [(one.client, one.key) for one in plausible(said, task, np.full(5, 10)).refusals] == [
        (LIAR, f"rmse/{sum_of}")
    ]
