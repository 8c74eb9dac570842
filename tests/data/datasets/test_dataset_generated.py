"""The generated data of each kind of task: their kinds, shapes and seeds, and that there is something to learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression, LogisticRegression

from consilience.data.datasets import load
from consilience.task.losses import IGNORED

SETS: list[tuple[str, dict[str, Any], str]] = [
    ("synthetic_regression", {"outputs": 2}, "regression"),
    ("synthetic_labels", {}, "multi_label"),
    ("synthetic_text", {"objective": "next"}, "next_token"),
    ("synthetic_text", {"objective": "masked"}, "tokens"),
    ("synthetic_text", {"objective": "labels"}, "tokens"),
    ("shapes", {}, "dense"),
]


@pytest.mark.parametrize(("name", "options", "kind"), SETS)
def test_every_set_has_its_kind_and_is_a_function_of_its_seed(name: str, options: dict[str, Any], kind: str) -> None:
    one, same, other = (load(name, clients=3, rows=10, seed=seed, **options) for seed in (0, 0, 1))
    assert one.kind is not None and one.kind.name == kind and len(one.y) + len(one.test_y) == 30
    assert torch.equal(one.x, same.x) and torch.equal(one.y, same.y) and not torch.equal(one.x, other.x)
    assert one.groups is not None and one.groups.unique().tolist() == [0, 1, 2]
    assert (one.classes is None) == (kind in ("regression", "multi_label"))
    if one.classes is not None:
        counted = one.y[one.y != IGNORED]
        assert int(counted.min()) >= 0 and int(counted.max()) < one.classes == len(one.label_names)


def test_text_counts_no_padding_and_masks_hide_the_words() -> None:
    text = load("synthetic_text", objective="next")
    assert torch.equal(text.y == IGNORED, text.x == 0) and torch.equal(text.x[text.x > 0], text.y[text.x > 0])
    masked = load("synthetic_text", objective="masked")
    assert torch.equal(masked.y != IGNORED, masked.x == 1) and bool((masked.x == 1).any(1).all())
    labels = load("synthetic_text", objective="labels")
    assert torch.equal(labels.y == IGNORED, labels.x == 0) and len(labels.vocabulary) == 22


def test_shapes_differ_from_their_background() -> None:
    data = load("shapes", noise=0.0)
    assert torch.equal(data.x[:, 0] > 0, data.y > 0) and set(data.y.unique().tolist()) == {0, 1, 2, 3}


def test_there_is_something_to_learn() -> None:
    numbers = load("synthetic_regression", spread=0.1)
    assert LinearRegression().fit(numbers.x, numbers.y).score(numbers.test_x, numbers.test_y) > 0.7
    labels = load("synthetic_labels")
    model = LogisticRegression().fit(labels.x, labels.y[:, 0])
    assert model.score(labels.test_x, labels.test_y[:, 0]) > max(0.75, float(labels.test_y[:, 0].float().mean()))


def test_diabetes_is_standardised_over_training_rows() -> None:
    data = load("diabetes")
    np.testing.assert_allclose(data.x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose([data.y.mean(), data.y.std(correction=0)], [0, 1], atol=1e-5)
    assert len(data.y) + len(data.test_y) == 442 == len(load_diabetes().target) and data.classes is None
    assert LinearRegression().fit(data.x, data.y).score(data.test_x, data.test_y) > 0.3
