"""Private runs as users start them: what is spent, what is refused, what a crash leaves behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny

from consilience.core.settings import Invalid
from consilience.experiments import record, runner
from consilience.experiments.config import config
from consilience.flower.deploy import settings
from consilience.privacy import Spending
from consilience.runs.folder import RunFolder
from consilience.runs.result import Result

pytestmark = pytest.mark.usefixtures("untraced")
dp_accounting = pytest.importorskip("dp_accounting", reason="the extra `dp` is not installed")
PRIVATE = ("algorithm=dp_fedavg", "algorithm.noise=2.0", "algorithm.rate=0.5", "partition.clients=8", "rounds=4")
SMALL = ("model=logistic", "engine.lane=serial", "threads=1", "checkpoint.every=2")


def start(runs: Path, *overrides: str) -> Result:
    return runner.execute(config.load(None, [*PRIVATE, *SMALL, f"runs={runs}", "name=private", *overrides]))


def spent(folder: Path) -> dict[str, Any]:
    return RunFolder.open(folder).facts()["privacy"]


def test_every_round_says_what_has_been_spent(tmp_path: Path) -> None:
    done = start(tmp_path)
    wanted = [Spending(noise=2.0, rate=0.5).epsilon(rounds) for rounds in (1, 2, 3, 4)]
    assert [row["epsilon"] for row in done.history] == pytest.approx(wanted, rel=1e-12)
    facts = spent(tmp_path / "private")
    assert (facts["rounds"], facts["delta"], facts["noise"], facts["rate"]) == (4, 1e-5, 2.0, 0.5)
    assert facts["epsilon"] == pytest.approx(wanted[-1], rel=1e-12)


def test_too_many_rounds_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(
        Invalid, match=r"rounds = 4 would cost epsilon = .* rounds fit, or algorithm.noise = "
    ) as caught:
        start(tmp_path, "algorithm.epsilon=1.0")
    assert not any(tmp_path.iterdir())
    noise = float(str(caught.value).split("algorithm.noise = ")[1].split()[0])
    assert start(tmp_path, "algorithm.epsilon=1.0", f"algorithm.noise={noise * 1.001}").history[-1]["epsilon"] <= 1.0


def test_without_the_accountant_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    with pytest.raises(Invalid, match=r"pip install 'consilience\[dp\]'"):
        start(tmp_path, "algorithm.noise=2.71")  # of which nobody has asked before
    assert not any(tmp_path.iterdir())


def test_batch_norm_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="without batch norm"):
        start(tmp_path, "model=resnet18", "model.width=4", "model.stem=cifar")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("broken", [1, 2, 3, 4])
def test_what_a_crash_had_spent_stays_spent(broken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is about to be looked at when the process dies: epsilon stands in the folder by then."""
    whole = start(tmp_path / "whole")
    seen = 0
    evaluate = record.evaluate

    def crash(*arguments: Any, **options: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == broken:
            raise KeyboardInterrupt
        return evaluate(*arguments, **options)

    monkeypatch.setattr(record, "evaluate", crash)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "broken")
    folder = tmp_path / "broken" / "private"
    assert spent(folder)["rounds"] == broken and len(RunFolder.open(folder).rows().rows) == broken - 1
    known, during = spent(folder)["epsilon"], []

    def look(*arguments: Any, **options: Any) -> Any:
        during.append(spent(folder)["epsilon"])
        return evaluate(*arguments, **options)

    monkeypatch.setattr(record, "evaluate", look)
    again = runner.proceed(folder)
    assert during and min(during) >= known, "taken back while rounds were done again"
    assert again.history == whole.history and tiny.same(again.values, whole.values)


def test_resuming_for_more_rounds_asks_the_budget_again(tmp_path: Path) -> None:
    budget = Spending(noise=2.0, rate=0.5).epsilon(5)
    start(tmp_path, f"algorithm.epsilon={budget}")
    folder = tmp_path / "private"
    assert len(runner.proceed(folder, ["rounds=5"]).history) == 5
    with pytest.raises(Invalid, match="5 rounds fit"):
        runner.proceed(folder, ["rounds=6"])
    assert spent(folder)["rounds"] == 5


def test_it_is_not_deployed() -> None:
    given = {"algorithm": "dp_fedavg", "data": "digits", "deploy": {"clients": 4}}
    with pytest.raises(Invalid, match="cannot be deployed yet"):
        settings.from_given(given, own=False).build_algorithm()


def test_the_record_is_plain_json(tmp_path: Path) -> None:
    start(tmp_path, "rounds=1")
    assert json.loads((tmp_path / "private" / "run.json").read_text())["privacy"]["neighbours"] == "one client more"
