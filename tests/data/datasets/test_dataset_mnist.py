"""The MNIST family: IDX and npz files written here, exact values read back."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch
from data_files import real_data, write_idx

from consilience.core.settings import Invalid
from consilience.data.datasets import load

PIXELS = np.array([[[0, 255, 51], [102, 153, 204]], [[1, 2, 3], [4, 5, 6]]], np.uint8)  # 2 pictures of 2x3
TEST_PIXELS = np.full((1, 2, 3), 51, np.uint8)


def write_four(folder, mark="-", suffix="", labels=(3, 9), test_labels=(1,)):
    for part, pixels, numbers in (("train", PIXELS, labels), ("t10k", TEST_PIXELS, test_labels)):
        write_idx(folder / f"{part}-images{mark}idx3-ubyte{suffix}", pixels)
        write_idx(folder / f"{part}-labels{mark}idx1-ubyte{suffix}", np.array(numbers))


@pytest.mark.parametrize(
    ("name", "folder", "mark", "suffix"),
    [
        ("mnist", "mnist", "-", ""),
        ("mnist", "mnist", ".", ".gz"),
        ("mnist", "MNIST/raw", "-", ".gz"),
        ("mnist", ".", "-", ""),
        ("fashion_mnist", "fashion_mnist", "-", ".gz"),
        ("fashion_mnist", "FashionMNIST/raw", "-", ""),
    ],
)
def test_idx_files_under_all_usual_names(tmp_path, name, folder, mark, suffix):
    write_four(tmp_path / folder, mark, suffix)
    data = load(name, data_dir=tmp_path, normalise="unit")
    assert data.x.shape == (2, 1, 2, 3) and data.test_x.shape == (1, 1, 2, 3)
    assert torch.equal(data.x, torch.from_numpy(PIXELS[:, None].astype(np.float32)) / 255)
    assert data.y.tolist() == [3, 9] and data.test_y.tolist() == [1]
    assert data.classes == 10 and len(data.label_names) == 10


def test_the_three_scalings(tmp_path):
    write_four(tmp_path)
    unit = PIXELS[:, None] / 255
    wanted = {
        "unit": (unit, 0.2),
        "signed": (unit * 2 - 1, -0.6),
        "standard": ((unit - unit.mean()) / unit.std(), (0.2 - unit.mean()) / unit.std()),
    }
    for how, (train, test) in wanted.items():
        data = load("mnist", data_dir=tmp_path, normalise=how)
        assert np.allclose(data.x.numpy(), train, atol=1e-6)
        assert np.allclose(data.test_x.numpy(), test, atol=1e-6)


def test_keras_archive(tmp_path):
    np.savez(tmp_path / "mnist.npz", x_train=PIXELS, y_train=[3, 9], x_test=TEST_PIXELS, y_test=[1])
    data = load("mnist", data_dir=tmp_path, normalise="unit")
    assert torch.equal(data.x * 255, torch.from_numpy(PIXELS[:, None].astype(np.float32)))
    np.savez(tmp_path / "mnist.npz", x_train=PIXELS, y_train=[3, 9, 1], x_test=TEST_PIXELS, y_test=[1])
    with pytest.raises(Invalid, match=r"mnist\.npz, y_train: 2 rows of features but labels of shape \(3,\)"):
        load("mnist", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("labels", "defect"),
    [((3, 9, 1), "2 rows of features but labels of shape"), ((3, 10), "label 10 of row 1 is not in 0 .. 9")],
)
def test_wrong_labels_name_the_file(tmp_path, labels, defect):
    write_four(tmp_path, labels=labels)
    with pytest.raises(Invalid, match=f"train-labels-idx1-ubyte: {defect}"):
        load("mnist", data_dir=tmp_path)


def test_pictures_given_as_labels_are_noticed(tmp_path):
    write_four(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", PIXELS)
    with pytest.raises(Invalid, match="train-labels-idx1-ubyte has the wrong magic number"):
        load("mnist", data_dir=tmp_path)


def test_fashion_does_not_borrow_a_neighbours_test_set(tmp_path):
    write_four(tmp_path / "fashion_mnist")
    write_four(tmp_path)
    (tmp_path / "fashion_mnist" / "t10k-labels-idx1-ubyte").unlink()
    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match=r"fashion_mnist has train-images.* but not t10k-labels"):
        load("fashion_mnist", data_dir=tmp_path)


def write_emnist(folder, split, labels, pixels=PIXELS):
    for part in ("train", "test"):
        write_idx(folder / f"emnist-{split}-{part}-images-idx3-ubyte.gz", pixels)
        write_idx(folder / f"emnist-{split}-{part}-labels-idx1-ubyte.gz", np.array(labels))


def test_emnist_pictures_are_turned_upright(tmp_path):
    write_emnist(tmp_path / "emnist", "balanced", (46, 0))
    data = load("emnist", data_dir=tmp_path, normalise="unit")
    assert data.x.shape == (2, 1, 3, 2)
    assert torch.equal(data.x[0, 0] * 255, torch.from_numpy(PIXELS[0].T.astype(np.float32)))
    assert data.classes == 47 and [data.label_names[y] for y in data.y] == ["t", "0"]


@pytest.mark.parametrize(
    ("split", "labels", "classes", "names"),
    [
        ("letters", (1, 26), 26, ["A", "Z"]),
        ("byclass", (10, 61), 62, ["A", "z"]),
        ("bymerge", (36, 46), 47, ["a", "t"]),
        ("digits", (0, 9), 10, ["0", "9"]),
        ("mnist", (0, 9), 10, ["0", "9"]),
    ],
)
def test_emnist_splits_have_their_classes(tmp_path, split, labels, classes, names):
    write_emnist(tmp_path / "gzip", split, labels)
    data = load("emnist", data_dir=tmp_path, split=split)
    assert data.classes == classes and [data.label_names[y] for y in data.y] == names
    write_emnist(tmp_path / "gzip", split, (labels[0], labels[1] + 1))
    with pytest.raises(Invalid, match="is not in"):
        load("emnist", data_dir=tmp_path, split=split)


def test_constant_pictures_are_not_divided_by_zero(tmp_path):
    for part in ("train", "t10k"):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte", np.full((2, 2, 2), 7))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", np.array([0, 1]))
    assert load("mnist", data_dir=tmp_path).x.abs().max() < 1e-6


def test_cut_off_download_is_named(tmp_path):
    write_four(tmp_path, suffix=".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(Invalid, match=r"train-images-idx3-ubyte\.gz is a damaged"):
        load("mnist", data_dir=tmp_path)
    path.write_bytes(gzip.compress(gzip.decompress(gzip.compress(PIXELS.tobytes()))))
    with pytest.raises(Invalid, match="wrong magic number"):
        load("mnist", data_dir=tmp_path)


def test_duw_clients_hold_the_named_rows(tmp_path):
    pixels = np.arange(6 * 4, dtype=np.uint8).reshape(6, 2, 2)
    (tmp_path / "duw_mnist").mkdir()
    np.savez(tmp_path / "mnist.npz", x_train=pixels, y_train=range(6), x_test=pixels[:2], y_test=[7, 8])
    rows = {"env1_client0": [4, 0], "env1_client1": [2], "env2_client0": [1]}
    np.savez(tmp_path / "duw_mnist" / "client_indices.npz", **rows)
    data = load("duw_mnist", data_dir=tmp_path)
    assert data.y.tolist() == [4, 0, 2] and data.groups.tolist() == [0, 0, 1] and data.test_groups is None
    assert data.group_names == ("client_0", "client_1")
    wanted = (pixels[[4, 0, 2], None].astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    assert np.array_equal(data.x.numpy(), wanted)
    assert np.allclose(data.test_x.numpy(), pixels[:2, None] / 255 * 2 - 1, atol=1e-6)
    authors = load("duw_mnist", data_dir=tmp_path, test_scale="authors")
    assert torch.equal(authors.x, data.x)
    assert np.allclose(authors.test_x.numpy(), pixels[:2, None] / 255 - 0.5, atol=1e-6)
    np.savez(tmp_path / "duw_mnist" / "client_indices.npz", env1_client0=[4, 6])
    with pytest.raises(Invalid, match="distinct rows of the 6"):
        load("duw_mnist", data_dir=tmp_path)
    with pytest.raises(Invalid, match="no arrays fig2_client0"):
        load("duw_mnist", data_dir=tmp_path, environment="fig2")


def test_real_mnist():
    data = load("mnist", data_dir=real_data("mnist"), normalise="unit")
    assert data.x.shape == (60000, 1, 28, 28) and data.test_x.shape == (10000, 1, 28, 28)
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert torch.bincount(data.y).tolist() == counts
    assert torch.bincount(data.test_y).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    pixels = data.x.numpy()
    assert abs(pixels.mean(dtype=np.float64) - 0.13066) < 5e-6 and abs(pixels.std(dtype=np.float64) - 0.30811) < 5e-6


@pytest.mark.parametrize(
    ("environment", "sizes"),
    [
        ("fig2", [1760, 5739]),
        ("env1", [1042, 1023, 862, 1184, 4459]),
        ("env2", [6775, 6774, 6776, 6776, 6776]),
        ("env34", [1713, 1713, 1713, 1713, 1716]),
    ],
)
def test_real_duw_environments(environment, sizes):
    real_data("duw_mnist")
    data = load("duw_mnist", data_dir=real_data("mnist"), environment=environment)
    assert torch.bincount(data.groups).tolist() == sizes
    assert data.x.min() == -1 and data.x.max() == 1 and len(data.test_y) == 10000
    if environment == "env2":
        held = [set(data.y[data.groups == k].tolist()) for k in range(5)]
        assert held == [{2, 9}, {0, 4, 6}, {1, 3, 5, 7, 8}, {1, 3, 5, 7, 8}, {1, 3, 5, 7, 8}]
