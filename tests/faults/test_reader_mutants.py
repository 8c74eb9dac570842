"""Damaged data files: one clean error, in bounded time and memory."""

from __future__ import annotations

import gzip
import json
import pickle
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from consilience.core.settings import Invalid
from consilience.data.readers.leaf import read_leaf
from consilience.data.readers.npz import read_npz
from consilience.data.readers.pickled import read_pickled
from consilience.models.weights import load_weights

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
}


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


@pytest.mark.parametrize("name", READERS)
def test_mutants_are_read_or_refused_by_name(name: str, tmp_path: Path) -> None:
    assert refused(name, tmp_path, count=80, seed=0) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_many_mutants(name: str, tmp_path: Path) -> None:
    assert refused(name, tmp_path, count=5000, seed=1) > 1000


def test_an_archive_that_unpacks_to_much_more_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "w.npz", zeros=np.zeros(1 << 26, np.float32))
    with pytest.raises(Invalid, match=r"unpacks to 268,435,\d+ bytes"):
        load_weights(MODEL, tmp_path / "w.npz")
    assert torch.is_tensor(next(MODEL.parameters()))
