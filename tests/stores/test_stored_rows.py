"""Rows in files give the same bits as rows in memory, in every lane, and only those that are needed are read."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import consilience as cs
from consilience.core import tree
from consilience.core.federation import Rows
from consilience.core.settings import Invalid
from consilience.core.stored_rows import concatenated, is_stored
from consilience.core.tree import Tree
from consilience.engines.vectorised.engine import Vectorised
from consilience.stores import staging
from consilience.stores.array_files import ArrayFile, open_rows

N, SIZES = 60, (12, 0, 20, 7, 9)
MEAN, DEVIATION = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


def pictures() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (N, 3, 6, 6), dtype=np.uint8)


def scaled(values: np.ndarray) -> torch.Tensor:
    """As data sets in memory are scaled."""
    from consilience.data.datasets.prepare.pictures import shift_pictures

    return shift_pictures(values, np.array(MEAN), np.array(DEVIATION))


def federation(x: Any) -> cs.Federation:
    y = torch.arange(N) % 4
    order = np.random.default_rng(1).permutation(N)
    parts = np.split(order[: sum(SIZES)], np.cumsum(SIZES)[:-1])
    train = Rows.gather(x, y, parts, weight=torch.linspace(0.5, 1.5, N))
    test = Rows.gather(x, y, [part[:3] for part in parts], keep_rest=True)
    return cs.Federation(train=train, test=test, classes=4)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))


def trained(x: Any, **settings: Any) -> tuple[Tree, Vectorised]:
    engine = Vectorised(cs.Task(network()), federation(x), device="cpu", **settings)
    algorithm = cs.scaffold(lr=0.1, epochs=2, batch_size=5, selection=cs.Uniform(count=3))
    *_, last = cs.run(algorithm, engine, rounds=3, seed=5)
    return {"server": last.snapshot.server, "memory": tree.here(last.snapshot.memory)}, engine


def equal(a: Tree, b: Tree) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


@pytest.mark.parametrize("lane", ["serial", "streams", "batched", "batched-matmul"])
@pytest.mark.parametrize("settings", [{}, {"clients_at_once": 2, "dtype": "float64"}])
def test_equal_bits_in_every_lane(
    tmp_path: Path, lane: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where groups are cut so that their rows are small."""
    np.save(tmp_path / "x.npy", pictures())
    stored = open_rows(tmp_path / "x.npy", mean=MEAN, deviation=DEVIATION)
    monkeypatch.setattr(staging, "GROUP_BYTES", 1)
    expected, _ = trained(scaled(pictures()), lane=lane, **settings)
    for where in ("auto", "device", "host"):
        found, engine = trained(stored, lane=lane, rows=where, **settings)
        assert equal(expected, found), where
        assert is_stored(engine.stores["train"].x) == (where == "auto")
        assert where == "auto" or engine.stores["train"].x.dtype == torch.uint8


