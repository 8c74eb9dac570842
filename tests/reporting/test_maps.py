"""Maps of difference: what is recorded of updates, and what is drawn from it, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sample_runs import SMALL, real, written

from consilience.core.exchange import Cohort
from consilience.core.settings import Invalid
from consilience.experiments import update_log
from consilience.experiments.config import config
from consilience.reporting import static
from consilience.reporting.charts import CLIENT, Axis, Heat, Scale
from consilience.reporting.figures import maps
from consilience.reporting.figures.maps import Updates
from consilience.reporting.figures.similarity import MEAN
from consilience.reporting.runs import RunData, find
from consilience.runs.folder import RunFolder


def cohort(updates: np.ndarray, ids: np.ndarray, heard: np.ndarray | None = None) -> tuple[Cohort, dict]:
    """Replies whose models lie so far from the one they were sent."""
    half = updates.shape[1] // 2
    before = {"params": {"a": torch.full((half,), 0.5), "b": torch.full((updates.shape[1] - half,), -0.5)}}
    moved = torch.from_numpy(updates).float()
    params = {"a": before["params"]["a"] + moved[:, :half], "b": before["params"]["b"] + moved[:, half:]}
    many = torch.ones(len(ids), dtype=torch.float64)
    steps = np.ones(len(ids))
    reply = {"model": {"params": params}}
    return Cohort(reply=reply, ids=ids, examples=many, steps=steps, round=0, heard=heard), before


def read(row: dict, count: int) -> Updates:
    return maps._read(row["updates"], count)


def test_recorded_cosines_and_lengths_are_those_of_the_updates() -> None:
    rng = np.random.default_rng(0)
    common = rng.normal(size=5000)
    updates = 0.01 * np.stack([common, common + rng.normal(size=5000), -2 * common, rng.normal(size=5000)])
    given, before = cohort(updates, np.array([1, 4, 6, 7]))
    found = read(update_log.update_row(given, before), 8)
    unit = updates / np.linalg.norm(updates, axis=1, keepdims=True)
    assert found.ids.tolist() == [1, 4, 6, 7]
    assert np.abs(found.cosine - unit @ unit.T).max() < 0.1  # three deviations of a projection to 1,024 numbers
    assert np.allclose(found.lengths, np.linalg.norm(updates, axis=1), rtol=0.1)
    near = found.projections @ found.projections.T
    assert abs(near[0, 1] - 0.71) < 0.35 and near[0, 2] < -0.9  # of 64 numbers


def test_of_a_large_cohort_the_same_clients_are_recorded_and_silent_ones_are_not() -> None:
    updates = np.random.default_rng(0).normal(size=(200, 10))
    given, before = cohort(updates, np.arange(200))
    first = update_log.update_row(given, before)["updates"]["clients"]
    assert len(first) == update_log.MOST_CLIENTS and first == sorted(first) and first != list(range(64))
    given, before = cohort(2 * updates[:150], np.arange(150))
    assert set(first) & set(range(150)) <= set(update_log.update_row(given, before)["updates"]["clients"])
    heard = np.array([True, False, True])
    given, before = cohort(updates[:3], np.arange(3), heard)
    assert update_log.update_row(given, before)["updates"]["clients"] == [0, 2]


def test_rounds_are_thinned_out_and_large_models_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    due = [n for n in range(1, 501) if update_log.is_due(n)]
    assert due[:34] == [*range(1, 33), 34, 36] and len(due) == 95 and due[-2:] == [480, 496]
    monkeypatch.setattr(update_log, "MOST_PARAMETERS", 500)
    updates = np.random.default_rng(0).normal(size=(2, 5000))
    given, before = cohort(updates, np.arange(2))
    found = read(update_log.update_row(given, before), 2)
    assert np.allclose(found.lengths, np.linalg.norm(updates, axis=1), rtol=0.15)


def test_recording_changes_no_number_and_can_be_switched_off(tmp_path: Path) -> None:
    every = ("algorithm=fedavg", "rounds=3")
    on, off = real(tmp_path / "on", *every), real(tmp_path / "off", *every, "evaluation.maps=false")
    assert (on / "metrics.jsonl").read_bytes() == (off / "metrics.jsonl").read_bytes()
    (run, other) = find([on, off])[0]
    assert list(maps.updates(run)) == [1, 2, 3] and not maps.updates(other)
    assert {figure.name for figure in maps.drawn(run)} == {"map", "transfer"} and maps.drawn(other) == []
    assert config.load(None, SMALL).table()["evaluation"].keys() == {"every", "local"}  # as in records of before


def test_never_where_clients_are_real_or_privacy_is_promised() -> None:
    plain = config.load(None, ["algorithm=fedavg"]).algorithm.built.server
    private = config.load(None, ["algorithm=dp_fedavg"]).algorithm.built.server
    assert update_log.recorded(None, plain, deployed=False)
    assert not update_log.recorded(None, plain, deployed=True)
    assert not update_log.recorded(None, private, deployed=False)
    for server, deployed in ((plain, True), (private, False)):
        with pytest.raises(Invalid, match=r"evaluation\.maps = true is not supported with"):
            update_log.recorded(True, server, deployed=deployed)


def test_who_helps_whom_by_hand() -> None:
    updates = np.array([[1.0, 0.0], [2.0, 2.0], [-1.0, 0.0]])
    lengths = np.linalg.norm(updates, axis=1)
    unit = updates / lengths[:, None]
    found = maps.transferred(Updates(np.arange(3), lengths, unit @ unit.T, unit))
    assert np.isnan(found.diagonal()).all()
    assert found[1, 0] == pytest.approx(2.0)  # along client 0's step, twice as far as it went itself
    assert found[0, 1] == pytest.approx(0.25) and found[2, 0] == pytest.approx(-1.0)
    still = maps.transferred(Updates(np.arange(2), np.array([1.0, 0.0]), np.eye(2), unit[:2]))
    assert still[0, 1] == 0.0


def clusters(tmp_path: Path, rounds: int = 3) -> tuple[RunData, dict[int, Updates]]:
    """Ten clients in two groups that point different ways, with some noise in each round."""
    (run,) = find([written(tmp_path, "a")])[0]
    rng = np.random.default_rng(1)
    apart = np.zeros((10, 8))
    apart[:5, 0], apart[5:, 1] = 1.0, 1.0
    found = {}
    turn = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    for number in range(1, rounds + 1):
        rows = apart @ turn + 0.05 * rng.normal(size=(10, 8))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        found[number] = Updates(np.arange(10), np.ones(10), rows @ rows.T, rows)
    return run, found


def test_alike_clients_lie_together_and_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, found = clusters(tmp_path)
    monkeypatch.setattr(RunData, "count", 10)
    places, directions = maps.placed(run, found)
    assert list(places) == [1, 2, 3]
    for at in places.values():
        within = np.linalg.norm(at[:5] - at[:5].mean(0), axis=1).max()
        between = np.linalg.norm(at[:5].mean(0) - at[5:].mean(0))
        assert within < 0.3 * between and between == pytest.approx(2**0.5, abs=0.25)  # of orthogonal directions
    for number in (2, 3):  # neither turned nor mirrored between rounds
        assert np.abs(places[number] - places[number - 1]).max() < 0.3
    assert maps.groups_of(run, directions) == ["group 1"] * 5 + ["group 2"] * 5
    mirrored = maps._turned(places[3] * [-1, 1], places[3])
    assert np.allclose(mirrored, places[3])


def test_clients_without_structure_are_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = clusters(tmp_path)
    monkeypatch.setattr(RunData, "count", 30)
    rows = np.random.default_rng(0).normal(size=(30, 64))
    assert set(maps.groups_of(run, rows / np.linalg.norm(rows, axis=1, keepdims=True))) == {"group 1"}


def test_clusters_of_the_method_come_first_and_damaged_rows_are_left_out(tmp_path: Path) -> None:
    rows = tuple({"round": n, "cluster": [0, 1]} for n in (1, 2, 3))
    bad = {"clients": [0, 99], "lengths": [1, 1], "cosines": "AAA=", "projections": "AAAA"}
    (run,) = find([written(tmp_path, "a", clients=(*rows[:2], {**rows[2], "updates": bad}))])[0]
    assert maps.updates(run) == {}
    assert maps.groups_of(run, np.zeros((4, 2))) == ["cluster 0", "-", "cluster 1", "-"]
    assert RunFolder.open(tmp_path / "a").clients.read().rows[0]["cluster"] == [0, 1]


def test_titles_of_small_matrices_do_not_run_below_the_colour_scale() -> None:
    pytest.importorskip("matplotlib")
    from consilience.reporting import style

    frames = tuple((name, np.eye(20)) for name in ("1", "2", "4", "7", "8", MEAN))
    axis = Axis("client", unit="whole", of=CLIENT)
    with style.drawing():
        drawn = static.draw(Heat(values=np.eye(20), down=axis, across=axis, scale=Scale("similarity"), frames=frames))
        drawn.canvas.draw()
        *matrices, scale = drawn.axes
        right = max(axes.title.get_window_extent().x1 for axes in matrices)
        assert {axes.get_title() for axes in matrices} > {"round 1", MEAN}
        assert right < scale.get_window_extent().x0
