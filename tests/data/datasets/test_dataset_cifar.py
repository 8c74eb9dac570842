"""CIFAR-10 and CIFAR-100 in all three formats."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from data_files import real_data, write_sheet

from consilience.core.settings import Invalid
from consilience.data.datasets import load

PICTURES = np.random.default_rng(0).integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)
LABELS = np.array([6, 9, 9, 4, 1, 1, 2, 7, 8, 3, 0, 5], np.uint8)


def write_binary(folder):
    folder.mkdir(parents=True)
    for part, rows in batches():
        records = np.concatenate([LABELS[rows, None], PICTURES[rows].reshape(-1, 3072)], axis=1)
        (folder / f"{part}.bin").write_bytes(records.tobytes())


def write_python(folder):
    folder.mkdir(parents=True)
    for part, rows in batches():
        content = {b"data": PICTURES[rows].reshape(-1, 3072), b"labels": LABELS[rows].tolist()}
        (folder / part).write_bytes(pickle.dumps(content, protocol=2))


def write_sheets(folder):
    folder.mkdir(parents=True)
    for part, rows in batches():
        name = "test" if part == "test_batch" else f"train_{part[-1]}"
        write_sheet(folder / f"{name}.webp", PICTURES[rows].transpose(0, 2, 3, 1), columns=2)
    np.savez(folder / "labels.npz", y_train=LABELS[:10], y_test=LABELS[10:])


def batches():
    return [*((f"data_batch_{k + 1}", slice(2 * k, 2 * k + 2)) for k in range(5)), ("test_batch", slice(10, 12))]


@pytest.mark.parametrize(
    ("write", "folder"),
    [
        (write_binary, "cifar10"),
        (write_binary, "cifar-10-batches-bin"),
        (write_python, "cifar-10-batches-py"),
        (write_sheets, "cifar10"),
    ],
)
def test_all_formats_give_the_same_pictures(tmp_path, write, folder):
    write(tmp_path / folder)
    data = load("cifar10", data_dir=tmp_path, normalise="unit")
    assert torch.equal(data.x, torch.from_numpy(PICTURES[:10].astype(np.float32)) / 255)
    assert torch.equal(data.test_x, torch.from_numpy(PICTURES[10:].astype(np.float32)) / 255)
    assert data.y.tolist() == LABELS[:10].tolist() and data.test_y.tolist() == [0, 5]
    assert data.label_names[6] == "frog" and data.classes == 10
    some = load("cifar10", data_dir=tmp_path, normalise="unit", batches=2)
    assert torch.equal(some.x, data.x[:4]) and some.y.tolist() == [6, 9, 9, 4] and len(some.test_y) == 2


def test_standard_scaling_is_per_channel_over_training(tmp_path):
    write_binary(tmp_path / "cifar10")
    x = load("cifar10", data_dir=tmp_path).x
    assert torch.allclose(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(x.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5)


def test_label_out_of_range_names_the_batch(tmp_path):
    write_binary(tmp_path / "cifar10")
    path = tmp_path / "cifar10" / "data_batch_3.bin"
    path.write_bytes(b"\x0a" + path.read_bytes()[1:])
    with pytest.raises(Invalid, match=r"data_batch_3\.bin: label 10 of row 0 is not in 0 .. 9"):
        load("cifar10", data_dir=tmp_path)


def test_a_missing_batch_is_named(tmp_path):
    write_binary(tmp_path / "cifar10")
    (tmp_path / "cifar10" / "data_batch_4.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"but not data_batch_4\.bin"):
        load("cifar10", data_dir=tmp_path)


def test_hostile_batch_is_refused(tmp_path):
    write_python(tmp_path / "cifar10")
    (tmp_path / "cifar10" / "data_batch_1").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(Invalid, match=r"data_batch_1 was refused: it asks for os\.system"):
        load("cifar10", data_dir=tmp_path)


@pytest.mark.parametrize("form", ["binary", "python"])
def test_cifar100_fine_and_coarse(tmp_path, form):
    fine, coarse = np.array([99, 0, 42], np.uint8), np.array([19, 0, 7], np.uint8)
    pixels = PICTURES[:3].reshape(3, 3072)
    for part in ("train", "test"):
        if form == "binary":
            content = np.concatenate([coarse[:, None], fine[:, None], pixels], axis=1).tobytes()
            (tmp_path / f"{part}.bin").write_bytes(content)
        else:
            content = {b"data": pixels, b"fine_labels": fine.tolist(), b"coarse_labels": coarse.tolist()}
            (tmp_path / part).write_bytes(pickle.dumps(content, protocol=2))
    if form == "binary":
        (tmp_path / "coarse_label_names.txt").write_text("\n".join(f"c{k}" for k in range(20)))
    else:
        (tmp_path / "meta").write_bytes(pickle.dumps({b"coarse_label_names": [b"c%d" % k for k in range(20)]}))
    rough = load("cifar100", data_dir=tmp_path, labels="coarse", normalise="unit")
    assert rough.y.tolist() == [19, 0, 7] and rough.classes == 20 and rough.label_names[19] == "c19"
    assert torch.equal(rough.x, torch.from_numpy(PICTURES[:3].astype(np.float32)) / 255)
    if form == "binary":
        precise = load("cifar100", data_dir=tmp_path)
        assert precise.y.tolist() == [99, 0, 42] and precise.classes == 100 and precise.label_names == ()


def test_real_cifar10():
    data = load("cifar10", data_dir=real_data("cifar10"), normalise="unit", batches=1)
    assert data.x.shape == (10000, 3, 32, 32) and data.test_x.shape == (10000, 3, 32, 32)
    assert data.y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert torch.bincount(data.test_y).tolist() == [1000] * 10


@pytest.mark.slow
def test_real_cifar10_statistics():
    data = load("cifar10", data_dir=real_data("cifar10"), normalise="unit")
    assert torch.bincount(data.y).tolist() == [5000] * 10
    total, squares = torch.zeros(3).double(), torch.zeros(3).double()
    for chunk in data.x.split(100):
        total += chunk.double().sum((0, 2, 3))
        squares += chunk.double().square().sum((0, 2, 3))
    mean, square = total / (50000 * 1024), squares / (50000 * 1024)
    assert np.allclose(mean, [0.49140, 0.48216, 0.44653], atol=5e-6)
    assert np.allclose((square - mean**2).sqrt(), [0.24703, 0.24349, 0.26159], atol=5e-6)
