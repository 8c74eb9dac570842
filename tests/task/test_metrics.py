"""Sums of metrics against scikit-learn: over batches and clients, with padding, empty classes and masked entries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as reference
from torch import Tensor, nn

from consilience.core import tree
from consilience.core.federation import Federation, Rows
from consilience.core.kind import Kind
from consilience.core.metrics import Metric, Metrics, host
from consilience.core.settings import Invalid
from consilience.engines.vectorised.engine import Vectorised
from consilience.experiments.client_tests import federated_test
from consilience.experiments.evaluation import evaluate
from consilience.task.kinds import BINARY, REGRESSION, classification, kind_of_targets
from consilience.task.layouts import largest
from consilience.task.losses import cross_entropy, squared_error
from consilience.task.measures import hits
from consilience.task.task import Task


class Echo(nn.Module):
    """The output is the input, plus a number that is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def metrics_of(kind: Kind, *more: Metric) -> Metrics:
    return Task(Echo(), kind, metrics=more).metrics


def in_pieces(metrics: Metrics, output: Tensor, target: Tensor, sizes: list[int], width: int) -> dict[str, Any]:
    """The values from sums over clients' batches, all padded to one width and batched by vmap as engines do."""
    batches, start = [], 0
    for size in sizes:
        rows = torch.arange(start, start + size)
        for piece in rows.split(width) if size else [rows]:
            index = torch.cat([piece, torch.zeros(width - len(piece), dtype=torch.int64)])
            mask = (torch.arange(width) < len(piece)).to(torch.float32)
            batches.append((output[index], target[index], mask))
        start += size
    stacked = [torch.stack(part) for part in zip(*batches)]
    found = torch.vmap(metrics.sums)(*stacked)
    zero = metrics.zero(torch.device("cpu"))
    total = tree.map_leaves(lambda leaf, nothing: leaf.sum(0) + nothing, found, zero)
    return metrics.values(total)


some_sizes = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 0)


@given(some_sizes, st.integers(1, 5), st.integers(2, 6), st.integers(0, 2**31))
def test_classification(sizes: list[int], width: int, classes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    target, decided = rng.integers(0, rng.integers(1, classes + 1), (2, sum(sizes)))  # often some classes never occur
    output = nn.functional.one_hot(torch.from_numpy(decided), classes).float()
    found = in_pieces(metrics_of(classification(classes=classes)), output, torch.from_numpy(target), sizes, width)
    expected = reference.precision_recall_fscore_support(target, decided, average="macro", zero_division=0)[:3]
    assert [found[key] for key in ("precision", "recall", "f1")] == pytest.approx(expected, abs=1e-12)
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(target, decided), abs=1e-12)
    loss = reference.log_loss(target, torch.softmax(output, 1).numpy(), labels=range(classes))
    assert found["loss"] == pytest.approx(loss, rel=1e-5)


@given(some_sizes, st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**31))
def test_binary_labels(sizes: list[int], width: int, labels: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    output = torch.randn(sum(sizes), labels, generator=draw)
    target = torch.randint(0, 2, (sum(sizes), labels), generator=draw)
    found = in_pieces(metrics_of(BINARY), output, target, sizes, width)
    flat, decided = target.flatten().numpy(), (output > 0).long().flatten().numpy()
    expected = reference.precision_recall_fscore_support(flat, decided, average="macro", zero_division=0)[:3]
    assert [found[key] for key in ("precision", "recall", "f1")] == pytest.approx(expected, abs=1e-12)
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(flat, decided), abs=1e-6)


def r2_sums(output: Tensor, target: Tensor, mask: Tensor) -> tree.Tree:
    """What R squared is made of."""
    target, off = target.double(), (target - output.squeeze(1)).double()
    return {
        "rows": mask.double().sum(),
        "sum": (target * mask).sum(),
        "squares": (target.square() * mask).sum(),
        "residual": (off.square() * mask).sum(),
    }


def r2_value(sums: tree.Tree) -> Tensor:
    return 1 - sums["residual"] / (sums["squares"] - sums["sum"].square() / sums["rows"])


R2 = Metric(key="r2", title="R squared", sums=r2_sums, value=r2_value)


