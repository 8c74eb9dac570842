"""Python batches: data come back exactly, and nothing in a file can run."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from consilience.core.settings import Invalid
from consilience.data.readers import pickled
from consilience.data.readers.pickled import read_pickled

PIXELS = np.arange(24, dtype=np.uint8).reshape(2, 12)
DTYPE = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"


def python2_batch() -> bytes:
    """What cPickle of Python 2 wrote: byte-string keys, an array by _reconstruct, a list of labels."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01K\x02K\x0c\x86"
        + DTYPE
        + b"\x89T"
        + struct.pack("<i", PIXELS.size)
        + PIXELS.tobytes()
        + b"tb"
    )
    return b"\x80\x02}q\x00(U\x04data" + array + b"U\x06labels]q\x02(K\x06K\x09eU\x0bbatch_labelU\x01xu."


class Evil:
    """Makes a folder when an ordinary unpickler reads it."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_python2_batch_comes_back(tmp_path):
    path = tmp_path / "data_batch_1"
    path.write_bytes(python2_batch())
    batch = read_pickled(path)
    assert list(batch) == [b"data", b"labels", b"batch_label"]
    assert np.array_equal(batch[b"data"], PIXELS) and batch[b"data"].dtype == np.uint8
    assert batch[b"labels"] == [6, 9] and batch[b"batch_label"] == b"x"


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_gives_what_was_saved(tmp_path, protocol):
    shared = [1, 2]
    content = {
        "array": PIXELS,
        "fortran": np.asfortranarray(np.arange(6, dtype=">f4").reshape(2, 3)),
        b"bytes": b"\x00\xff",
        "numbers": [0, -1, 300, 70000, 2**40, 1.5, True, False, None],
        "nested": {"tuple": (1, (2, 3), ()), "empty": {}, "text": "é€"},
        "shared": [shared, shared],
        7: "number key",
    }
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    read = read_pickled(path)
    assert np.array_equal(read.pop("array"), PIXELS)
    fortran = read.pop("fortran")
    assert np.array_equal(fortran, content["fortran"]) and fortran.dtype == np.dtype(">f4")
    assert read == {key: value for key, value in content.items() if key not in ("array", "fortran")}


@pytest.mark.parametrize("protocol", range(6))
def test_code_is_refused_not_run(tmp_path, protocol):
    content = pickle.dumps({"data": Evil(tmp_path / "made")}, protocol=protocol)
    path = tmp_path / "evil"
    path.write_bytes(content)
    with pytest.raises(Invalid, match=r"evil was refused: it asks for \w+\.mkdir"):
        read_pickled(path)
    assert not (tmp_path / "made").exists()
    pickle.loads(content)
    assert (tmp_path / "made").exists()  # the file was dangerous


@pytest.mark.parametrize(
    "content",
    [
        b"cbuiltins\neval\n(V1+1\ntR.",
        b"(S'touch x'\nios\nsystem\n.",
        b"(cos\nsystem\nS'touch x'\no.",
        b"Pname\n.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02cnumpy\nndarray\n)\x81.",
        b"cnumpy\ndtype\n(VO8\ntR.",
        b"cnumpy\ndtype\n.",
        b"c_codecs\nencode\n(Vabc\nVrot13\ntR.",
        b"cnumpy\nndarray\n(tR.",
        b"}}Vx\ns.",
        b"](K\x01u.",
        b"K\x01K\x02.",
        b".",
        b"",
        b"}q\x00h\x05.",
        b"]K\x01b.",
        b"cnumpy.core.multiarray\n_reconstruct\n(tR.",
    ],
)
def test_what_is_not_data_is_refused(tmp_path, content):
    path = tmp_path / "batch"
    path.write_bytes(content)
    with pytest.raises(Invalid, match="batch"):
        read_pickled(path)


def test_array_shorter_than_its_shape_is_refused(tmp_path):
    path = tmp_path / "batch"
    path.write_bytes(python2_batch().replace(b"K\x02K\x0c\x86", b"K\x02K\x0d\x86"))
    with pytest.raises(Invalid, match="reshape"):
        read_pickled(path)


def test_containers_that_double_at_each_step_are_not_written_out(tmp_path):
    """Sixty doublings: whoever copied them would never be done."""
    path = tmp_path / "batch"
    pairs = b"".join(b"h%ch%c\x86q%ca" % (k, k, k + 1) for k in range(60))  # each appended to one list
    path.write_bytes(b"])q\x00a" + pairs + b".")
    assert len(read_pickled(path)) == 61


TEN_MB = b"X" + struct.pack("<I", 10**7) + b"a" * 10**7 + b"q\x00"
ENCODE = b"c_codecs\nencode\n(h\x00Vlatin1\ntR"
BOMBS = {
    "a place in memory far away": b"]r\xff\xff\xff\x7f.",
    "the same in digits": b"]p99999999999\n.",
    "a place before the first": b"]p-1\n.",
    "bytes that are not there": b"\x8e" + struct.pack("<Q", 1 << 40) + b"abc.",
    "a bytearray that is not there": b"\x96" + struct.pack("<Q", 1 << 40) + b"abc.",
    "text that is not there": b"X" + struct.pack("<I", 0xFFFFFFFF) + b"abc.",
    "one text encoded a thousand times": b"](" + TEN_MB + ENCODE * 1000 + b"e.",
    "a number of a million bits": b"\x8b" + struct.pack("<i", 125_000) + b"\x7f" * 125_000 + b".",
    "a number of many digits": b"L" + b"9" * 100_000 + b"L\n.",
    "lists in lists": b"]" * 200_000 + b"a" * 199_999 + b".",
    "tuples in tuples": b")" + b"\x85" * 200_000 + b".",
    "an array of many rows of nothing": python2_batch().replace(b"K\x02K\x0c\x86", b"J\xff\xff\xff\x7fK\x0c\x86"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_before_it_takes_memory(tmp_path, bomb):
    path = tmp_path / "batch"
    path.write_bytes(BOMBS[bomb])
    tracemalloc.start()
    try:
        with pytest.raises(Invalid, match="batch"):
            read_pickled(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()


def test_too_many_instructions_or_bytes_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps(list(range(300))))
    assert len(read_pickled(path)) == 300
    monkeypatch.setattr(pickled, "MOST_INSTRUCTIONS", 200)
    with pytest.raises(Invalid, match="more than 200 instructions"):
        read_pickled(path)
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(b"a" * 10**6))
    monkeypatch.setattr(pickled, "MOST_BYTES", 10**5)
    with pytest.raises(Invalid, match="more than 100,000 bytes"):
        read_pickled(packed)


@pytest.mark.parametrize("name", ["c_codecs\nencode", "cnumpy\ndtype", "cnumpy.core.multiarray\n_reconstruct"])
def test_a_file_cannot_change_what_its_names_stand_for(tmp_path, name):
    path = tmp_path / "batch"
    for state in (b"}Vrole\nVarray\ns", b"(N}Vrole\nVarray\nst"):  # attributes, and slots
        path.write_bytes(name.encode() + b"\n" + state + b"b.")
        with pytest.raises(Invalid, match="state of a name"):
            read_pickled(path)


def test_every_truncation_is_refused(tmp_path):
    content = python2_batch()
    path = tmp_path / "batch"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(Invalid):
            read_pickled(path)


@given(place=st.integers(0, 10**6), value=st.integers(0, 255))
@example(place=0, value=python2_batch()[0])  # unchanged, so that it must be read
def test_a_changed_byte_gives_data_or_a_refusal(tmp_path_factory, place, value):
    whole = python2_batch()
    content = bytearray(whole)
    content[place % len(content)] = value
    path = tmp_path_factory.mktemp("batch") / "batch"
    path.write_bytes(bytes(content))
    try:
        found = read_pickled(path)
    except Invalid as problem:
        assert str(path) in str(problem) and bytes(content) != whole
    else:
        assert isinstance(found, (dict, list, bytes, str, int, float, np.ndarray, type(None)))
