"""Partitions on disk, and by name."""

import hashlib
import os
import struct

import numpy as np
import pytest

from consilience.core.settings import Invalid
from consilience.data.partition import (
    PARTITIONS,
    Dirichlet,
    FeatureShift,
    Iid,
    Mixture,
    Quantity,
    Stored,
    fingerprint,
    load,
    partition,
    save,
)

PARTS = [np.array([3, 1]), np.array([], dtype=np.int64), np.array([0, 2, 4])]


def test_fingerprint_is_the_documented_hash():
    packed = struct.pack("<q3q5q", 3, 2, 0, 3, 3, 1, 0, 2, 4)
    assert fingerprint(PARTS) == hashlib.sha256(packed).hexdigest()
    assert fingerprint([p.astype(np.int32) for p in PARTS]) == fingerprint(PARTS)


def test_fingerprint_tells_apart_what_differs():
    others = [
        [PARTS[0], PARTS[2]],
        [PARTS[0][::-1], PARTS[1], PARTS[2]],
        [PARTS[2], PARTS[1], PARTS[0]],
        [np.array([3, 1, 0]), PARTS[1], np.array([2, 4])],
        [],
    ]
    assert len({fingerprint(p) for p in [PARTS, *others]}) == 6


@pytest.mark.parametrize("parts", [PARTS, [], [np.array([], dtype=np.int64)]])
def test_saved_partitions_come_back(tmp_path, parts):
    path = tmp_path / "deeper" / "partition.npz"
    save(parts, path)
    back = load(path)
    assert len(back) == len(parts)
    assert all(np.array_equal(a, b) and b.dtype == np.int64 for a, b in zip(parts, back))
    assert os.listdir(path.parent) == ["partition.npz"]  # no temporary file stays


def test_a_failed_save_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "partition.npz"
    save(PARTS, path)

    def full(*_):
        raise OSError(28, "No space left on device")

    for call in ("fsync", "replace"):
        with monkeypatch.context() as broken:
            broken.setattr(os, call, full)
            with pytest.raises(OSError, match="No space"):
                save([np.arange(9)], path)
        assert fingerprint(load(path)) == fingerprint(PARTS)
        assert os.listdir(tmp_path) == ["partition.npz"]