def test_only_the_rows_of_a_group_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, in ascending order, and those of the next group before this one has trained."""
    np.save(tmp_path / "x.npy", pictures())
    stored, read = open_rows(tmp_path / "x.npy"), list[np.ndarray]()
    before = ArrayFile.read
    monkeypatch.setattr(ArrayFile, "read", lambda self, rows, out: (read.append(rows), before(self, rows, out))[1])
    engine = Vectorised(cs.Task(network()), federation(stored), device="cpu", lane="batched", clients_at_once=1)
    algorithm = cs.fedavg(lr=0.1, epochs=1, batch_size=5, selection=cs.Uniform(count=2))
    assert not read
    done = next(cs.run(algorithm, engine, rounds=1, seed=2))
    numbers = engine.federation.train.x.rows  # type: ignore[attr-defined]
    owned = [numbers[np.arange(SIZES[k]) + int(engine.federation.train.starts[k])] for k in done.cohort.ids]
    asked = [rows for rows in read if len(rows) > 5]  # without the one step that measures what fits
    assert sorted(map(len, asked)) == sorted(map(len, owned))
    assert sorted(np.concatenate(asked).tolist()) == sorted(np.concatenate(owned).tolist())


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.uint8])
def test_files_hold_what_was_saved(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    values = torch.arange(60).reshape(10, 6).to(dtype)
    path = tmp_path / f"x.{kind}"
    if kind == "npy":
        np.save(path, values.numpy())
    else:
        safetensors.torch.save_file({"a": torch.zeros(3), "x": values, "z": torch.ones(5)}, path)
    x = open_rows(path, None if kind == "npy" else "x")
    expected = values.to(torch.float32 if dtype.is_floating_point else torch.int64)
    assert torch.equal(x[:], expected) and x.dtype == expected.dtype
    assert torch.equal(x[[7, 2, 2, 3]], expected[[7, 2, 2, 3]])
    again = pickle.loads(pickle.dumps(x.take(np.array([4, 1]))))
    assert is_stored(again) and torch.equal(again.here(), expected[[4, 1]])
    both = concatenated([x.take(np.array([1, 2])), open_rows(path, x.source.source.name).take(np.array([9]))])
    assert is_stored(both) and torch.equal(both[:], expected[[1, 2, 9]])


def test_digests_follow_the_bytes_and_the_choice_of_rows(tmp_path: Path) -> None:
    values = pictures()
    np.save(tmp_path / "a.npy", values)
    safetensors.torch.save_file({"x": torch.from_numpy(values)}, tmp_path / "a.safetensors")
    values[N - 1, 2, 5, 5] ^= 1
    np.save(tmp_path / "b.npy", values)
    a, same, b = (ArrayFile(tmp_path / name).digest() for name in ("a.npy", "a.safetensors", "b.npy"))
    assert a == same != b
    x = open_rows(tmp_path / "a.npy")
    prints = {x.source.print_of(rows) for rows in (None, np.arange(N), np.arange(N)[::-1])}
    prints.add(open_rows(tmp_path / "a.npy", mean=0.5).source.print_of(None))
    assert len(prints) == 4


def test_clients_with_a_file_each(tmp_path: Path) -> None:
    y = torch.arange(N) % 4
    clients, parts = {}, np.array_split(np.arange(N), 4)
    for number, rows in enumerate(parts):
        np.save(tmp_path / f"{number}.npy", pictures()[rows])
        clients[str(number)] = (open_rows(tmp_path / f"{number}.npy", mean=MEAN, deviation=DEVIATION), y[rows])
    stored = cs.Federation.from_clients(clients)
    assert is_stored(stored.train.x)
    near = cs.Federation.from_clients({str(k): (scaled(pictures())[rows], y[rows]) for k, rows in enumerate(parts)})
    results = []
    for one in (near, stored):
        engine = Vectorised(cs.Task(network()), one, device="cpu", lane="batched")
        *_, last = cs.run(cs.fedavg(lr=0.1, batch_size=8), engine, rounds=2)
        results.append(last.model)
    assert equal(*results)


@pytest.mark.parametrize("damage", ["short", "columns", "text", "version", "name", "offsets", "missing", "mean"])
def test_bad_files_are_refused(tmp_path: Path, damage: str) -> None:
    path, values = tmp_path / "x.npy", np.zeros((4, 3), np.float32)
    np.save(path, np.asfortranarray(values) if damage == "columns" else values)
    if damage == "short":
        path.write_bytes(path.read_bytes()[:-4])
    elif damage == "text":
        path.write_text("no array")
    elif damage == "version":
        path.write_bytes(b"\x93NUMPY\x09\x00" + path.read_bytes()[8:])
    elif damage in ("name", "offsets"):
        path = tmp_path / "x.safetensors"
        safetensors.torch.save_file({"a": torch.zeros(4, 3), "b": torch.zeros(2)}, path)
        if damage == "offsets":
            path.write_bytes(path.read_bytes().replace(b"[0,48]", b"[0,40]"))
    elif damage == "missing":
        path = tmp_path / "none.npy"
    expected = FileNotFoundError if damage == "missing" else Invalid
    with pytest.raises(expected, match=str(path)):
        open_rows(path, "a" if damage == "offsets" else None, mean=0.5 if damage == "mean" else None)