@given(some_sizes, st.integers(1, 5), st.integers(0, 2**31))
def test_regression(sizes: list[int], width: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    target = 3 + torch.randn(sum(sizes), generator=draw)
    output = target.unsqueeze(1) + torch.randn(sum(sizes), 1, generator=draw)
    found = in_pieces(metrics_of(REGRESSION, R2), output, target, sizes, width)
    wanted, given = target.double().numpy(), output[:, 0].double().numpy()
    assert found["absolute_error"] == pytest.approx(reference.mean_absolute_error(wanted, given), rel=1e-5)
    assert found["loss"] == pytest.approx(reference.mean_squared_error(wanted, given), rel=1e-5)
    if sum(sizes) > 1:
        assert found["r2"] == pytest.approx(reference.r2_score(wanted, given), rel=1e-4, abs=1e-4)
    else:
        assert found["r2"] is None  # there is no number to record


def test_what_is_no_class_counts_nowhere() -> None:
    """Decisions for classes that the data do not have: macro scores are those over the known classes."""
    target, decided = torch.tensor([0, 1, 1, 0]), torch.tensor([0, 3, 1, 2])
    metrics = metrics_of(classification(classes=2))
    found = metrics.values(metrics.sums(nn.functional.one_hot(decided, 4).float(), target, torch.ones(4)))
    labels = reference.precision_recall_fscore_support(target, decided, average="macro", labels=[0, 1], zero_division=0)
    assert [found[key] for key in ("precision", "recall", "f1")] == pytest.approx(labels[:3], abs=1e-12)


def test_over_no_rows_there_is_no_value() -> None:
    for kind in (classification(classes=3), BINARY, REGRESSION):
        metrics = metrics_of(kind)
        assert set(metrics.values(metrics.zero(torch.device("cpu"))).values()) == {None}


# --- several entries a row ------------------------------------------------------------------------------------------

IGNORED = -100


def token_losses(output: Tensor, target: Tensor) -> Tensor:
    """[B]: the mean over the tokens of a row that count."""
    losses = nn.functional.cross_entropy(output, target, reduction="none", ignore_index=IGNORED)
    return losses.sum(1) / (target != IGNORED).sum(1).clamp(min=1)


def tokens(classes: int) -> Kind:
    """A kind from outside: a class for every token [B, T] that is no padding; output [B, C, T]."""
    return Kind(
        name="tokens",
        losses=(token_losses,),
        metrics=(Metric.mean(lambda o, t, m: hits(largest, o, t, m), key="token_accuracy", unit="share"),),
        main="token_accuracy",
        entries=lambda target: target != IGNORED,
        example=lambda: (torch.zeros(1, classes, 1), torch.zeros(1, 1, dtype=torch.int64)),
    )


def token_rows(sizes: list[int], shape: tuple[int, ...] = (6,)) -> tuple[Rows, np.ndarray, np.ndarray]:
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(sum(sizes), 3, *shape, generator=draw)
    y = torch.randint(0, 3, (sum(sizes), *shape), generator=draw)
    y[torch.rand(y.shape, generator=draw) < 0.4] = IGNORED
    counts = torch.tensor(sizes)
    return Rows(x=x, y=y, starts=counts.cumsum(0) - counts, sizes=counts), x.argmax(1).numpy(), y.numpy()


@pytest.mark.parametrize("shape", [(6,), (3, 4)])  # tokens of a text, pixels of a picture
def test_entries_that_do_not_count_are_left_out(shape: tuple[int, ...]) -> None:
    sizes = [4, 0, 5]
    rows, decided, actual = token_rows(sizes, shape)
    kind = tokens(3)
    losses = lambda output, target: token_losses(output.flatten(2), target.flatten(1))  # noqa: E731
    task = Task(Echo(), kind, loss=losses)
    found = evaluate(task, task.start(), rows)
    live = actual != IGNORED
    assert found["token_accuracy"] == pytest.approx(reference.accuracy_score(actual[live], decided[live]), abs=1e-12)
    own = [slice(0, 4), slice(4, 9)]
    expected = [reference.accuracy_score(actual[s][live[s]], decided[s][live[s]]) for s in own]
    np.testing.assert_allclose(found.clients.values, [expected[0], np.nan, expected[1]], rtol=1e-12)
    pieces = in_pieces(task.metrics, rows.x, rows.y, sizes, 2)
    assert pieces["token_accuracy"] == pytest.approx(found["token_accuracy"], rel=1e-6)
    assert pieces["loss"] == pytest.approx(found["loss"], rel=1e-6)


# --- the same numbers wherever rows are ------------------------------------------------------------------------------


class Elsewhere:
    """A vectorised engine that pretends that its rows are elsewhere."""

    def __init__(self, engine: Vectorised) -> None:
        self.exchange, self.task, self.sizes = engine.exchange, engine.task, engine.sizes
        self.test_sizes, self.test_rows = engine.store("test").sizes.numpy(), None


@pytest.mark.parametrize("lane", ["serial", "batched"])
@pytest.mark.parametrize("kind", [REGRESSION, Kind(name="own", losses=(squared_error,), metrics=(R2,), main="r2")])
@pytest.mark.usefixtures("untraced")
def test_clients_and_server_find_the_same(kind: Kind, lane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from consilience.experiments import evaluation

    monkeypatch.setitem(evaluation._BYTES_AT_ONCE, "cpu", 1)  # batches of 16 rows, across clients
    draw = torch.Generator().manual_seed(2)
    tests = [(torch.randn(n, 1, generator=draw), torch.randn(n, generator=draw)) for n in (40, 3, 0, 25)]
    trains = [(torch.randn(4, 1, generator=draw), torch.randn(4, generator=draw)) for _ in tests]
    federation = Federation.from_clients(trains, client_tests=tests)
    task = Task(Echo(), kind, metrics=(R2,) if kind is REGRESSION else ())
    engine = Vectorised(task, federation, device="cpu", dtype="float64", lane=lane, clients_at_once=8)
    there = federated_test(Elsewhere(engine))
    assert there is not None and federated_test(engine) is None
    one, other = there(engine.start()), evaluate(engine.task, engine.start(), engine.store("test"))
    assert one is not None and one.rows == other.rows == 68 and one.metrics == other.metrics
    assert one.values == pytest.approx(other.values, rel=1e-9)
    assert one.client_rows.tolist() == other.client_rows.tolist() == [40, 3, 0, 25]
    np.testing.assert_allclose(one.clients.values, other.clients.values, rtol=1e-9)
    np.testing.assert_allclose(one.clients.loss, other.clients.loss, rtol=1e-9)
    whole = [torch.cat(part).double().numpy() for part in zip(*tests)]
    assert other["r2"] == pytest.approx(reference.r2_score(whole[1], whole[0][:, 0]), rel=1e-9)
    if kind.main == "r2":
        own = [reference.r2_score(y.double(), x[:, 0].double()) for x, y in (tests[0], tests[1], tests[3])]
        np.testing.assert_allclose(other.clients.values, [own[0], own[1], math.nan, own[2]], rtol=1e-9)


# --- what is refused --------------------------------------------------------------------------------------------------


def mean(key: str, **more: Any) -> Metric:
    return Metric.mean(lambda o, t, m: m, key=key, **more)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mean("Not a name"), "Metric.key = 'Not a name' must be a name of small letters"),
        (lambda: mean("good", better="up"), "better = 'up' must be 'higher' or 'lower'"),
        (lambda: metrics_of(REGRESSION, mean("absolute_error")), "two metrics have the key 'absolute_error'"),
        (lambda: metrics_of(REGRESSION, mean("cohort")), "'cohort' is the name of another field"),
        (lambda: metrics_of(REGRESSION, mean("client_error")), "'client_error' is the name of another field"),
        (lambda: metrics_of(Kind(name="k", losses=(squared_error,), main="x")), "main = 'x' is not one of the metrics"),
        (lambda: Kind(name="k", losses=()), "has no loss"),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        make()


def test_metrics_that_do_not_fit_the_rows_are_refused_before_training() -> None:
    top = Metric.mean(lambda o, t, m: (o.topk(5).indices == t.unsqueeze(1)).any(1).to(m.dtype), key="top5")
    metrics = metrics_of(classification(classes=3), top)
    with pytest.raises(Invalid, match=r"metric 'top5' cannot be computed .*out of range"):
        metrics.try_on(torch.zeros(2, 3), torch.tensor([0, 1]))
    metrics_of(classification(classes=5), top).try_on(torch.zeros(2, 5), torch.tensor([0, 1]))
    wide = Metric(key="wide", sums=lambda o, t, m: {"s": o.sum(0)}, value=lambda s: s["s"].sum())
    with pytest.raises(Invalid, match=r"'wide' has sums of shapes s \(4,\) for output \(2, 4\).*s \(1,\) for the exam"):
        metrics_of(REGRESSION, wide).try_on(torch.zeros(2, 4), torch.zeros(2, 4))


def test_metrics_with_the_same_sums_share_them() -> None:
    metrics = metrics_of(classification(classes=3))
    assert set(metrics.parts) == {"loss", "accuracy", "precision", "calibration_error"}
    assert set(metrics.main_parts) == {"loss", "accuracy"}
    assert metrics.part_of["f1"] == "precision"
    assert tree.map_leaves(lambda leaf: tuple(leaf.shape), metrics.zero(torch.device("cpu"))) == {
        "loss": {"total": (), "count": ()},
        "accuracy": {"total": (), "count": ()},
        "precision": {"counts": (3, 3)},
        "calibration_error": {"bins": (3, 15)},
    }


def test_host_keeps_trees_apart() -> None:
    one, two = {"a": torch.ones(2, dtype=torch.float64)}, {"b": {"c": torch.zeros((), dtype=torch.float64)}}
    found = list(host([one, {}, two]))
    assert found[1] == {} and torch.equal(found[0]["a"], one["a"]) and torch.equal(found[2]["b"]["c"], two["b"]["c"])


def test_kinds_follow_from_targets() -> None:
    assert kind_of_targets(torch.tensor([0, 2]), 3).name == "classification"
    assert kind_of_targets(torch.tensor([0.5]), None) is REGRESSION
    assert kind_of_targets(torch.tensor([[0, 1]]), None).name == "multi_label"
    assert kind_of_targets(torch.tensor([[0, 3]]), None) is REGRESSION
    assert Task(Echo(), loss="squared_error").kind is REGRESSION and Task(Echo()).losses is cross_entropy
