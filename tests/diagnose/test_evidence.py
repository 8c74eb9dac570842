"""The advice is what was measured on the nearest task: ordered by the paired differences, and no more than is shown."""

from __future__ import annotations

import math

import pytest

from consilience.diagnose import advice, evidence
from consilience.diagnose.diagnosis import Diagnosis, diagnose
from consilience.diagnose.evidence import MeasuredTask, coordinates, distance, nearest

SMALL = ["model=logistic", "algorithm.epochs=1", "engine.lane=serial", "engine.device=cpu", "threads=1", "rounds=1"]
HERE = {"labels": 0.4, "sizes": 0.3, "inputs": 0.0, "work": 0.0}

pytestmark = pytest.mark.usefixtures("untraced")


def task(name: str, point: dict[str, float], methods: dict[str, tuple[float, str]], trials: int = 12) -> MeasuredTask:
    found = {label: {"accuracy": [mean, verdict]} for label, (mean, verdict) in methods.items()}
    return MeasuredTask(
        task=name, title=name, trials=trials, seeds=[0, 1], baseline="fedavg", heterogeneity=point, methods=found
    )


@pytest.fixture(scope="module")
def of() -> Diagnosis:
    skewed = ["partition=dirichlet", "partition.clients=5", "partition.alpha=0.2", "partition.min_size=2"]
    return diagnose(None, [*SMALL, *skewed], rounds=1, say=lambda text: None)


def test_distance_is_the_root_mean_square_on_the_scales() -> None:
    other = {"labels": 0.4 + 0.8, "sizes": 0.3 - 0.6, "inputs": 0.6, "work": 4.0}
    assert distance(HERE, HERE) == 0.0 and distance(HERE, other) == pytest.approx(1.0)
    assert distance(HERE, {**HERE, "work": 4.0}) == pytest.approx(math.sqrt(1 / 4))


def test_coordinates_are_what_was_measured_beyond_chance(of: Diagnosis) -> None:
    point = coordinates(of)
    assert point["labels"] == pytest.approx(of.labels.mean - of.labels.chance_mean, abs=1e-4)
    assert point["sizes"] == pytest.approx(of.quantity.gini, abs=1e-4) and point["work"] == 0.0


def test_the_nearest_task_speaks_in_the_order_of_its_results(of: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = {
        "fedprox": (0.01, "larger"),
        "feddyn": (0.05, "larger (t only)"),
        "scaffold": (0.09, "not shown"),
        "krum": (-0.4, "smaller"),
        "qffl": (-0.1, "smaller"),
    }
    here, far = coordinates(of), {key: value + 1 for key, value in coordinates(of).items()}
    measured = (task("far", far, {"moon": (0.5, "larger")}), task("near", here, methods))
    monkeypatch.setattr(evidence, "tasks", lambda: measured)
    monkeypatch.setattr(advice, "tasks", lambda: measured)
    assert nearest(of)[0].task == "near" and nearest(of)[1] < 1e-3
    said = advice.advise(of)
    assert said[0].what == "for one global model: fedavg as the yardstick, then feddyn, fedprox"
    assert "feddyn +5.0, fedprox +1.0 points" in said[0].because and "tuned with 12 trials each" in said[0].because
    assert "as they do here" in said[0].because
    behind = next(item for item in said if item.kind == "beware")
    assert behind.what.endswith("krum, qffl") and "krum -40.0, qffl -10.0 points" in behind.because


def test_a_far_task_and_one_without_a_winner_say_so(of: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    far = {key: value + 1 for key, value in coordinates(of).items()}
    measured = (task("far", far, {"moon": (0.5, "not shown")}, trials=0),)
    monkeypatch.setattr(evidence, "tasks", lambda: measured)
    monkeypatch.setattr(advice, "tasks", lambda: measured)
    first = advice.advise(of)[0]
    assert first.what == "for one global model: fedavg" and "none of 1 methods was shown to be ahead" in first.because
    assert "not a near one" in first.because and "options not tuned" in first.because


def test_equally_near_tasks_yield_to_a_tuned_one(of: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    here = coordinates(of)
    measured = (task("guessed", here, {}, trials=0), task("tuned", here, {}))
    monkeypatch.setattr(evidence, "tasks", lambda: measured)
    assert nearest(of)[0].task == "tuned"


def test_the_packaged_evidence_is_whole() -> None:
    found = evidence.tasks()
    assert len({task.task for task in found}) == len(found) >= 6
    for each in found:
        assert set(each.heterogeneity) == set(HERE) and each.findings("accuracy") and each.findings("clients_mean")
        assert not {"centralised", each.baseline} & {item.method for item in each.findings("accuracy")}
