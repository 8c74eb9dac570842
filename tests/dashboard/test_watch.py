"""What the pages are told: numbers of the record, read on from where the last look ended, within a budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_runs import real, replace_rows, written

from consilience.dashboard import api as api_module
from consilience.dashboard import watch as watch_module
from consilience.dashboard.api import Api
from consilience.dashboard.curves import Series
from consilience.dashboard.growing_log import Budget, GrowingLog
from consilience.dashboard.watch import Watch
from consilience.runs.folder import RunFolder

PLENTY = 1 << 30


@pytest.fixture(autouse=True)
def unthrottled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_LOOK_EVERY", 0.0)


def asked(api: Api, what: str, **query: str) -> Any:
    status, content = api.answer(what, lambda name: [query[name]] if name in query else [])
    assert status == 200, content
    json.dumps(content, allow_nan=False)
    return content


def test_a_series_is_thinned_evenly_and_ends_with_the_last_point() -> None:
    series = Series(most=16)
    for number in range(1, 1001):
        series.add(number, float(number) ** 2)
        rounds, values = series.points()
        assert rounds[-1] == number and series.last == number**2 and len(rounds) <= 17
    assert all(value == number**2 for number, value in zip(rounds, values))
    gaps = np.diff(rounds[:-1])
    assert rounds[0] == 1 and len(set(gaps.tolist())) == 1
    assert series.high == (1e6, 1000) and series.low == (1.0, 1)
    assert series.points(5)[0][-1] == 1000 and len(series.points(5)[0]) <= 5


def test_rows_come_once_and_within_the_budget(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    lines = [json.dumps({"round": k, "long": list(range(100))}).replace(" ", "") + "\n" for k in range(1, 21)]
    file.write_text("".join(lines[:10]))
    log = GrowingLog(file)
    seen = []
    for _ in range(20):
        anew, rows = log.read(Budget(2 * len(lines[9]) + 5))
        assert not anew and len(rows) <= 2 and all(row["long"] == [] for row in rows)
        seen += [row["round"] for row in rows]
    assert seen == list(range(1, 11)) and log.behind == 0
    with file.open("a") as stream:  # a line in the making is not taken for a row
        stream.write("".join(lines[10:12]) + lines[12][:40])
    assert [row["round"] for row in log.read(Budget(PLENTY))[1]] == [11, 12] and not log.problem
    with file.open("a") as stream:
        stream.write(lines[12][40:])
    assert [row["round"] for row in log.read(Budget(PLENTY))[1]] == [13]
    assert len(GrowingLog(file, with_lists=True).read(Budget(10))[1][0]["long"]) == 100  # a line beyond the budget


def test_a_log_that_was_cut_back_and_has_grown_again_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps({"round": k, "chain": "a" * 64}) + "\n" for k in range(1, 6)))
    log = GrowingLog(file)
    log.read(Budget(PLENTY))
    file.write_text("".join(json.dumps({"round": k, "chain": "b" * 64}) + "\n" for k in range(1, 9)))
    anew, rows = log.read(Budget(PLENTY))
    assert anew and [row["round"] for row in rows] == list(range(1, 9))
    file.write_text("no json\n")
    assert log.read(Budget(PLENTY)) == (True, []) and "damaged" in log.problem


def test_the_overview_has_the_numbers_of_the_record_and_later_only_what_changed(tmp_path: Path) -> None:
    first = real(tmp_path / "a")
    written(tmp_path / "more", "b", algorithm="fedprox", seed=3)
    watch = Watch(tmp_path)
    found = watch.overview()
    assert found["names"] == ["a", "more/b"] and "algorithm.name" in found["differing"]
    one, other = found["runs"]
    rows = RunFolder.open(first).rows().rows
    assert (one["value"], one["loss"], one["round"], one["rounds"]) == (rows[-1]["accuracy"], rows[-1]["loss"], 3, 3)
    assert one["best"] == max(row["accuracy"] for row in rows) and one["status"] == "finished"
    assert other["settings"]["algorithm.name"] == "fedprox" and other["seed"] == 3 and other["folder"] == "more"
    assert one["group"] != other["group"]
    assert watch.overview(found["version"])["runs"] == []
    RunFolder.open(tmp_path / "more" / "b").metrics.append({"round": 4, "accuracy": 0.9, "rejected": {"shape": 2}})
    again = watch.overview(found["version"])
    assert [(run["name"], run["value"], run["refused"]) for run in again["runs"]] == [("more/b", 0.9, 2)]
    assert "names" not in again
    curves = watch.curves(["a"], 100)
    assert curves["runs"]["a"]["curves"]["accuracy"][1] == pytest.approx([row["accuracy"] for row in rows], rel=1e-5)
    assert curves["columns"][0]["key"] == "accuracy" and not watch.curves(["nowhere"], 9)["runs"]
    assert set(watch.curves(["more"], 9)["runs"]) == {"more/b"}


def test_a_resumed_run_that_was_cut_back_is_shown_as_it_is(tmp_path: Path) -> None:
    run = written(tmp_path, "a")
    watch = Watch(tmp_path)
    assert watch.overview()["runs"][0]["value"] == 0.6
    replace_rows(run, [{"round": 1, "accuracy": 0.25}])
    shown = watch.overview()["runs"][0]
    assert (shown["value"], shown["best"], shown["round"]) == (0.25, 0.25, 1)


def test_a_spent_budget_leaves_runs_for_the_next_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for k in range(3):
        written(tmp_path, f"r{k}")
    monkeypatch.setattr(watch_module, "BYTES_A_REQUEST", 1)
    watch = Watch(tmp_path)
    first = watch.overview()
    assert len(first["names"]) == 3 and first["reading"]
    for _ in range(18):  # a line of metrics or of timing each
        last = watch.overview()
    assert not last["reading"] and [run["value"] for run in last["runs"]] == [0.6] * 3


def test_one_client_over_rounds_is_what_the_record_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = real(tmp_path / "a", "rounds=6", "partition.clients=5", "algorithm.selection.fraction=0.6")
    folder = RunFolder.open(run)
    rows, own = folder.rows().rows, folder.clients.read().rows
    monkeypatch.setattr(api_module, "_BYTES", 1)  # a line at a time
    api = Api(Watch(tmp_path))
    for _ in range(20):
        found = asked(api, "client", run="a", client="2")
        table = asked(api, "clients", run="a")
    mine = [(row, row["cohort"].index(2), more) for row, more in zip(rows, own) if 2 in row["cohort"]]
    assert found["answered"] == len(mine) == table["clients"][2]["answered"] and not found["reading"]
    assert found["curves"]["weight"] == [
        [row["round"] for row, *_ in mine],
        pytest.approx([row["weights"][at] for row, at, _ in mine], rel=1e-5),
    ]
    assert found["curves"]["drift"][1] == pytest.approx([more["cohort_drift"][at] for _, at, more in mine], rel=1e-5)
    assert found["curves"]["train_loss"][1] == pytest.approx([more["cohort_loss"][at] for _, at, more in mine])
    assert found["curves"]["accuracy"][1] == pytest.approx([row["accuracy"][2] for row in own], abs=1e-6)
    federation = json.loads(folder.federation.read_text())
    assert found["rows"] == federation["train_rows"][2] == sum(one["rows"] for one in found["labels"])
    means = [np.mean(more["cohort_drift"]) for more in own]
    assert means == pytest.approx([row["drift"] for row in rows], rel=1e-3)
    assert Api(Watch(tmp_path)).answer("client", lambda name: {"run": ["a"]}.get(name, ["x"]))[0] == 404


def test_refused_replies_nodes_and_logs(tmp_path: Path) -> None:
    own = ({"round": 2, "refused": {"shape": [1], "nonfinite": [1, 3]}},)
    run = written(tmp_path, "a", clients=own, deployed=True)
    RunFolder.open(run).metrics.append({"round": 4, "rejected": {"shape": 1}, "refused": ["client 1 refused: shape"]})
    node = {"node": "7", "clients": [1], "online": True, "answered": 2, "refused": {"shape": 1}, "problem": "<b>\n"}
    odd = {"clients": [0, 2], "train_rows": [5]}  # the lists do not fit together
    (run / "nodes.json").write_text(json.dumps({"nodes": [{**node, "train_rows": [40]}, "nonsense", odd]}))
    (run / "deploy.log").write_text("one\ntwo \x1b[31m\n")
    api = Api(Watch(tmp_path))
    found = asked(api, "run", run="a")
    assert found["events"] == [{"round": 4, "text": "client 1 refused: shape"}]
    assert [one["refused"] for one in found["nodes"]] == ["shape 1", ""] and found["nodes"][0]["problem"] == "<b>\\n"
    assert asked(api, "log", run="a", file="deploy.log")["lines"] == ["one", "two \\x1b[31m"]
    assert found["logs"] == ["deploy.log"] and [one["rows"] for one in found["nodes"]] == [40, None]
    assert [one["rows"] for one in asked(api, "clients", run="a")["clients"]] == [None, 40, None, None]
    assert asked(api, "client", run="a", client="1")["rows"] == 40
    assert [one["refused"] for one in asked(api, "clients", run="a")["clients"]] == [0, 2, 0, 1]
    assert [r["reason"] for r in asked(api, "client", run="a", client="1")["refusals"]] == ["shape", "nonfinite"]
    assert api.answer("log", lambda name: {"run": ["a"], "file": ["run.json"]}[name])[0] == 409
    assert api.answer("run", lambda name: ["../a"])[0] == 404 and api.answer("nonsense", lambda name: ["a"])[0] == 404


def test_every_chart_has_a_caption_in_words(tmp_path: Path) -> None:
    run = RunFolder.open(written(tmp_path, "a"))
    more = {"client_accuracy_mean": 0.5, "client_accuracy_spread": 0.1, "epsilon": 1.0}
    run.metrics.append({"round": 4, "accuracy": 0.5, "loss": 1.0, **more})
    found = {c["key"]: c for c in asked(Api(Watch(tmp_path)), "curves", run="a")["columns"]}
    assert more.keys() <= found.keys()
    assert all(c["caption"][:1].isupper() and c["title"][:1].isupper() for c in found.values()), found
