"""Rows that lie on the machines of a cluster: described to the driver, read where they lie, never moved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from declared import build
from ray_machines import Machines, machines

from consilience.core import tree
from consilience.core.federation import Federation
from consilience.core.rounds import run
from consilience.core.settings import Invalid
from consilience.data.datasets.node_files import NodeFiles
from consilience.engines.ray import node_data, session
from consilience.engines.ray.cluster import RayCluster
from consilience.engines.ray.node_data import ClientDescription, NodeFederation, NodeShare
from consilience.engines.vectorised.engine import Vectorised
from consilience.experiments import runner
from consilience.experiments.assembly import assemble
from consilience.experiments.client_tests import federated_test
from consilience.experiments.config import config
from consilience.task.task import Task

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'consilience[ray]'")

SETTINGS: dict[str, Any] = {"dtype": "float64", "lane": "serial", "device": "cpu"}
NAMES = ("amsterdam", "bergen", "cork", "delft", "evora")


def _write(folder: Path, clients: Any, seed: int = 0) -> None:
    """Files of these clients, each with the same rows whatever machine it is written for."""
    folder.mkdir(exist_ok=True)
    rows = tiny.federation(seed=seed)
    assert rows.test is not None
    for client in clients:
        (x, y), (test_x, test_y) = rows.train.of(client), rows.test.of(client)
        arrays = {"x_train": x.float().numpy(), "y_train": y.numpy()}
        np.savez(folder / f"{NAMES[client]}.npz", **arrays, x_test=test_x.float().numpy(), y_test=test_y.numpy())


def _whole() -> Federation:
    """All rows in one process, as the files hold them."""
    rows = tiny.federation()
    assert rows.test is not None
    return Federation.from_clients(
        [(rows.train.of(k)[0].float(), rows.train.of(k)[1]) for k in range(5)],
        client_tests=[(rows.test.of(k)[0].float(), rows.test.of(k)[1]) for k in range(5)],
        classes=3,
    )


def _description(digest: str = "d", rows: int = 4, shape: tuple[int, ...] = (3,)) -> ClientDescription:
    return ClientDescription(digest, rows, 2, (("x", shape, "float32"), ("y", (), "int64")), 2)


def _told(*clients: tuple[str, dict[str, ClientDescription]]) -> dict[str, dict[str, ClientDescription]]:
    return dict(clients)


def _found(told: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **more: Any) -> NodeFederation:
    """What machines that say this amount to, without any."""
    monkeypatch.setattr(session, "join", lambda *_: None)
    monkeypatch.setattr(session, "leave", lambda: None)
    monkeypatch.setattr(session, "machines", lambda: {key: {} for key in told})
    monkeypatch.setattr(node_data, "_described", lambda _, asked: {machine: told[machine] for machine in asked})
    return NodeFederation.find(NodeFiles(folder="/nowhere"), **more)


def test_clients_are_shared_out_to_machines_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    told = _told(
        ("m1", {"a": _description(rows=9), "b": _description("b", rows=2), "c": _description("c", rows=3)}),
        ("m2", {"c": _description("c", rows=3), "d": _description("e", rows=4)}),
        ("m3", {}),
    )
    found = _found(told, monkeypatch)
    assert found.names == ("a", "b", "c", "d") and found.train.sizes.tolist() == [9, 2, 3, 4] and found.classes == 3
    owner, having = found.shares(2)
    assert owner.tolist() == [0, 0, 1, 1] and having == [{"m1"}, {"m2"}]  # c goes where there are fewer rows
    owner, having = found.shares(3)
    assert owner.tolist() == [0, 1, 2, 2] and having == [{"m1"}, {"m1"}, {"m2"}]
    with pytest.raises(Invalid, match="lie on 2 machines: use 2"):
        found.shares(1)
    x, y = found.example()
    assert (x.shape, y.dtype) == ((2, 3), torch.int64)
    monkeypatch.setattr(session, "machines", lambda: {key: {} for key in [*told, "m4", "m5"]})
    told.update(_told(("m4", {"a": _description(rows=9)}), ("m5", {"b": _description("other", rows=2)})))
    assert found.look_again() and found.machines["m4"] == {0} and found.machines["m5"] == set()
    assert not found.look_again()


@pytest.mark.parametrize(
    ("told", "more", "why"),
    [
        (_told(("m1", {"a": _description()}), ("m2", {"a": _description("e")})), {}, "different rows of client 'a'"),
        (_told(("m1", {"a": _description(), "b": _description(shape=(4,))})), {}, "client 'b' has rows of"),
        (_told(("m1", {}), ("m2", {})), {}, r"no machine of the cluster \(2 asked\) has any client's rows"),
        (_told(("m1", {"a": _description()})), {"classes": 2}, "class number 2: give more"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    told: Any, more: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Invalid, match=why):
        _found(told, monkeypatch, **more)


def test_files_are_read_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_DATA", str(tmp_path))
    _write(tmp_path / "clients", [0, 3])
    source = NodeFiles(folder="$SITE_DATA/clients")
    assert source.names() == ["amsterdam", "delft"] and NodeFiles(folder="/nowhere").names() == []
    described = node_data.describe(source)
    assert described["delft"].rows == 12 and described["delft"].test_rows == 3
    share = NodeShare(source, ("amsterdam", "delft"), tuple(one.digest for one in described.values()), 3)
    whole = _whole().among(np.array([0, 3]))
    assert torch.equal(share.federation().train.x, whole.train.x) and share.federation().names == share.names
    np.savez(tmp_path / "clients" / "delft.npz", x=np.zeros((10, 2), np.float32), y=np.arange(10) % 3)
    with pytest.raises(Invalid, match="rows of client 'delft' have changed on their machine"):
        share.federation()
    x, y, test_x, test_y = source.read("delft")
    assert (len(x), len(y), len(test_x), len(test_y)) == (8, 8, 2, 2)  # drawn, as the archive has no test rows
    with pytest.raises(Invalid, match="file of client 'oslo' is not on this machine"):
        source.read("oslo")


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[tuple[Machines, Any, Path]]:
    """A head without rows and two machines that have some clients each; one client's file is on both."""
    _write(tmp_path / "a", [0, 1, 4])
    _write(tmp_path / "b", [2, 3, 4])
    with machines(num_cpus=0) as cluster:
        cluster.add(num_cpus=1, env_vars={"SITE_DATA": str(tmp_path / "a")})
        other = cluster.add(num_cpus=1, env_vars={"SITE_DATA": str(tmp_path / "b")})
        yield cluster, other, tmp_path


