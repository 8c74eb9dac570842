"""IDX files: every value type, and every way a file can be wrong."""

from __future__ import annotations

import gzip
import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consilience.core.settings import Invalid
from consilience.data.readers.idx import VALUE_TYPES, read_idx


def idx_bytes(array: np.ndarray, code: int) -> bytes:
    header = struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape)
    return header + array.astype(VALUE_TYPES[code]).tobytes()


@pytest.mark.parametrize("code", VALUE_TYPES)
@pytest.mark.parametrize("packed", [False, True])
def test_values_come_back(tmp_path, code, packed):
    array = np.arange(24).reshape(2, 3, 4) * 5
    path = tmp_path / ("a.gz" if packed else "a")
    path.write_bytes(gzip.compress(idx_bytes(array, code)) if packed else idx_bytes(array, code))
    assert np.array_equal(read_idx(path, dimensions=3), array)


@pytest.mark.parametrize(
    ("content", "defect"),
    [
        (b"\x00\x00", "cut off: it has 2 bytes"),
        (b"\x00\x01\x08\x01" + b"\x00" * 8, "wrong magic number 0 1 8 1"),
        (b"\x00\x00\x07\x01" + b"\x00" * 8, "wrong magic number 0 0 7 1"),
        (b"\x00\x00\x08\x03" + b"\x00" * 12, "wrong magic number 0 0 8 3"),
        (b"\x00\x00\x08\x01\x00", "inside its header"),
        (idx_bytes(np.arange(5), 8)[:-1], "cut off: its header announces .* 5 bytes, 4 follow"),
        (idx_bytes(np.arange(5), 8) + b"\x00", "too long"),
        (struct.pack(">HBBI", 0, 8, 1, 2**32 - 1) + b"\x00", "cut off"),
    ],
)
def test_wrong_files_are_refused_with_the_defect(tmp_path, content, defect):
    path = tmp_path / "labels-idx1-ubyte"
    path.write_bytes(content)
    with pytest.raises(Invalid, match=defect) as problem:
        read_idx(path, dimensions=1)
    assert str(path) in str(problem.value)


SMALL, ANY = st.integers(0, 5), st.integers(0, 2**32 - 1)


@given(shape=st.tuples(SMALL, SMALL) | st.tuples(ANY, ANY), data=st.data())
def test_exactly_the_announced_bytes_are_read_and_all_else_is_refused(tmp_path_factory, shape, data):
    path = tmp_path_factory.mktemp("idx") / "a"
    announced = math.prod(shape)
    values = data.draw(st.binary(max_size=40) | st.binary(min_size=min(announced, 40), max_size=min(announced, 40)))
    path.write_bytes(b"\x00\x00\x08\x02" + struct.pack(">2I", *shape) + values)
    if len(values) == announced:
        found = read_idx(path, dimensions=2)
        assert found.shape == shape and found.tobytes() == values
    else:
        with pytest.raises(Invalid, match="cut off" if len(values) < announced else "too long"):
            read_idx(path, dimensions=2)


@given(content=st.binary(max_size=11))
def test_no_beginning_causes_another_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("idx") / "a"
    path.write_bytes(content)
    with pytest.raises(Invalid, match=r"cut off|wrong magic number"):
        read_idx(path, dimensions=2)
