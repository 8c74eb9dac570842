"""Checkpoints of large federations: a save adds what changed, and a crash leaves the last one whole."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from broken_disk import Crash, crash, error, failing, quick_flushes, short_write  # noqa: F401

from consilience.core import tree, versions
from consilience.core.tree import Tree
from consilience.core.versions import ClientVector
from consilience.runs import checkpoint, client_log, manifest
from consilience.runs.client_log import ClientLog
from consilience.stores.block_storage import BlockStorage, placed
from consilience.stores.client_rows import ClientRows

CLIENTS, WIDTH = 300, 64
Trees = dict[str, Tree]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "COPIED", 1000)
    monkeypatch.setattr(client_log, "WHOLE", 1000)
    monkeypatch.setattr(client_log, "SLACK", 4000)


class Life:
    """A federation whose clients change, and its trees after every round."""

    def __init__(self) -> None:
        storage = BlockStorage(
            {"own": {"w": torch.full((WIDTH,), 0.5)}, "none": {}}, torch.device("cpu"), clients=CLIENTS
        )
        self.memory, self.losses = ClientRows(storage, CLIENTS), ClientVector.filled(CLIENTS, np.nan, np.float64)
        self.z = ClientRows(BlockStorage({"w": torch.zeros(3)}, torch.device("cpu"), clients=CLIENTS), CLIENTS)
        self.chance = np.random.default_rng(0)

    def round(self, many: int = 5) -> Trees:
        ids = np.sort(self.chance.choice(CLIENTS, many, replace=False))
        drawn = torch.from_numpy(self.chance.random((many, WIDTH), dtype=np.float32))
        self.memory = self.memory.write(ids, {"own": {"w": drawn}, "none": {}})
        self.z = self.z.write(ids, {"w": drawn[:, :3].clone()})
        self.losses = self.losses.write(ids, self.chance.random(many))
        server = {"model": torch.full((2,), float(ids[0])), "z": self.z.tree()}
        return {"memory": {"client": self.memory.tree()}, "losses": {"last": self.losses.leaf()}, "server": server}


def contents(trees: Trees) -> Trees:
    return {name: tree.clone(values) for name, values in trees.items()}


def same(found: checkpoint.Checkpoint | None, expected: Trees) -> bool:
    assert found is not None
    return all(
        tiny.same(tree.map_leaves(lambda leaf: torch.nan_to_num(leaf.clone(), nan=-1), found.trees[name]),
                  tree.map_leaves(lambda leaf: torch.nan_to_num(leaf, nan=-1), expected[name]))
        for name in expected
    )  # fmt: skip


def test_a_save_adds_what_changed_and_every_generation_is_whole(tmp_path: Path) -> None:
    life, log, expected = Life(), ClientLog(), {}
    sizes = []
    for number in range(1, 9):
        trees = life.round(100 if number == 1 else 5)
        expected[number] = contents(trees)
        checkpoint.save(tmp_path, number, trees, {}, keep=9, clients=log)
        sizes.append((tmp_path / "clients-00000001.log").stat().st_size)
        assert same(checkpoint.load_latest(tmp_path), expected[number])
    row = 8 + WIDTH * 4 + 8 + 16 + 8 + 16  # of the three tables, with the client's number
    assert all(added == 5 * row + 3 * 16 for added in np.diff(sizes).tolist())
    for path in checkpoint.generations(tmp_path):
        assert same(checkpoint.load(path), expected[checkpoint.round_of(path)])
    found = checkpoint.load_latest(tmp_path)
    assert found is not None and list(found.trees["memory"]["client"]) == ["own", "none"]
    z = ClientRows.of(placed(found.trees["server"], torch.device("cpu"))["z"])
    assert z is not None and tiny.same(z.read(np.arange(9)), life.z.read(np.arange(9)))


def test_the_log_is_bounded_and_old_ones_go(tmp_path: Path) -> None:
    life, log, names = Life(), ClientLog(), set()
    for number in range(1, 30):
        trees = life.round(60)
        path = checkpoint.save(tmp_path, number, trees, {}, clients=log)
        needed = (len(life.memory.written()) + 1) * (WIDTH * 4 + 3 * 8 + 32)
        assert json.loads((path / "manifest.json").read_text())["log"]["bytes"] <= 2 * needed + 4000 + 60 * 400
        names |= {file.name for file in tmp_path.glob("*.log")}
        assert len(list(tmp_path.glob("*.log"))) <= 2
    assert len(names) > 3 and same(checkpoint.load_latest(tmp_path), contents(trees))


@pytest.mark.parametrize("rewrites", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_crash_at_any_moment_leaves_the_last_checkpoint_or_the_new_one(tmp_path: Path, rewrites: bool) -> None:
    """Also when the file is begun anew; and the run that is resumed then saves as if nothing had happened."""
    for after in (False, True):
        for moment in range(200):
            root, life, log = tmp_path / f"{after}{moment}", Life(), ClientLog()
            old = life.round(50)
            before = contents(old)
            checkpoint.save(root, 1, old, {}, clients=log)
            new = life.round()
            done = True
            with failing(moment, crash(after=after)):
                try:
                    checkpoint.save(root, 2, new, {}, clients=ClientLog() if rewrites else log)
                except Crash:
                    done = False
            found = checkpoint.load_latest(root)
            assert found is not None
            assert same(found, before if found.round == 1 else contents(new)) and (found.round == 2 or not done)
            resumed = life.round()
            checkpoint.save(root, 3, resumed, {}, keep=1, clients=ClientLog())
            assert same(checkpoint.load_latest(root), contents(resumed)) and len(list(root.glob("*.log"))) == 1
            shutil.rmtree(root)
            if done:
                break
        else:
            raise AssertionError("the disk was used too often")
        assert moment > 20


@pytest.mark.parametrize("fault", [error(errno.ENOSPC), error(errno.EIO, after=True), short_write(errno.ENOSPC)])
def test_after_an_error_of_the_disk_the_next_save_is_whole(tmp_path: Path, fault: object) -> None:
    for moment in range(200):
        root, life, log = tmp_path / str(moment), Life(), ClientLog()
        checkpoint.save(root, 1, life.round(20), {}, clients=log)
        failed = False
        with failing(moment, fault) as made:  # type: ignore[arg-type]
            try:
                checkpoint.save(root, 2, life.round(), {}, clients=log)
            except checkpoint.CheckpointError:
                failed = True
        trees = life.round()
        checkpoint.save(root, 3, trees, {}, clients=log)
        found = checkpoint.load_latest(root)
        assert found is not None and found.round == 3 and not found.skipped and same(found, contents(trees))
        shutil.rmtree(root)
        if len(made) <= moment and not failed:
            return
    raise AssertionError("the disk was used too often")


def test_a_changed_or_missing_log_is_refused(tmp_path: Path) -> None:
    life, log = Life(), ClientLog()
    for number in (1, 2):
        checkpoint.save(tmp_path, number, life.round(), {}, clients=log)
    file = tmp_path / "clients-00000001.log"
    good = file.read_bytes()
    first = json.loads((tmp_path / "round-00000001" / "manifest.json").read_text())["log"]["bytes"]
    for place in (0, 9, 100, first - 1, len(good) - 1):
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(checkpoint.CorruptCheckpoint, match=r"clients-00000001\.log.*digest"):
            checkpoint.load(tmp_path / "round-00000002")
        if place >= first:  # what the older one counts on is as it was
            found = checkpoint.load_latest(tmp_path)
            assert found is not None and found.round == 1 and found.skipped
    file.write_bytes(good + b"left by a crash")
    assert checkpoint.load(tmp_path / "round-00000002").round == 2
    file.write_bytes(good[:-1])
    with pytest.raises(checkpoint.CorruptCheckpoint, match="bytes where at least"):
        checkpoint.load(tmp_path / "round-00000002")
    file.unlink()
    with pytest.raises(checkpoint.CorruptCheckpoint, match="cannot be read"):
        checkpoint.load(tmp_path / "round-00000002")


@pytest.mark.parametrize(
    "forge",
    [
        lambda data, at: data[:at] + np.array([9], "<i8").tobytes() + data[at + 8 :],  # a table that does not exist
        lambda data, at: data[: at + 8] + np.array([10**12], "<i8").tobytes() + data[at + 16 :],  # too many rows
        lambda data, at: data[: at + 8] + np.array([-1], "<i8").tobytes() + data[at + 16 :],
        lambda data, at: data[: at + 16] + np.array([CLIENTS], "<i8").tobytes() + data[at + 24 :],  # no such client
        lambda data, at: data[: at + 16] + data[at + 24 : at + 32] + data[at + 24 :],  # one twice
        lambda data, at: data[at:],  # no first row
        lambda data, at: data[:at],  # the other tables are missing
    ],
)
def test_a_forged_log_with_the_right_digest_is_refused(tmp_path: Path, forge: object) -> None:
    checkpoint.save(tmp_path, 1, Life().round(), {})
    file, written = tmp_path / "clients-00000001.log", tmp_path / "round-00000001" / "manifest.json"
    length = 16 + 8 + WIDTH * 4
    data = forge(file.read_bytes(), length)  # type: ignore[operator]
    file.write_bytes(data)
    content = json.loads(written.read_text())
    content.pop("digest")
    content["log"] |= {"bytes": len(data), "sha256": __import__("hashlib").sha256(data).hexdigest()}
    content["digest"] = manifest.digest_of(content)
    written.write_bytes(manifest.canonical.encode(content, pretty=True))
    with pytest.raises(checkpoint.CorruptCheckpoint, match=r"clients-00000001\.log"):
        checkpoint.load(tmp_path / "round-00000001")


def test_checkpoints_of_format_1_are_read(tmp_path: Path) -> None:
    trees = {"memory": {"client": {"w": torch.rand(3, 4)}}}
    path = checkpoint.save(tmp_path, 1, trees, {}) / "manifest.json"
    content = json.loads(path.read_text())
    assert content.pop("tables") == [] and content.pop("log") is None and content.pop("digest")
    content["format"] = 1
    content["digest"] = manifest.digest_of(content)
    path.write_bytes(manifest.canonical.encode(content, pretty=True))
    found = checkpoint.load_latest(tmp_path)
    assert found is not None and tiny.same(found.trees["memory"], trees["memory"])
