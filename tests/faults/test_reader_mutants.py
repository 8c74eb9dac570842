"""Damaged data files: one clean error, in bounded time and memory."""

from __future__ import annotations

import gzip
import json
import pickle
import resource
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from consilience.core.settings import Invalid
from consilience.data.readers import files
from consilience.data.readers.idx import read_idx
from consilience.data.readers.leaf import read_leaf
from consilience.data.readers.npz import read_npz
from consilience.data.readers.pickled import read_pickled
from consilience.data.readers.pictures import read_pictures
from consilience.data.readers.tables import read_records
from consilience.models.weights import load_weights
from consilience.stores.array_files import open_rows

MODEL = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
SECONDS, MEBIBYTES = 3.0, 200


def safetensors_file(path: Path) -> Path:
    save_file(MODEL.state_dict(), path / "w.safetensors")
    return path / "w.safetensors"


def npz_file(path: Path) -> Path:
    np.savez(path / "w.npz", **{name: value.numpy() for name, value in MODEL.state_dict().items()})
    return path / "w.npz"


def packed_file(path: Path) -> Path:
    np.savez_compressed(path / "w.npz", **{name: value.numpy() for name, value in MODEL.state_dict().items()})
    return path / "w.npz"


def pickled_file(path: Path) -> Path:
    rows = {b"data": np.zeros((30, 3072), np.uint8), b"labels": list(range(30)), b"filenames": [b"a.png"] * 30}
    (path / "data_batch_1").write_bytes(pickle.dumps(rows, protocol=2))
    return path / "data_batch_1"


def leaf_file(path: Path) -> Path:
    users = {f"u{k}": {"x": [[0.5, k], [1, 2]], "y": [k, 1]} for k in range(5)}
    content = {"users": list(users), "num_samples": [2] * 5, "user_data": users}
    (path / "a.json").write_text(json.dumps(content))
    return path / "a.json"


def packed_leaf_file(path: Path) -> Path:
    plain = leaf_file(path)
    (path / "a.json.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return path / "a.json.gz"


def numbers_file(path: Path) -> Path:
    np.savez(path / "rows.npz", x=np.zeros((4, 3)), y=np.arange(4))
    return path / "rows.npz"


def idx_file(path: Path) -> Path:
    (path / "labels").write_bytes(struct.pack(">HBBI", 0, 8, 1, 40) + bytes(40))
    return path / "labels"


def csv_file(path: Path) -> Path:
    (path / "a.csv").write_text("x,y,text\n" + "".join(f'{k},{k % 2},"word {k}"\n' for k in range(20)))
    return path / "a.csv"


def packed_csv_file(path: Path) -> Path:
    (path / "a.csv.gz").write_bytes(gzip.compress(csv_file(path).read_bytes()))
    return path / "a.csv.gz"


def json_lines_file(path: Path) -> Path:
    (path / "a.jsonl").write_text("".join(json.dumps({"x": k, "y": [1, 2], "text": "word"}) + "\n" for k in range(20)))
    return path / "a.jsonl"


def parquet_file(path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"x": list(range(20)), "y": [0.5] * 20, "text": ["word"] * 20})
    pyarrow.parquet.write_table(table, path / "a.parquet")
    return path / "a.parquet"


def picture_file(kind: str) -> Callable[[Path], Path]:
    def made(path: Path) -> Path:
        image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
        values = np.random.default_rng(0).integers(0, 255, (12, 10, 3), np.uint8)
        image.fromarray(values).save(path / f"a.{kind}")
        return path / f"a.{kind}"

    return made


def npy_file(path: Path) -> Path:
    np.save(path / "x.npy", np.zeros((6, 4), np.float32))
    return path / "x.npy"


def tensors_file(path: Path) -> Path:
    save_file({"x": torch.zeros(6, 4)}, path / "x.safetensors")
    return path / "x.safetensors"


def rows(file: Path) -> None:
    opened = open_rows(file)
    opened[: min(2, len(opened))]


def picture(file: Path) -> None:
    read_pictures([file], size=8, fit="crop", grey=False)


def weights(file: Path) -> None:
    load_weights(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)), file)


READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "weights.safetensors": (safetensors_file, weights),
    "weights.npz": (npz_file, weights),
    "packed weights.npz": (packed_file, weights),
    "CIFAR's pickles": (pickled_file, read_pickled),
    "LEAF": (leaf_file, lambda file: list(read_leaf(file.parent))),
    "packed LEAF": (packed_leaf_file, lambda file: list(read_leaf(file.parent))),
    "rows.npz": (numbers_file, read_npz),
    "IDX": (idx_file, lambda file: read_idx(file, dimensions=1)),
    "CSV": (csv_file, read_records),
    "packed CSV": (packed_csv_file, read_records),
    "JSON lines": (json_lines_file, read_records),
    "Parquet": (parquet_file, read_records),
    "PNG": (picture_file("png"), picture),
    "JPEG": (picture_file("jpg"), picture),
    "GIF": (picture_file("gif"), picture),
    "TIFF": (picture_file("tiff"), picture),
    "WebP": (picture_file("webp"), picture),
    "rows.npy": (npy_file, rows),
    "rows.safetensors": (tensors_file, rows),
}
EASY = ("CSV", "JPEG", "TIFF", "WebP")  # many of their mutants can be read