def test_damage_is_found(tmp_path):
    path = tmp_path / "partition.npz"
    save([np.arange(40), np.arange(40, 100)], path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        hurt = bytearray(whole)
        place = int(rng.integers(len(hurt)))
        hurt[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(hurt)
        try:
            back = load(path)
        except Invalid as problem:
            assert str(path) in str(problem)
            refused += 1
        else:  # a bit that does not matter, such as a date in the archive's directory
            assert fingerprint(back) == fingerprint([np.arange(40), np.arange(40, 100)])
    assert 0 < refused < 300
    for cut in (0, 1, 30, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(Invalid, match=r"partition\.npz"):
            load(path)


def test_foreign_files_are_refused_and_nothing_is_unpickled(tmp_path):
    path = tmp_path / "foreign.npz"
    np.savez(path, a=np.arange(3))
    with pytest.raises(Invalid, match="is not a saved partition: it holds a"):
        load(path)
    np.savez(path, rows=np.array([print], dtype=object), offsets=np.array([0, 1]), sha256=np.zeros(32, np.uint8))
    with pytest.raises(Invalid, match=r"cannot be read as an .npz of arrays"):
        load(path)
    np.savez(path, rows=np.arange(3), offsets=np.array([0, 2]), sha256=np.zeros(32, np.uint8))
    with pytest.raises(Invalid, match="is damaged: its offsets"):
        load(path)
    np.savez(path, rows=np.arange(3), offsets=np.array([0, 3]), sha256=np.zeros(32, np.uint8))
    with pytest.raises(Invalid, match="do not match the fingerprint"):
        load(path)
    with open(path, "wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(Invalid, match="one bare array"):
        load(path)
    with pytest.raises(FileNotFoundError, match=r"no partition file at .*absent.npz: save one"):
        load(tmp_path / "absent.npz")


def test_stored_partitions_are_read_back_and_checked_against_the_data(tmp_path):
    path = str(tmp_path / "partition.npz")
    save(PARTS, path)
    parts = Stored(path=path).split(np.zeros(6, int), groups=None, seed=0)
    assert [p.tolist() for p in parts] == [[3, 1], [], [0, 2, 4]]
    with pytest.raises(Invalid, match="names row 4, but the data have rows 0 to 3"):
        Stored(path=path).split(np.zeros(4, int), groups=None, seed=0)
    save([np.array([1, 2]), np.array([2])], path)
    with pytest.raises(Invalid, match="gives row 2 to more than one place"):
        Stored(path=path).split(np.zeros(4, int), groups=None, seed=0)
    save([np.array([-1])], path)
    with pytest.raises(Invalid, match="names row -1"):
        Stored(path=path).split(np.zeros(4, int), groups=None, seed=0)


def test_stored_reads_arrays_named_by_client(tmp_path):
    path = str(tmp_path / "clients.npz")
    np.savez(path, a_client0=np.array([1, 0], np.int32), a_client1=np.array([2]), b_client0=np.array([0.5]))
    parts = Stored(path=path, prefix="a").split(np.zeros(4, int), groups=None, seed=0)
    assert [p.tolist() for p in parts] == [[1, 0], [2]]
    with pytest.raises(Invalid, match=r"Stored.prefix = 'c' is not in .*: it has a, b"):
        Stored(path=path, prefix="c").split(np.zeros(4, int), groups=None, seed=0)
    with pytest.raises(Invalid, match="b_client0 must be a list of row numbers, not float64"):
        Stored(path=path, prefix="b").split(np.zeros(4, int), groups=None, seed=0)


def test_the_catalogue_builds_by_name():
    assert partition("iid", clients=3) == Iid(clients=3)
    assert partition("dirichlet", clients=3, alpha=1) == Dirichlet(clients=3, alpha=1.0)
    assert partition("quantity", clients=2, kind="sizes", sizes=[1, 2]) == Quantity(
        clients=2, kind="sizes", sizes=(1, 2)
    )
    nested = partition(
        "mixture",
        parts=[
            [0.5, {"name": "iid", "clients": 2}],
            [0.5, {"name": "feature-shift", "kind": "noise", "inner": {"name": "iid", "clients": 1}}],
        ],
    )
    assert nested == Mixture(parts=((0.5, Iid(clients=2)), (0.5, FeatureShift(inner=Iid(clients=1), kind="noise"))))
    for name in PARTITIONS:
        assert name == name.lower().replace("-", "_")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dirichlett", {}, r"partition.name = 'dirichlett' is not one of .*did you mean 'dirichlet'\?"),
        (3, {}, "partition.name = 3 is not one of iid"),
        ("dirichlet", {"clients": 2, "alpa": 1}, r"partition.alpa is not a setting \(did you mean 'alpha'\?\)"),
        ("dirichlet", {"clients": 2}, "partition.alpha is missing: dirichlet needs it"),
        ("dirichlet", {"clients": 2, "alpha": "x"}, "partition.alpha = 'x' must be a number"),
        ("iid", {"clients": 0}, "partition.clients = 0 is out of range: it must be >= 1"),
        ("mixture", {"parts": [[1.0, {"name": "iid", "clients": 0}]]}, r"partition.parts\[0\]\[1\].clients = 0"),
        ("feature_shift", {"kind": "noise", "inner": {}}, "partition.inner.name = None is not one of"),
        ("feature_shift", {"kind": "noise", "inner": "iid"}, "partition.inner = 'iid' is no Partition"),
    ],
)
def test_the_catalogue_names_what_is_wrong(name, options, message):
    with pytest.raises(Invalid, match=message):
        partition(name, **options)