@pytest.mark.slow
def test_a_run_from_a_config(sites: tuple[Machines, Any, Path], tmp_path: Path) -> None:
    """The model of the same rows read here; other rows are refused when the run is resumed."""
    cluster, _, folder = sites
    shared = ["threads=1", "partition=natural", "algorithm=scaffold", "algorithm.epochs=1", "model.hidden=[16]"]
    shared += ["engine.dtype=float64", "engine.lane=serial", "engine.device=cpu", f"runs={tmp_path / 'runs'}"]
    there = ["data=node_files", "data.folder=$SITE_DATA", "engine=ray", f"engine.address={cluster.address}"]
    runner.execute(config.load(None, [*shared, *there, "rounds=2", "name=there"]))
    found = runner.proceed(tmp_path / "runs" / "there", ["rounds=3"])
    _write(tmp_path / "all", range(5))
    here = ["data=client_files", f"data.folder={tmp_path / 'all'}", "data.normalise=none"]
    alone = runner.execute(config.load(None, [*shared, *here, "rounds=3", "name=here"]))
    models = [(tmp_path / "runs" / name / "model.safetensors").read_bytes() for name in ("there", "here")]
    assert models[0] == models[1]
    for key in ("accuracy", "client_accuracy_worst_tenth", "drift", "bytes_up"):
        assert found.history[-1][key] == pytest.approx(alone.history[-1][key])
    _write(folder / "a", [1], seed=7)
    with pytest.raises(Invalid, match=r"fingerprint\.data"):
        runner.proceed(tmp_path / "runs" / "there", ["rounds=4"])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["engine=vectorised", "partition=natural"], r"needs engine = 'ray'"),
        (["engine=ray"], "set partition = 'natural'"),
        (["engine=ray", "partition=natural", "validation.share=0.2"], "validation.share needs the rows in one place"),
        (["engine=ray", "partition=natural", "algorithm=centralised"], "centralised' needs the rows in one place"),
    ],
)
def test_settings_that_need_the_rows_here_are_refused(given: list[str], why: str) -> None:
    with pytest.raises(Invalid, match=why):
        assemble(config.load(None, ["data=node_files", "data.folder=/nowhere", *given]))


@pytest.mark.slow
def test_rows_stay_where_they_lie(sites: tuple[Machines, Any, Path]) -> None:
    """The bits of one process; without a machine, its clients are unavailable, and come back with it."""
    cluster, other, folder = sites
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    found = NodeFederation.find(NodeFiles(folder="$SITE_DATA"), address=cluster.address)
    assert found.names == NAMES and found.classes == 3
    engine = RayCluster(Task(tiny.mlp()), found, workers=2, address=cluster.address, **SETTINGS)
    alone = Vectorised(Task(tiny.mlp()), _whole(), **SETTINGS)
    expected = list(run(build("scaffold"), alone, rounds=2, seed=3))
    rounds = run(build("scaffold"), engine, rounds=12, seed=3)
    for one, done in zip(expected, itertools.islice(rounds, 2), strict=True):
        assert tiny.same(one.model, tree.here(done.model))
        assert tiny.same(one.snapshot.memory, tree.here(done.snapshot.memory))
    tested = federated_test(engine)
    assert tested is not None
    scores = tested(expected[-1].model)
    assert scores is not None and scores.rows == 15
    with pytest.raises(Invalid, match="lie on the machines of the cluster"):
        engine.store("train")
    cluster.kill(other)
    gone = np.flatnonzero(engine.owner == engine.owner[2])
    lost = next(rounds)  # whoever of them was chosen is lost
    assert not np.isin(lost.cohort.ids, gone).any()
    if "worker_lost" in lost.cohort.counts:
        assert np.asarray(engine.available(3, 3)).tolist() == [client not in gone for client in range(5)]
    cluster.add(num_cpus=1, env_vars={"SITE_DATA": str(folder / "b")})
    for done in rounds:
        if np.isin(done.cohort.ids, gone).any():
            break
        processes = engine._pool.serving.processes if engine._pool else None
        assert processes is not None
        if processes._starting:
            ray.wait([one.started for one in processes._starting], timeout=20)
    else:
        raise AssertionError("the clients of the machine that came back took no part")
    engine.close()
    torch.set_num_threads(before)
