"""The built-in metrics against scikit-learn: over clients' batches, with padding, ignored entries and empty clients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference
from test_metrics import in_pieces, metrics_of, some_sizes
from torch import Tensor, nn

from consilience.core.kind import Kind
from consilience.core.metrics import Metrics
from consilience.task import probabilities
from consilience.task.kinds import BINARY, classification, dense, multi_label, next_token, regression, tokens
from consilience.task.losses import IGNORED

few = settings(max_examples=25)


def values(kind: Kind, output: Tensor, target: Tensor) -> dict[str, Any]:
    metrics = metrics_of(kind)
    return metrics.values(metrics.sums(output, target, torch.ones(len(target))))


@few
@given(some_sizes, st.integers(1, 5), st.integers(2, 7), st.integers(0, 2**31))
def test_top_k_and_calibration(sizes: list[int], width: int, classes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = sum(sizes)
    output = torch.from_numpy(rng.normal(0, 2, (rows, classes)).round(1)).float()  # with some equal logits
    target = torch.from_numpy(rng.integers(0, classes, rows))
    kind = classification(classes=classes, metrics=("top_2",))
    found = in_pieces(metrics_of(kind), output, target, sizes, width)
    if classes > 2:
        wanted = reference.top_k_accuracy_score(target, output.double(), k=2, labels=range(classes))
        assert found["top_2"] == pytest.approx(wanted, abs=1e-6)
    assert found["calibration_error"] == pytest.approx(calibration(output.double().softmax(1), target), abs=1e-6)


def calibration(chance: Tensor, target: Tensor) -> float:
    """The definition: sum over 15 bins (lower, upper] of |accuracy - confidence| x share."""
    confidence, decided = chance.max(1)
    total = 0.0
    for lower in range(15):
        inside = (confidence > lower / 15) & (confidence <= (lower + 1) / 15)
        if inside.any():
            gap = (decided[inside] == target[inside]).double().mean() - confidence[inside].mean()
            total += float(gap.abs() * inside.double().mean())
    return total


def test_calibration_of_yes_and_no() -> None:
    output, target = torch.tensor([[2.0], [-1.0], [0.2], [-3.0]]), torch.tensor([[1], [1], [0], [0]])
    chance = torch.stack([1 - output.sigmoid(), output.sigmoid()], 1).squeeze(-1)
    assert values(BINARY, output, target)["calibration_error"] == pytest.approx(calibration(chance, target[:, 0]))


@few
@given(some_sizes, st.integers(1, 5), st.integers(0, 2**31))
def test_auroc_and_average_precision_of_two_classes(sizes: list[int], width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = sum(sizes)
    target = torch.from_numpy(rng.integers(0, 2, rows))
    score = rng.normal(0, 3, rows) + 2 * target.numpy()
    for kind, output in (
        (BINARY, torch.from_numpy(score).unsqueeze(1)),
        (classification(classes=2), torch.from_numpy(np.stack([np.zeros(rows), score], 1))),
    ):
        found = in_pieces(metrics_of(kind), output, target, sizes, width)
        if len(target.unique()) < 2:
            assert found["auroc"] is None
            continue
        truth = reference.roc_auc_score(target, score), reference.average_precision_score(target, score)
        assert abs(found["auroc"] - truth[0]) <= found["auroc_error"] + 1e-9
        assert abs(found["average_precision"] - truth[1]) <= found["average_precision_error"] + 1e-9


def test_bins_are_exact_for_binned_scores_and_their_error_is_small_for_many_rows() -> None:
    """Within a bin scores count as equal, so scikit-learn finds the same for scores that are equal there."""
    rng = np.random.default_rng(0)
    target = rng.integers(0, 2, 4000)
    score = rng.normal(0, 4, 4000) + 2 * target
    found = values(BINARY, torch.from_numpy(score).unsqueeze(1), torch.from_numpy(target))
    binned = np.clip(
        ((score / (1 + np.abs(score)) + 1) * (probabilities.BINS / 2)).astype(int), 0, probabilities.BINS - 1
    )
    assert found["auroc"] == pytest.approx(reference.roc_auc_score(target, binned), abs=1e-12)
    assert found["average_precision"] == pytest.approx(reference.average_precision_score(target, binned), abs=1e-12)
    assert found["auroc_error"] < 0.002 and found["average_precision_error"] < 0.01
    overconfident = values(BINARY, torch.from_numpy(20 * score).unsqueeze(1), torch.from_numpy(target))
    assert abs(overconfident["auroc"] - reference.roc_auc_score(target, score)) <= overconfident["auroc_error"] < 0.02


@pytest.mark.parametrize("classes", [3, 6])
def test_auroc_of_several_classes_is_the_mean_of_each_against_the_others(classes: int) -> None:
    rng = np.random.default_rng(classes)
    target = rng.integers(0, classes, 300)
    output = torch.from_numpy(rng.normal(0, 1, (300, classes)) + 1.5 * np.eye(classes)[target])
    found = values(classification(classes=classes, metrics=("auroc",)), output, torch.from_numpy(target))
    chance = output.softmax(1).numpy()
    truth = reference.roc_auc_score(target, chance, multi_class="ovr", average="macro")
    assert abs(found["auroc"] - truth) <= found["auroc_error"] < 0.01
    wanted = reference.average_precision_score(np.eye(classes)[target], chance, average="macro")
    assert abs(found["average_precision"] - wanted) <= found["average_precision_error"] < 0.03


@pytest.mark.parametrize("ties", [1.0, 0.5, 0.01])
@pytest.mark.parametrize("bins", [4, 10])
def test_no_order_within_bins_is_further_away_than_the_stated_error(
    bins: int, ties: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few bins, and scores that are often equal: scikit-learn's value of the true scores is within the error."""
    monkeypatch.setattr(probabilities, "BINS", bins)
    rng = np.random.default_rng(1)
    for _ in range(40):
        target = np.append(rng.integers(0, 2, rng.integers(2, 30)), [0, 1])
        score = np.round(rng.normal(0, 2, len(target)) / ties) * ties
        found = values(BINARY, torch.from_numpy(score).unsqueeze(1), torch.from_numpy(target))
        off = abs(found["auroc"] - reference.roc_auc_score(target, score))
        assert off <= found["auroc_error"] + 1e-12
        off = abs(found["average_precision"] - reference.average_precision_score(target, score))
        assert off <= found["average_precision_error"] + 1e-12