def mutant(data: bytes, rng: np.random.Generator) -> bytes:
    """Data with a few bytes changed, cut out, repeated, or a number made long."""
    for _ in range(rng.integers(1, 4)):
        at, length = int(rng.integers(len(data) or 1)), int(rng.integers(1, 40))
        kind = rng.integers(6)
        if kind == 0:
            data = data[:at] + bytes([rng.integers(256)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + rng.bytes(length) + data[at + length :]
        elif kind == 2:
            data = data[:at] + data[at + length :]
        elif kind == 3:
            data = data[: at + length] + data[at:]
        elif kind == 4:
            data = data[:at] + b"9" * int(rng.choice([1, 30, 5000])) + data[at:]
        else:
            data = data[:at]
    return data


def refused(name: str, folder: Path, count: int, seed: int) -> int:
    """Read `count` mutants; how many were refused. Anything but a clean refusal in time fails."""
    made, read = READERS[name]
    file = made(folder)
    original, number = file.read_bytes(), 0
    read(file)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for k in range(count):
        file.write_bytes(mutant(original, np.random.default_rng([seed, k])))
        began = time.process_time()
        try:
            read(file)
        except (Invalid, FileNotFoundError) as problem:
            number += 1
            assert file.name in str(problem) or str(folder) in str(problem), (k, problem)
        except Exception as problem:
            pytest.fail(f"mutant {k}: {type(problem).__name__}: {problem}")
        assert time.process_time() - began < SECONDS, k
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MEBIBYTES, f"{grown:.0f} MiB more"
    return number


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # thousands
@pytest.mark.parametrize("name", READERS)
def test_mutants_are_read_or_refused_by_name(name: str, tmp_path: Path) -> None:
    assert refused(name, tmp_path, count=80, seed=0) > (5 if name in EASY else 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_many_mutants(name: str, tmp_path: Path) -> None:
    assert refused(name, tmp_path, count=5000, seed=1) > (300 if name in EASY else 1000)


def test_an_archive_that_unpacks_to_much_more_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "w.npz", zeros=np.zeros(1 << 26, np.float32))
    with pytest.raises(Invalid, match=r"unpacks to 268,435,\d+ bytes"):
        load_weights(MODEL, tmp_path / "w.npz")
    assert torch.is_tensor(next(MODEL.parameters()))


def npy_head(shape: str) -> bytes:
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + bytes(64)


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    "head",
    [
        DEEP,
        b'{"x":' + DEEP + b"}",
        b'{"x":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,64]}}',
        b'{"x":{"dtype":"F32","shape":[true,16],"data_offsets":[0,64]}}',
        b'{"x":{"dtype":"F32","shape":["4","4"],"data_offsets":[0,64]}}',
        b'{"x":{"dtype":"F32","shape":[4,4],"data_offsets":[NaN,NaN]}}',
        b'{"x":{"dtype":["F32"],"shape":[4,4],"data_offsets":[0,64]}}',
    ],
)
def test_heads_of_tensors_that_no_writer_writes(tmp_path: Path, head: bytes) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(len(head).to_bytes(8, "little") + head + bytes(64))
    for read in (rows, weights):
        with pytest.raises(Invalid, match=r"a\.safetensors"):
            read(file)


@pytest.mark.parametrize("shape", ["(" + "-" * 9000 + "1, 4)", "(-4, -4)", "(True, 4)", f"({10**30}, 4)", "(" * 5000])
def test_heads_of_arrays_that_no_writer_writes(tmp_path: Path, shape: str) -> None:
    (tmp_path / "a.npy").write_bytes(npy_head(shape))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", npy_head(shape))
    for name, read in (("a.npy", rows), ("a.npz", read_npz), ("a.npz", weights)):
        with pytest.raises(Invalid, match=name):
            read(tmp_path / name)


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="pillow is not installed")

    def part(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = part(b"IHDR", struct.pack(">IIBBBBB", 13_000, 13_000, 8, 2, 0, 0, 0))
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + head + part(b"IDAT", b"") + part(b"IEND", b""))
    with pytest.warns(), pytest.raises(Invalid, match=r"a\.png is too large a picture \(13000 x 13000 pixels\)"):
        picture(tmp_path / "a.png")


def test_rows_that_unpack_to_much_more_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_UNPACKED", 1 << 20)
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(1 << 22, np.float32))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"x,y\n" + b"0,0\n" * (1 << 20)))
    made = {"a.npz": read_npz, "a.csv.gz": read_records}
    try:
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"x": ["word" * 100] * 20_000}), tmp_path / "a.parquet")
        made["a.parquet"] = read_records
    except ImportError:
        pass
    for name, read in made.items():
        with pytest.raises(Invalid, match=rf"{name} has [\d,]+ bytes and unpacks to"):
            read(tmp_path / name)
