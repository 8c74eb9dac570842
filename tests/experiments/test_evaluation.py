"""Scores are those of scikit-learn and of counting by hand, for the federation and for every client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sklearn import metrics
from torch import nn

from consilience.core.exchange import Broadcast
from consilience.core.federation import Federation, Rows
from consilience.core.metrics import MetricRow
from consilience.engines.vectorised.engine import Vectorised
from consilience.experiments import evaluation
from consilience.experiments.evaluation import client_means, evaluate
from consilience.task.kinds import classification
from consilience.task.measures import macro
from consilience.task.scores import ClientScores
from consilience.task.task import Task


class Echo(nn.Module):
    """Scores are the inputs, shifted by one trainable number that is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def rows_of(x: torch.Tensor, y: torch.Tensor, sizes: list[int]) -> Rows:
    counts = torch.tensor(sizes)
    return Rows(x=x, y=y, starts=torch.cumsum(counts, 0) - counts, sizes=counts)


labels = st.integers(1, 40).flatmap(
    lambda n: st.tuples(
        arrays.arrays(np.int64, n, elements=st.integers(0, 5)), arrays.arrays(np.int64, n, elements=st.integers(0, 5))
    )
)


@given(labels)
def test_macro_scores_equal_scikit_learn(pair: tuple[np.ndarray, np.ndarray]) -> None:
    target, decided = pair
    scores = nn.functional.one_hot(torch.from_numpy(decided), 6).float()
    task = Task(Echo(), classification(classes=6))
    found = evaluate(task, task.start(), rows_of(scores, torch.from_numpy(target), [len(target)]))
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
        target, decided, average="macro", zero_division=0
    )
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(target, decided), abs=1e-12)
    assert (found["precision"], found["recall"], found["f1"]) == pytest.approx((precision, recall, f1), abs=1e-12)


def test_by_hand() -> None:
    # hits of classes 0, 1, 2: 2, 0, 1; predicted 3, 1, 1; occurring 2, 2, 1
    counts = torch.tensor([[2, 0, 1], [3, 1, 1], [2, 2, 1]])
    precision, recall, f1 = (macro(which, {"counts": counts}) for which in range(3))
    assert precision == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert recall == pytest.approx((1 + 0 + 1) / 3)
    assert f1 == pytest.approx((4 / 5 + 0 + 1) / 3)


def test_classes_that_neither_occur_nor_are_predicted_do_not_count() -> None:
    counts = torch.tensor([[2, 0], [2, 0], [2, 0]])
    assert [macro(which, {"counts": counts}) for which in range(3)] == [1.0, 1.0, 1.0]


def test_loss_and_client_accuracies_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(evaluation._BYTES_AT_ONCE, "cpu", 1)  # many batches
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(50, 4, generator=generator), torch.randint(0, 4, (50,), generator=generator)
    rows = rows_of(x, y, [20, 0, 7, 13])  # the last ten rows belong to nobody
    task = Task(Echo())
    found = evaluate(task, task.start(), rows)
    hit = (x.argmax(1) == y).double()
    losses = nn.functional.cross_entropy(x.double(), y, reduction="none")
    assert found.rows == 50 and found.client_rows.tolist() == [20, 0, 7, 13]
    assert found["loss"] == pytest.approx(float(losses.mean()), rel=1e-6)
    assert found["accuracy"] == pytest.approx(float(hit.mean()), abs=1e-12)
    expected = [hit[:20].mean(), float("nan"), hit[20:27].mean(), hit[27:40].mean()]
    np.testing.assert_allclose(found.clients.values, expected, rtol=1e-12)
    np.testing.assert_allclose(
        found.clients.loss[[0, 2, 3]], [losses[:20].mean(), losses[20:27].mean(), losses[27:40].mean()], rtol=1e-6
    )


def test_batches_do_not_change_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(300, 5, generator=generator), torch.randint(0, 5, (300,), generator=generator)
    task, rows = Task(Echo(), classification(classes=5)), rows_of(x, y, [100, 200])
    whole = evaluate(task, task.start(), rows)
    monkeypatch.setitem(evaluation._BYTES_AT_ONCE, "cpu", 1)
    pieces = evaluate(task, task.start(), rows)
    assert len(list(evaluation.batches(rows))) > 10
    assert whole["f1"] == pieces["f1"] is not None and whole["loss"] == pytest.approx(pieces["loss"], rel=1e-7)