@few
@given(some_sizes, st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 2**31))
def test_multi_label(sizes: list[int], width: int, labels: int, gaps: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    target = rng.integers(0, 2, (sum(sizes), labels))
    output = torch.from_numpy(rng.normal(0, 1, target.shape)).float()
    if gaps:
        target[rng.random(target.shape) < 0.3] = IGNORED
    found = in_pieces(metrics_of(multi_label(labels=labels)), output, torch.from_numpy(target), sizes, width)
    decided, known = (output > 0).numpy(), target != IGNORED
    if not known.any():
        assert found["accuracy"] is None
        return
    assert found["accuracy"] == pytest.approx((decided == target)[known].mean(), abs=1e-6)
    right = ((decided == target) | ~known).all(1)[known.any(1)]
    assert found["exact_match"] == pytest.approx(right.mean(), abs=1e-12)
    each = [(target[known[:, k], k], decided[known[:, k], k], output[known[:, k], k]) for k in range(labels)]
    scores = [
        reference.precision_recall_fscore_support(actual, chosen, average="binary", zero_division=0)[:3]
        for actual, chosen, _ in each
        if actual.any() or chosen.any()
    ]
    if scores:
        assert [found[key] for key in ("precision", "recall", "f1")] == pytest.approx(np.mean(scores, 0), abs=1e-9)
        micro = reference.f1_score(target[known], decided[known], zero_division=0)
        assert found["micro_f1"] == pytest.approx(micro, abs=1e-9)
    if all(len(np.unique(actual)) == 2 for actual, _, _ in each):
        truth = [reference.roc_auc_score(actual, score) for actual, _, score in each]
        assert abs(found["auroc"] - np.mean(truth)) <= found["auroc_error"] + 1e-9


@few
@given(some_sizes, st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**31))
def test_regression_of_several_outputs(sizes: list[int], width: int, outputs: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    wanted = 5 + rng.normal(0, [1, 10, 0.1][:outputs], (sum(sizes), outputs))
    given_ = wanted + rng.normal(0, 0.5, wanted.shape)
    found = in_pieces(metrics_of(regression(outputs)), *map(torch.from_numpy, (given_, wanted)), sizes, width)
    assert found["absolute_error"] == pytest.approx(reference.mean_absolute_error(wanted, given_), rel=1e-6)
    assert found["rmse"] == pytest.approx(reference.root_mean_squared_error(wanted, given_), rel=1e-9)
    if sum(sizes) > 1:
        assert found["r2"] == pytest.approx(reference.r2_score(wanted, given_), rel=1e-6)
    else:
        assert found["r2"] is None


def test_r2_of_constant_targets_is_no_number() -> None:
    found = values(regression(1), torch.randn(5, 1), torch.full((5,), 1e6))
    assert found["r2"] is None and found["rmse"] is not None


@few
@given(some_sizes, st.integers(1, 5), st.booleans(), st.integers(0, 2**31))
def test_tokens(sizes: list[int], width: int, shifted: bool, seed: int) -> None:
    """Labels of tokens, and next tokens: the same as scikit-learn finds for all tokens that count, in one list."""
    rng, classes, length = np.random.default_rng(seed), 5, 4
    output = torch.from_numpy(rng.normal(0, 2, (sum(sizes), length, classes))).float()
    target = torch.from_numpy(rng.integers(0, classes, (sum(sizes), length)))
    target[torch.from_numpy(rng.random(target.shape) < 0.4)] = IGNORED
    made = next_token if shifted else tokens
    found = in_pieces(metrics_of(made(classes=classes, metrics=("top_2",))), output, target, sizes, width)
    scores, labels = (output[:, :-1], target[:, 1:]) if shifted else (output, target)
    counts = labels != IGNORED
    if not counts.any():
        assert found["perplexity"] is None and found["accuracy"] is None
        return
    scores, labels = scores[counts].double(), labels[counts]
    surprise = nn.functional.cross_entropy(scores, labels).item()
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(labels, scores.argmax(1)), abs=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(surprise), rel=1e-4)
    assert found["bits_per_token"] == pytest.approx(surprise / math.log(2), rel=1e-4)
    top = reference.top_k_accuracy_score(labels, scores, k=2, labels=range(classes))
    assert found["top_2"] == pytest.approx(top, abs=1e-6)
    assert found["calibration_error"] == pytest.approx(calibration(scores.softmax(1), labels), abs=1e-5)
    if not shifted:
        f1 = reference.f1_score(labels, scores.argmax(1), average="macro", zero_division=0)
        assert found["f1"] == pytest.approx(f1, abs=1e-9)


