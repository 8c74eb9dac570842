"""Finding files: where, in which order, and what a missing or damaged one says."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from consilience.core.settings import Invalid
from consilience.data.readers.files import (
    chosen_file,
    chosen_source,
    data_directory,
    read_bytes,
    read_text,
    source,
)

HOW = "Its home is https://example.org."


def test_data_directory_prefers_argument_then_variable_then_data(monkeypatch, tmp_path):
    monkeypatch.setenv("CONSILIENCE_DATA", str(tmp_path))
    assert data_directory("elsewhere") == Path("elsewhere")
    assert data_directory(None) == tmp_path
    monkeypatch.delenv("CONSILIENCE_DATA")
    assert data_directory(None) == Path("data")
    with pytest.raises(Invalid, match="data_dir = 3"):
        data_directory(3)  # type: ignore[arg-type]


def test_own_folder_comes_before_the_top(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "a.bin").write_bytes(b"top")
    assert source("set", tmp_path, how=HOW).find("a.bin") == tmp_path / "a.bin"
    (tmp_path / "set" / "a.bin").write_bytes(b"own")
    assert source("set", tmp_path, how=HOW).find("a.bin") == tmp_path / "set" / "a.bin"


def test_files_of_one_set_are_never_taken_from_two_folders(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train").write_bytes(b"")
    (tmp_path / "test").write_bytes(b"")
    with pytest.raises(FileNotFoundError) as problem:
        source("set", tmp_path, how=HOW).locate({"pair": ["train", "test"]})
    assert f"{tmp_path / 'set'} has train but not test" in str(problem.value)


def test_missing_files_name_everything_that_would_do(tmp_path):
    with pytest.raises(FileNotFoundError) as problem:
        source("set", tmp_path, folders=("other",), how=HOW).locate({"a": ["x-ubyte", "y.bin"], "b": ["all.npz"]})
    message = str(problem.value)
    for part in ("'set'", "x-ubyte[.gz], y.bin[.gz]", "all.npz", str(tmp_path / "set"), str(tmp_path / "other"), HOW):
        assert part in message
    assert "CONSILIENCE_DATA" in message and "data_dir" in message


def test_gz_files_are_found_and_unpacked(tmp_path):
    (tmp_path / "a.bin.gz").write_bytes(gzip.compress(b"hello"))
    path = source("set", tmp_path, how=HOW).find("a.bin")
    assert path.name == "a.bin.gz" and read_bytes(path) == b"hello"


@pytest.mark.parametrize("damage", [lambda b: b[:-6], lambda b: b"no" + b[2:], lambda b: b[:12] + b"\xff" + b[13:]])
def test_damaged_gz_is_refused_by_name(tmp_path, damage):
    path = tmp_path / "a.gz"
    path.write_bytes(damage(gzip.compress(b"hello" * 100)))
    with pytest.raises(Invalid, match=r"a\.gz is a damaged"):
        read_bytes(path)


def test_text_in_another_encoding_is_refused_with_its_place(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(Invalid, match="byte 3"):
        read_text(path)
    assert read_text(path, "latin-1") == "café"


def test_chosen_files_and_folders_say_where_they_were_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.csv"):
        chosen_file("nothing.csv", tmp_path, how=HOW)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        chosen_source("nowhere", tmp_path, how=HOW)
    with pytest.raises(Invalid, match="is a folder"):
        read_bytes(tmp_path)
