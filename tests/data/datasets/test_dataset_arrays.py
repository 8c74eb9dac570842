"""Archives of arrays, and the one X-ray set that is such an archive."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from data_files import real_data

from consilience.core.settings import Invalid
from consilience.data.datasets import load


def test_keras_names_with_measurements(tmp_path):
    x = np.array([[1.0, 10.0], [3.0, 10.0]])
    np.savez(tmp_path / "a.npz", x_train=x, y_train=[0, 2], x_test=[[5.0, 11.0]], y_test=[1.0])
    data = load("npz", data_dir=tmp_path, file="a.npz")
    assert data.x.tolist() == [[-1, 0], [1, 0]] and data.test_x.tolist() == [[3, 1]]
    assert data.classes == 3 and data.test_y.tolist() == [1] and data.name == "a"
    plain = load("npz", data_dir=tmp_path, file="a.npz", normalise="none")
    assert plain.x.tolist() == x.tolist() and plain.x.dtype == torch.float32


def test_medmnist_names_and_the_validation_part(tmp_path):
    pixels = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 2, 2, 3)
    np.savez(
        tmp_path / "m.npz",
        train_images=pixels[:2],
        train_labels=[[0], [1]],
        val_images=pixels[2:4],
        val_labels=[[1], [1]],
        test_images=pixels[4:],
        test_labels=[[0]],
    )
    data = load("npz", data_dir=tmp_path, file="m.npz", normalise="unit")
    assert torch.equal(data.x * 255, torch.from_numpy(pixels[:2].transpose(0, 3, 1, 2).astype(np.float32)))
    assert data.y.tolist() == [0, 1] and data.test_y.tolist() == [0]
    assert load("npz", data_dir=tmp_path, file="m.npz", validation="train").y.tolist() == [0, 1, 1, 1]
    assert load("npz", data_dir=tmp_path, file="m.npz", validation="test").test_y.tolist() == [0, 1, 1]


def test_x_and_y_alone_are_split_by_the_seed(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(20.0).reshape(10, 2), y=np.arange(10) % 2)
    data = load("npz", data_dir=tmp_path, file="a.npz", normalise="none", test_fraction=0.4)
    assert len(data.y) == 6 and data.test_y.tolist().count(1) == 2
    assert sorted([*data.x[:, 0].tolist(), *data.test_x[:, 0].tolist()]) == list(range(0, 20, 2))


@pytest.mark.parametrize(
    ("arrays", "options", "defect"),
    [
        ({"z": [1]}, {}, "has the arrays z. It must hold x_train"),
        ({"x": [[np.nan]], "y": [0]}, {}, r"a\.npz, x: row 0 has NaN"),
        ({"x": [[1.0], [np.inf]], "y": [0, 1]}, {}, "row 1 has NaN or infinite"),
        ({"x": [[1.0], [2.0]], "y": [0]}, {}, "2 rows of features but labels of shape"),
        ({"x": [["a"]], "y": [0]}, {}, "must hold rows of numbers"),
        ({"x": [[1.0]], "y": [-1]}, {}, "label -1 of row 0"),
        ({"x": [[1.0]], "y": [0.5]}, {}, "whole numbers, not float64"),
        ({"x": [[1.0], [2.0]], "y": [0, 1]}, {"normalise": "unit"}, "'unit' is for pictures"),
        ({"x": [[1.0]], "y": [0]}, {}, "test part has no rows"),
        ({"x_train": [[1.0]], "y_train": [0], "x_test": [[1.0, 2.0]], "y_test": [0]}, {}, r"shape \(1,\) but test"),
    ],
)
def test_wrong_archives_are_refused(tmp_path, arrays, options, defect):
    np.savez(tmp_path / "a.npz", **{name: np.array(values) for name, values in arrays.items()})
    with pytest.raises(Invalid, match=defect):
        load("npz", data_dir=tmp_path, file="a.npz", **options)


def test_missing_archive_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.npz was not found. It must hold x_train"):
        load("npz", data_dir=tmp_path, file="nothing.npz")


def test_real_pneumoniamnist():
    folder = real_data("pneumoniamnist")
    data = load("pneumoniamnist", data_dir=folder)
    assert torch.bincount(data.y).tolist() == [1214, 3494] and torch.bincount(data.test_y).tolist() == [234, 390]
    assert data.x.shape[1:] == (1, 28, 28) and data.label_names == ("normal", "pneumonia")
    assert torch.bincount(load("pneumoniamnist", data_dir=folder, validation="train").y).tolist() == [1349, 3883]
