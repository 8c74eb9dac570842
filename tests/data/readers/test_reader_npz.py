"""Archives of arrays: what is read, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from consilience.core.settings import Invalid
from consilience.data.readers.npz import npz_names, read_npz


def test_named_arrays_come_back(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.arange(6).reshape(2, 3), names=np.array(["dog", "cat"]))
    assert npz_names(path) == ("x", "names")
    assert read_npz(path)["names"].tolist() == ["dog", "cat"]
    assert list(read_npz(path, ["x"])) == ["x"]


def test_object_arrays_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.array([{}, None], dtype=object))
    with pytest.raises(Invalid, match="'x' holds Python objects"):
        read_npz(path)


def test_absent_array_is_named_with_those_present(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.zeros(2))
    with pytest.raises(Invalid, match="has no array y: it has x"):
        read_npz(path, ["x", "y"])


def test_every_truncation_is_refused_by_name(tmp_path):
    whole = tmp_path / "whole.npz"
    np.savez(whole, x=np.arange(50))
    content = whole.read_bytes()
    path = tmp_path / "part.npz"
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(Invalid, match=r"part\.npz"):
            read_npz(path)


def test_damaged_values_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.arange(1000))
    content = bytearray(path.read_bytes())
    content[2000] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(Invalid, match="'x' cannot be read"):
        read_npz(path)


def test_a_single_array_is_not_an_archive(tmp_path):
    path = tmp_path / "a.npz"
    with path.open("wb") as file:
        np.save(file, np.zeros(2))
    with pytest.raises(Invalid, match="not a zip file"):
        read_npz(path)
