"""Table columns to features, checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from consilience.core.settings import Invalid
from consilience.data.datasets.prepare.columns import encode_columns
from consilience.data.datasets.prepare.labels import class_numbers, number_names


def test_numbers_gaps_and_categories():
    columns = {
        "age": ["1", "3", "", "100"],
        "town": ["York", "Bath", "?", "Rome"],
        "flat": ["5", "5", "5", "5"],
    }
    features = encode_columns(columns, np.array([0, 1, 2]), where="x.csv")
    # training rows 0, 1, 2: ages 1, 3 and the median 2; mean 2, deviation sqrt(2/3)
    deviation = np.sqrt(2 / 3)
    assert features.names == ("age", "town=Bath", "town=York", "flat", "age missing", "town missing")
    expected = [
        [-1 / deviation, 0, 1, 0, 0, 0],
        [1 / deviation, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 1],
        [98 / deviation, 0, 0, 0, 0, 0],  # Rome was not in training
    ]
    assert np.allclose(features.values, expected, atol=1e-6) and features.values.dtype == np.float32


def test_gaps_take_the_training_median_not_the_mean():
    columns = {"dose": ["1", "2", "90", "", "500"]}
    filled = encode_columns(columns, np.array([0, 1, 2, 3]), standardise=False, where="x.csv")
    assert filled.values[:, 0].tolist() == [1, 2, 90, 2, 500]


def test_test_rows_teach_nothing():
    columns = {"age": ["1", "3", "5", "7"], "town": ["a", "b", "a", "b"]}
    train = np.array([0, 1, 2])
    before = encode_columns(columns, train, where="x.csv")
    changed = encode_columns({"age": ["1", "3", "5", "900"], "town": ["a", "b", "a", "zzz"]}, train, where="x.csv")
    assert np.array_equal(before.values[:3], changed.values[:3])


def test_codes_can_be_made_categories_and_scaling_turned_off():
    columns = {"code": ["10", "2", "10"], "dose": ["1", "2", "4"]}
    features = encode_columns(columns, np.arange(3), categorical=("code",), standardise=False, where="x.csv")
    assert features.names == ("code=2", "code=10", "dose")
    assert features.values.tolist() == [[0, 1, 1], [1, 0, 2], [0, 1, 4]]


@pytest.mark.parametrize(
    ("columns", "categorical", "defect"),
    [
        ({"dose": ["1", "inf"]}, None, "x.csv: column 'dose', row 1 is inf"),
        ({"dose": ["1", "much"]}, (), "'much' in column 'dose', row 1, is not a number"),
        ({}, None, "no feature columns"),
    ],
)
def test_wrong_cells_are_named(columns, categorical, defect):
    with pytest.raises(Invalid, match=defect):
        encode_columns(columns, np.array([0]), categorical=categorical, where="x.csv")


def test_a_column_unknown_in_training_is_zero_but_marked():
    features = encode_columns({"ca": ["", "", "4"]}, np.array([0, 1]), standardise=False, where="x.csv")
    assert features.values.tolist() == [[0, 1], [0, 1], [4, 0]]


def test_names_are_numbered_by_value_or_alphabet():
    assert number_names(["10", "2", "10"], where="x")[1] == ("2", "10")
    assert number_names(["b", "a", "b"], where="x")[0].tolist() == [1, 0, 1]
    with pytest.raises(Invalid, match="'c' of row 1 is not one of a, b"):
        number_names(["a", "c"], where="x", known=("a", "b"))


@pytest.mark.parametrize(
    ("labels", "defect"),
    [
        (np.array([0, 3]), "label 3 of row 1 is not in 0 .. 2"),
        (np.array([-1, 2]), "label -1 of row 0"),
        (np.array([0.5, 1]), "whole numbers, not float64"),
        (np.array([0]), r"2 rows of features but labels of shape \(1,\)"),
        (np.array([[0, 1], [1, 1]]), r"labels of shape \(2, 2\)"),
    ],
)
def test_wrong_labels_are_named(labels, defect):
    with pytest.raises(Invalid, match=defect):
        class_numbers(labels, rows=2, classes=3, where="y.bin")
