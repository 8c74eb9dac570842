"""CIFAR batches in both original formats."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from consilience.core.settings import Invalid
from consilience.data.readers.cifar import read_binary_batch, read_label_names, read_python_batch

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)


def test_binary_records_are_labels_then_red_green_blue(tmp_path):
    labels = np.array([[7, 70], [1, 2], [0, 99]], np.uint8)
    path = tmp_path / "train.bin"
    path.write_bytes(np.concatenate([labels, PIXELS], axis=1).tobytes())
    pictures, read = read_binary_batch(path, label_bytes=2)
    assert np.array_equal(read, labels)
    assert pictures[1, 2, 5, 9] == PIXELS[1, 2 * 1024 + 5 * 32 + 9]


@pytest.mark.parametrize("size", [0, 1, 3072, 3073 + 5])
def test_binary_file_of_broken_records_is_refused(tmp_path, size):
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(bytes(size))
    with pytest.raises(Invalid, match=rf"data_batch_1\.bin is cut off .* {size} bytes are not whole records of 3073"):
        read_binary_batch(path, label_bytes=1)


@pytest.mark.parametrize("key", [str, str.encode])
def test_python_batch_with_text_or_byte_keys(tmp_path, key):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({key("data"): PIXELS, key("labels"): [3, 1, 2]}, protocol=2))
    pictures, labels = read_python_batch(path, label_names=("labels",))
    assert np.array_equal(pictures, PIXELS.reshape(3, 3, 32, 32)) and labels[:, 0].tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("batch", "defect"),
    [
        ({"data": PIXELS}, "no entry 'labels'"),
        ({"labels": [1]}, "no entry 'data'"),
        ([], "no entry 'data'"),
        ({"data": PIXELS[:, :5], "labels": [1, 2, 3]}, "rows of 3072"),
        ({"data": PIXELS, "labels": [1, 2]}, "3 pictures but 'labels' has 2"),
        ({"data": PIXELS, "labels": ["a", "b", "c"]}, "whole numbers"),
    ],
)
def test_wrong_python_batches_are_refused(tmp_path, batch, defect):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(batch))
    with pytest.raises(Invalid, match=defect):
        read_python_batch(path, label_names=("labels",))


def test_label_names_from_both_kinds_of_file(tmp_path):
    (tmp_path / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"apple", b"bear"]}))
    (tmp_path / "fine_label_names.txt").write_text("apple\nbear\n\n")
    for name in ("meta", "fine_label_names.txt"):
        assert read_label_names(tmp_path / name, "fine_label_names") == ("apple", "bear")
