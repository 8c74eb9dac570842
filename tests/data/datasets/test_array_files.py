"""Data sets whose rows stay in files: runs from a config, resumed ones too, give the bits of rows in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import consilience as cs
from consilience.core.settings import Invalid
from consilience.core.stored_rows import is_stored
from consilience.data.federate import federate
from consilience.data.partition.feature_shift import FeatureShift
from consilience.data.partition.iid import Iid
from consilience.experiments import runner
from consilience.experiments.assembly import data_fingerprint
from consilience.experiments.config.config import from_table

N = 80


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures and labels, as .npy and .safetensors."""
    rng = np.random.default_rng(2)
    x, y = rng.integers(0, 256, (N, 3, 8, 8), dtype=np.uint8), rng.integers(0, 3, N)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "last.npy", np.ascontiguousarray(x.transpose(0, 2, 3, 1)))
    np.save(tmp_path / "y.npy", y)
    np.save(tmp_path / "owner.npy", np.arange(N) % 4)
    tensors = {"x": torch.from_numpy(x), "y": torch.from_numpy(y), "other": torch.ones(7)}
    safetensors.torch.save_file(tensors, tmp_path / "all.safetensors")
    return tmp_path


def config(folder: Path, *, rounds: int = 3, **data: Any) -> Any:
    table = {
        "data": {"name": "array_files", "x": "x.npy", "y": "y.npy", **data},
        "data_dir": str(folder),
        "partition": {"name": "dirichlet", "clients": 5, "alpha": 1.0},
        "model": {"name": "cnn"},
        "algorithm": {"name": "scaffold", "lr": 0.1, "epochs": 1, "batch_size": 8},
        "engine": {"device": "cpu", "lane": "serial"},
        "evaluation": {"every": 1},
        "rounds": rounds,
        "runs": str(folder / "runs"),
    }
    return from_table(table)


def test_runs_and_resumed_runs_equal_those_in_memory(folder: Path) -> None:
    near = runner.execute(config(folder, rows="memory"), folder=folder / "near")
    far = runner.execute(config(folder), folder=folder / "far")
    runner.execute(config(folder, rounds=2), folder=folder / "part")
    resumed = runner.proceed(folder / "part", ["rounds=3"])
    assert near.history == far.history == resumed.history
    states = [result.model.state_dict() for result in (near, far, resumed)]
    assert all(torch.equal(value, state[name]) for name, value in states[0].items() for state in states)


def test_a_changed_file_is_seen_on_resume(folder: Path) -> None:
    runner.execute(config(folder), folder=folder / "run")
    x = np.load(folder / "x.npy")
    x[3, 0, 0, 0] ^= 1
    np.save(folder / "x.npy", x)
    with pytest.raises(Invalid, match=r"fingerprint\.data"):
        runner.proceed(folder / "run", ["rounds=4"])


def test_every_form_of_the_same_pictures(folder: Path) -> None:
    near = cs.load_data("array_files", x="x.npy", y="y.npy", rows="memory", data_dir=folder)
    forms = [
        {"x": "x.npy", "y": "y.npy"},
        {"x": "last.npy", "y": "y.npy"},
        {"x": "all.safetensors#x", "y": "all.safetensors#y"},
        {"x": "x.npy", "y": "y.npy", "rows": "memory"},
    ]
    for form in forms:
        found = cs.load_data("array_files", data_dir=folder, **form)
        assert is_stored(found.x) == ("rows" not in form)
        assert torch.equal(found.x[:], near.x) and torch.equal(found.test_x[:], near.test_x)
        assert torch.equal(found.y, near.y)
    np.savez(folder / "same.npz", x=np.load(folder / "x.npy"), y=np.load(folder / "y.npy"))
    other = cs.load_data("npz", file="same.npz", data_dir=folder)
    assert torch.equal(other.x, near.x) and torch.equal(other.test_x, near.test_x)


def test_groups_tests_and_prints(folder: Path) -> None:
    given = {"x": "x.npy", "y": "y.npy", "groups": "owner.npy", "data_dir": folder}
    one = cs.load_data("array_files", **given)
    assert one.group_names == ("0", "1", "2", "3") and one.groups is not None and len(one.groups) == len(one.y)
    apart = cs.load_data("array_files", **given, test_x="x.npy", test_y="y.npy")
    assert len(apart.y) == len(apart.test_y) == N
    prints = {data_fingerprint(data) for data in (one, apart, cs.load_data("array_files", **given, seed=1))}
    assert len(prints) == 3
    assert data_fingerprint(one) == data_fingerprint(cs.load_data("array_files", **given))


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    np.save(folder / "bad.npy", np.array([[1.0, np.nan]] * N, np.float32))
    np.save(folder / "good.npy", np.ones((N, 2), np.float32))
    for wrong, said in (
        ({"x": "bad.npy"}, "NaN"),
        ({"x": "good.npy", "normalise": "standard"}, "normalise"),
        ({"x": "x.npy", "test_x": "x.npy"}, "test_y"),
        ({"x": "x.npy", "test_x": "good.npy", "test_y": "y.npy"}, "good.npy"),
        ({"x": "all.safetensors#z"}, "x, y"),
    ):
        with pytest.raises(Invalid, match=said):
            cs.load_data("array_files", y="y.npy", data_dir=folder, **wrong)
    data = cs.load_data("array_files", x="x.npy", y="y.npy", data_dir=folder)
    partition = FeatureShift(inner=Iid(clients=3), kind="noise")
    with pytest.raises(Invalid, match="rows = 'memory'"):
        federate(data, partition, seed=0)


def test_pictures_are_decoded_when_they_are_needed(tmp_path: Path) -> None:
    """PNG files of unequal size, brought to one."""
    Image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for number in range(24):
        place = tmp_path / "pictures" / ("cat" if number % 2 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        side = 9 + number % 3
        Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(place / f"{number}.png")
    near, far = (
        cs.load_data("picture_folders", folder="pictures", size=8, rows=rows, data_dir=tmp_path)
        for rows in ("memory", "file")
    )
    assert is_stored(far.x) and torch.equal(far.x[:], near.x) and torch.equal(far.test_x[:], near.test_x)
    before = data_fingerprint(far)
    Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(tmp_path / "pictures" / "cat" / "1.png")
    assert before != data_fingerprint(
        cs.load_data("picture_folders", folder="pictures", size=8, rows="file", data_dir=tmp_path)
    )


def test_columns_of_arrow_files(tmp_path: Path) -> None:
    """Pictures, and lists of numbers."""
    datasets = pytest.importorskip("datasets")
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (30, 6, 6, 3), dtype=np.uint8), rng.integers(0, 2, 30).tolist()
    pictures = {"image": [pytest.importorskip("PIL.Image").fromarray(one) for one in pixels], "label": labels}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict(pictures, features=features).save_to_disk(tmp_path / "pictures")
    numbers = {"features": rng.normal(size=(30, 5)).astype(np.float32).tolist(), "label": labels}
    datasets.Dataset.from_dict(numbers).save_to_disk(tmp_path / "numbers")
    for name, options in (("pictures", {}), ("numbers", {"normalise": "none"})):
        near, far = (
            cs.load_data("hugging_face", path=str(tmp_path / name), test_split="none", rows=rows, **options)
            for rows in ("memory", "file")
        )
        assert is_stored(far.x) and torch.equal(far.x[:], near.x) and torch.equal(far.test_x[:], near.test_x)
        assert data_fingerprint(far) == data_fingerprint(
            cs.load_data("hugging_face", path=str(tmp_path / name), test_split="none", rows="file", **options)
        )
