"""Which engine a run has: named in the config, with settings of its own, and changed only where no number changes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from consilience.core.settings import Invalid
from consilience.experiments.assembly import assemble
from consilience.experiments.config import config
from consilience.runs import identity


def _table(**engine: Any) -> dict[str, Any]:
    threads = engine.pop("all_threads", 1)
    return {"threads": threads, "engine": {"device": "cpu", "lane": "serial", **engine}}


def test_the_usual_engine_goes_without_saying() -> None:
    plain = config.load(None, [])
    assert "name" not in plain.engine and "workers" not in plain.engine
    for same in (["engine=vectorised"], ["engine.name=vectorised"]):
        assert config.load(None, same) == plain and config.load(None, same).digest() == plain.digest()


def test_ray_has_the_settings_of_each_worker_and_its_own(tmp_path: Path) -> None:
    made = config.load(None, ["engine=ray", "engine.workers=4", "engine.dtype=float64", "engine.address=auto"])
    assert (
        made.engine | {"name": "ray", "workers": 4, "threads": 1, "dtype": "float64", "address": "auto"} == made.engine
    )
    path = tmp_path / "config.toml"
    path.write_text(made.toml(), encoding="utf-8")
    assert config.load(path, []) == made
    path.write_text('engine = "ray"\n', encoding="utf-8")
    assert config.load(path, []).engine["workers"] == 2


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["engine.workers=4"], r"engine\.workers = 4 is a setting of the engine 'ray'"),
        (["engine=rai"], r"engine\.name = 'rai' is not one of vectorised, ray \(did you mean 'ray'\?\)"),
        (["engine=ray", "engine.wrokers=4"], r"did you mean 'workers'"),
        (["engine=ray", "engine.workers=0"], r"engine\.workers = 0 is out of range"),
        (["engine=3"], r"engine = 3 must be a table"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(overrides: list[str], why: str) -> None:
    with pytest.raises(Invalid, match=why):
        config.load(None, overrides)


def test_a_missing_ray_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Invalid, match=r'pip install "consilience\[ray\]"'):
        assemble(config.load(None, ["engine=ray", "model=logistic"]))


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        (_table(name="ray", workers=2, threads=1), _table(name="ray", workers=4, threads=1), []),
        (_table(name="ray", workers=2, threads=1), _table(), []),
        (_table(), _table(name="ray", workers=2, threads=1, address="auto"), []),
        (_table(), _table(name="ray", workers=2, threads=2), ["name", "threads"]),
        (_table(all_threads=4), _table(all_threads=4, name="ray", workers=2, threads=1), ["name", "threads"]),
        (_table(device="cuda"), _table(device="cuda", name="ray", workers=2, threads=1), ["name", "threads"]),
        (_table(lane="batched", name="ray", workers=2), _table(lane="batched", name="ray", workers=4), ["workers"]),
        (_table(), _table(dtype="float64"), ["dtype"]),
        # a run that leaves the serial lane, or enters it, is told of the workers, too
        (_table(name="ray", workers=2), _table(lane="batched", name="ray", workers=4), ["lane", "workers"]),
        (_table(lane="batched", name="ray", workers=4), _table(name="ray", workers=2), ["lane", "workers"]),
    ],
)
def test_an_engine_changes_only_where_no_number_does(
    before: dict[str, Any], now: dict[str, Any], refused: list[str]
) -> None:
    found = identity.differences(before, now)
    assert [change.partition(":")[0] for change in found] == [f"engine.{key}" for key in refused]