def test_it_agrees_with_federated_evaluation() -> None:
    """The pass over all rows gives what an exchange in which clients test the model themselves gives."""
    from consilience.core.algorithm import Plain
    from consilience.core.evaluate import Evaluate

    generator = torch.Generator().manual_seed(2)
    tests = [
        (torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in (9, 1, 30)
    ]
    federation = Federation.from_clients(tests, client_tests=tests)
    task = Task(nn.Linear(6, 3))
    engine = Vectorised(task, federation, lane="serial", device="cpu", dtype="float64")
    model = engine.start()
    ids = np.arange(3)
    reply = engine.exchange(Evaluate(), Plain(), Broadcast(shared={"model": model}), ids, round=0, seed=0).reply
    found = evaluate(engine.task, model, engine.store("test"))
    np.testing.assert_allclose(
        found.clients.values, (reply["accuracy"]["total"] / reply["accuracy"]["count"]).numpy(), rtol=1e-12
    )
    np.testing.assert_allclose(
        found.clients.loss, (reply["loss"]["total"] / reply["loss"]["count"]).numpy(), rtol=1e-10
    )


def test_a_regression_has_loss_and_mean_error_overall_and_of_every_client() -> None:
    x, y = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 0.0, 3.0])
    task = Task(Echo(), "regression")
    found = evaluate(task, task.start(), rows_of(x, y, [1, 2]))
    assert found["loss"] == pytest.approx(5 / 3) and found["absolute_error"] == pytest.approx(1.0)
    assert set(found.values) == {"loss", "absolute_error", "rmse", "r2"} and found.clients.main.key == "absolute_error"
    np.testing.assert_allclose(found.clients.loss, [0.0, 2.5])
    np.testing.assert_allclose(found.clients.values, [0.0, 1.5])


def test_one_logit_for_two_classes() -> None:
    x, y = torch.tensor([[2.0], [-1.0], [0.5], [-3.0]]), torch.tensor([1, 1, 0, 0])
    task = Task(Echo(), "binary")
    found = evaluate(task, task.start(), rows_of(x, y, [4]))
    expected = metrics.precision_recall_fscore_support([1, 1, 0, 0], [1, 0, 1, 0], average="macro", zero_division=0)
    assert found["accuracy"] == 0.5 and (found["precision"], found["recall"], found["f1"]) == pytest.approx(
        expected[:3]
    )


def test_a_class_for_every_place_of_a_sequence() -> None:
    x = torch.zeros(2, 3, 4)  # [rows, classes, places]
    x[:, 1] = 1.0
    y = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 2]])
    task = Task(Echo())
    found = evaluate(task, task.start(), rows_of(x, y, [1, 1]))
    assert found["accuracy"] == pytest.approx(5 / 8)
    np.testing.assert_allclose(found.clients.values, [1.0, 0.25])


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(0, 5), st.integers(0, 2**31))
def test_client_means_are_means_over_own_rows(sizes: list[int], rest: int, seed: int) -> None:
    values = np.random.default_rng(seed).random(sum(sizes) + rest)
    found = client_means(values, None, rows_of(torch.empty(0), torch.empty(0), sizes))
    starts = np.cumsum([0, *sizes])
    for k, size in enumerate(sizes):
        own = values[starts[k] : starts[k] + size]
        assert np.isnan(found[k]) if size == 0 else found[k] == pytest.approx(own.mean(), rel=1e-12)


def spread(values: np.ndarray, better: Any) -> dict[str, float | None]:
    main = MetricRow(key="value", title="value", better=better)
    return ClientScores(main=main, loss=values, values=values).spread()


@pytest.mark.parametrize(("clients", "worst"), [(1, 1), (9, 1), (10, 1), (19, 1), (20, 2), (100, 10)])
def test_worst_tenth_is_the_mean_of_the_worst_tenth(clients: int, worst: int) -> None:
    accuracies = np.random.default_rng(0).permutation(np.arange(clients) / clients)
    found = spread(np.concatenate([accuracies, [np.nan]]), "higher")
    assert found["worst_tenth"] == pytest.approx(np.sort(accuracies)[:worst].mean())
    errors = spread(np.concatenate([accuracies, [np.nan]]), "lower")
    assert errors["worst_tenth"] == pytest.approx(np.sort(accuracies)[-worst:].mean())
    assert found["mean"] == pytest.approx(accuracies.mean()) and found["spread"] == pytest.approx(accuracies.std())


def test_nobody_has_test_rows() -> None:
    assert spread(np.array([np.nan, np.nan]), "higher") == {
        "mean": None,
        "median": None,
        "worst_tenth": None,
        "spread": None,
    }
