"""Targets, weights and settings that do not fit a kind of task are refused before training, by client, row and fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kind_tasks
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import consilience as cs
from consilience.task.kinds import kind_named
from consilience.task.losses import IGNORED


def trained(kind: str, change: Callable[[Tensor], Any], *, test: bool = False, **settings: Any) -> None:
    """One round with the targets of client 1 changed."""
    draw = torch.Generator().manual_seed(0)
    given = [kind_tasks.CASES[kind].rows(size, draw) for size in (4, 5)]
    changed = [given[0], (given[1][0], change(given[1][1].clone()))]
    clients, tests = (given, changed) if test else (changed, given)
    federation = cs.Federation.from_clients(clients, client_tests=tests, names=("north", "south"))
    cs.train(kind_tasks.task(kind, **settings), federation, cs.fedavg(lr=0.1), rounds=1, progress=False, lane="serial")


def put(value: float, *place: Any) -> Callable[[Tensor], Tensor]:
    def change(y: Tensor) -> Tensor:
        y[place] = value  # type: ignore[index]
        return y

    return change


@pytest.mark.parametrize("test", [False, True])
@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("regression", put(float("nan"), 2, 1), "row 2 of client 'south' has a target that is NaN or infinite"),
        ("regression", put(float("inf"), 0, 0), "row 0 of client 'south' has a target that is NaN or infinite"),
        ("binary", put(2, 1), "row 1 of client 'south' has the target 2: binary needs 0 or 1"),
        ("multi_label", put(-1, 3, 0), r"row 3 of client 'south' has the target -1: multi_label needs 0 or 1 \(ignore"),
        ("multi_label", put(IGNORED, slice(None)), "targets of client 'south' are ignore_index = -100: leave the cl"),
        ("classification", put(-3, 4), r"row 4 of client 'south' has the class number -3, and classes are 0 .. 1"),
        ("tokens", put(-1, 2, 1), "row 2 of client 'south' has the class number -1, and classes are 0 .. 2"),
        ("tokens", put(IGNORED, 2), "row 2 of client 'south' has no target that counts: remove empty sequences"),
        ("next_token", put(IGNORED, 0, slice(1, None)), "row 0 of client 'south' has no target that counts"),
        ("dense", put(IGNORED, slice(None)), "targets of client 'south' are ignore_index = -100"),
    ],
)
def test_wrong_targets(kind: str, change: Callable[[Tensor], Tensor], message: str, test: bool) -> None:
    with pytest.raises(cs.Invalid, match=("test" if test else "training") + r"[\w ]*" + message):
        trained(kind, change, test=test)


def test_a_class_that_the_model_has_no_output_for() -> None:
    with pytest.raises(
        cs.Invalid,
        match=r"has 2 outputs, but .* class number 5 \(training row 0 of client 'south'\): give",
    ):
        trained("classification", put(5, 0))
    with pytest.raises(cs.Invalid, match="has 3 outputs, but the federation's data have class number 3"):
        trained("dense", put(3, 0, 1, 1))


def test_entries_that_are_ignored_are_no_classes() -> None:
    trained("tokens", put(IGNORED, 0, 0))
    trained("dense", put(IGNORED, 0))
    trained("multi_label", put(IGNORED, 0))


def train(module: nn.Module, x: Tensor, y: Any, **options: Any) -> None:
    cs.train(module, [(x, y)], cs.fedavg(lr=0.1), rounds=1, progress=False, lane="serial", **options)


@pytest.mark.parametrize(
    ("module", "x", "y", "kind", "message"),
    [
        (
            nn.Conv2d(1, 3, 1),
            (4, 1, 6, 6),
            torch.zeros(4, 5, 6).long(),
            "dense",
            "6 x 6 pixels, but .* of 5 x 6",
        ),
        (nn.Conv2d(1, 3, 1), (4, 1, 6, 6), torch.zeros(4, 1, 6, 6).long(), "dense", r"are not \[rows, height, width\]"),
        (nn.Linear(3, 2), (4, 5, 3), torch.zeros(4, 6).long(), "tokens", "outputs for 5 tokens, but .* targets of 6"),
        (nn.Linear(3, 2), (4, 0, 3), torch.zeros(4, 0).long(), "tokens", "are empty: remove empty sequences"),
        (
            nn.Linear(3, 2),
            (4, 3),
            torch.zeros(4, 3),
            "regression",
            "gives 2 numbers a row, but .* 3 targets: change",
        ),
        (
            nn.Linear(3, 2),
            (4, 3),
            torch.zeros(4, 3).long(),
            "multi_label",
            "gives 2 numbers a row, but .* 3 targets",
        ),
        (nn.Linear(3, 2), (4, 3), torch.zeros(4), "classification", "are float32: use kind='regression', or .long"),
        (nn.Linear(3, 2), (4, 3), torch.zeros(4).bool(), "classification", "are bool: use kind='binary', or .long"),
        (nn.Linear(3, 2), (4, 3), torch.zeros(4), "dense", "needs class numbers, but the targets are float32"),
    ],
)
def test_wrong_shapes_and_types(module: nn.Module, x: tuple[int, ...], y: Tensor, kind: str, message: str) -> None:
    with pytest.raises(cs.Invalid, match=message):
        train(module, torch.randn(x), y, kind=kind)


def test_wrong_weights() -> None:
    x, y = torch.randn(4, 3), torch.randn(4)
    for weight, message in (
        (torch.tensor([1.0, -1.0, 1.0, 1.0]), "row 1 of client '0' has the weight -1.0: weights are numbers >= 0"),
        (torch.tensor([1.0, 1.0, float("nan"), 1.0]), "row 2 of client '0' has the weight nan"),
        (torch.zeros(4), "all rows of client '0' have the weight 0"),
        (torch.ones(3), "client 0 must have one weight for each of its 4 rows"),
    ):
        with pytest.raises(cs.Invalid, match=message):
            cs.train(nn.Linear(3, 1), [(x, y, weight)], cs.fedavg(), rounds=1, progress=False)
    with pytest.raises(cs.Invalid, match="some clients have weights of their rows and others have none"):
        cs.Federation.from_clients([(x, y, torch.ones(4)), (x, y)])


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("classification", {"class_weights": (1.0, -1.0)}, "class_weights holds -1.0: weights are numbers >= 0"),
        ("classification", {"class_weights": (1.0, float("nan"))}, "class_weights holds nan"),
        ("classification", {"class_weights": (0.0, 0.0)}, "class_weights holds only 0"),
        ("binary", {"class_weights": (1.0, 1.0, 1.0)}, "class_weights has 3 numbers for 2 classes"),
        ("tokens", {"label_smoothing": 1.0}, "label_smoothing = 1.0 must be at least 0 and below 1"),
        (
            "regression",
            {"label_smoothing": 0.1},
            "label_smoothing = 0.1 has no effect in regression: it is",
        ),
        ("classification", {"ignore_index": 0}, "ignore_index = 0 has no effect in classification"),
        ("dense", {"metrics": ("per_clas",)}, "metrics holds 'per_clas': dense offers .*per_class"),
        ("multi_label", {"metrics": ("top_5",)}, "metrics holds 'top_5': multi_label offers per_class"),
        ("tokes", {}, "kind = 'tokes' is not one of .*did you mean 'tokens'"),
    ],
)
def test_wrong_settings(kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(cs.Invalid, match=message):
        kind_named(kind, **settings)


def test_class_weights_for_another_number_of_classes() -> None:
    with pytest.raises(cs.Invalid, match="class_weights has 4 numbers for 3 classes: give one for each"):
        trained("dense", lambda y: y, class_weights=(1.0, 1.0, 1.0, 1.0))


def test_names_of_classes_are_one_list_for_all_clients() -> None:
    x = torch.randn(3, 2)
    given = [(x, ["b", "a", "b"]), (x, np.array(["c", "c", "b"]))]
    federation = cs.Federation.from_clients(given, test=(x, ["a", "a", "d"]))
    assert federation.label_names == ("a", "b", "c", "d") and federation.classes == 4
    assert federation.train.y.tolist() == [1, 0, 1, 2, 2, 1] and federation.test is not None
    assert federation.test.y.tolist() == [0, 0, 3]
    ordered = cs.Federation.from_clients(given, label_names=("c", "b", "a"))
    assert ordered.train.y.tolist() == [1, 2, 1, 0, 0, 1]
    with pytest.raises(cs.Invalid, match="client 1: the target 'c' of row 0 is not one of the classes a, b"):
        cs.Federation.from_clients(given, label_names=("a", "b"))
    with pytest.raises(cs.Invalid, match="names of classes and others are not"):
        cs.Federation.from_clients([given[0], (x, torch.tensor([0, 1, 2]))])