@few
@given(some_sizes, st.integers(1, 5), st.integers(0, 2**31))
def test_dense(sizes: list[int], width: int, seed: int) -> None:
    rng, classes = np.random.default_rng(seed), 4
    output = torch.from_numpy(rng.normal(0, 1, (sum(sizes), classes, 3, 5))).float()
    target = torch.from_numpy(rng.integers(0, 3, (sum(sizes), 3, 5)))  # class 3 never occurs
    target[torch.from_numpy(rng.random(target.shape) < 0.2)] = IGNORED
    kind = dense(classes=classes, metrics=("per_class",))
    found = in_pieces(metrics_of(kind), output, target, sizes, width)
    counts = target != IGNORED
    actual, decided = target[counts].numpy(), output.argmax(1)[counts].numpy()
    assert found["iou"] == pytest.approx(reference.jaccard_score(actual, decided, average="macro", zero_division=0))
    assert found["dice"] == pytest.approx(reference.f1_score(actual, decided, average="macro", zero_division=0))
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(actual, decided), abs=1e-6)
    each = reference.recall_score(actual, decided, labels=range(classes), average=None, zero_division=0)
    for number in range(classes):
        seen = (actual == number).any() or (decided == number).any()
        assert found[f"recall_{number}"] == (pytest.approx(each[number]) if seen else None)


def test_outputs_that_are_not_numbers_have_no_value() -> None:
    output, target = torch.randn(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    output[2, 1] = torch.nan
    found = values(classification(classes=2, metrics=("top_1",)), output, target)
    assert [found[key] for key in ("loss", "auroc", "auroc_error", "average_precision", "calibration_error")] == [
        None
    ] * 5
    found = values(regression(2), output, torch.randn(6, 2))
    assert found["rmse"] is None and found["r2"] is None
    output, target = torch.randn(2, 3, 4), torch.tensor([[0, 1, IGNORED], [2, IGNORED, IGNORED]])
    output[:, 2] = torch.nan  # what is said of padding is of no interest
    assert values(tokens(classes=4), output, target)["perplexity"] is not None


def test_sums_do_not_depend_on_how_rows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Central evaluation in pieces, and clients' values of a mean that is transformed."""
    from test_metrics import Echo

    from consilience.core.federation import Rows
    from consilience.experiments import evaluation
    from consilience.task.task import Task

    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, 3, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 3, (60, 4), generator=draw)
    y[:, 3] = IGNORED
    rows = Rows(x=x, y=y, starts=torch.tensor([0, 25, 25]), sizes=torch.tensor([25, 0, 35]))
    task = Task(Echo(), next_token(classes=3)).to(torch.device("cpu"), torch.float64)
    whole = evaluation.evaluate(task, task.start(), rows)
    monkeypatch.setitem(evaluation._BYTES_AT_ONCE, "cpu", 1)
    monkeypatch.setitem(evaluation._NUMBERS_AT_ONCE, "cpu", 1)
    pieces = evaluation.evaluate(task, task.start(), rows)
    assert pieces.values == pytest.approx(whole.values, rel=1e-12)
    for client, (start, end) in {0: (0, 25), 2: (25, 60)}.items():
        surprise = nn.functional.cross_entropy(x[start:end, :2].reshape(-1, 3), y[start:end, 1:3].reshape(-1))
        assert whole.clients.values[client] == pytest.approx(float(surprise.exp()), rel=1e-9)
    assert math.isnan(whole.clients.values[1])


def test_all_built_in_metrics_have_keys_of_their_own() -> None:
    for kind in (
        classification(classes=2, metrics=("iou", "per_class", "top_5")),
        dense(classes=3),
        multi_label(labels=2),
    ):
        assert isinstance(metrics_of(kind), Metrics)
