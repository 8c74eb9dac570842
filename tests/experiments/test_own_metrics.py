"""A metric and a kind of task from outside the package: wherever numbers are shown, so are theirs."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from rich.console import Console
from sample_runs import written
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import consilience as cs
from consilience.cli import app
from consilience.compare.command import carry_out
from consilience.compare.plan import plan
from consilience.core.tree import Tree
from consilience.data import datasets
from consilience.data.dataset import Dataset
from consilience.experiments import evaluation, trackers
from consilience.reporting import terminal
from consilience.reporting.figures import curves
from consilience.reporting.groups import grouped
from consilience.reporting.runs import read
from consilience.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("untraced")
SMALL = (
    *("data=visits", "partition=iid", "partition.clients=4", "model=logistic", "rounds=2", "threads=1"),
    *("algorithm.epochs=1", "algorithm.lr=0.02", "engine.lane=serial", "engine.device=cpu"),
)

# --- what a user writes ----------------------------------------------------------------------------------------------


def poisson(output: Tensor, target: Tensor) -> Tensor:
    """The loss of a count whose logarithm the model gives."""
    return nn.functional.poisson_nll_loss(output.squeeze(1), target, reduction="none")


def explained_sums(output: Tensor, target: Tensor, mask: Tensor) -> Tree:
    target, off = target.double(), (target - output.squeeze(1).exp()).double()
    return {
        "rows": mask.double().sum(),
        "sum": (target * mask).sum(),
        "squares": (target.square() * mask).sum(),
        "residual": (off.square() * mask).sum(),
    }


def explained_value(sums: Tree) -> Tensor:
    return sums["residual"] / (sums["squares"] - sums["sum"].square() / sums["rows"])


def miss(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return (target - output.squeeze(1).exp()).abs().to(mask.dtype)


UNEXPLAINED = cs.Metric(
    key="unexplained",
    title="unexplained variance",
    better="lower",
    caption="What a constant guess would do is 1.",
    sums=explained_sums,
    value=explained_value,
)
MISS = cs.Metric.mean(miss, key="miss", title="missed visits", unit="visits", better="lower")
COUNTS = cs.Kind(name="counts", losses=(poisson,), metrics=(UNEXPLAINED, MISS), main="unexplained")


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=draw)
    return x, torch.poisson((x @ torch.tensor([0.6, -0.4, 0.2]) + 0.5).exp(), generator=draw)


def visits() -> Dataset:
    """Visits to a practice."""
    (x, y), (test_x, test_y) = rows(160, 0), rows(80, 1)
    return Dataset(name="visits", x=x, y=y, test_x=test_x, test_y=test_y, classes=None, kind=COUNTS)


@pytest.mark.parametrize("numbers_at_once", [1, 1 << 16])
def test_clients_whose_rows_lie_in_several_pieces_have_the_value_of_all_their_rows(
    numbers_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A metric that is no mean is summed piece by piece for every client: 60 rows in pieces of 16."""
    monkeypatch.setitem(evaluation._BYTES_AT_ONCE, "cpu", 1)
    monkeypatch.setitem(evaluation._NUMBERS_AT_ONCE, "cpu", numbers_at_once)
    (x, y), sizes = rows(60, 4), (10, 23, 0, 20)  # the last seven rows belong to nobody
    task = cs.Task(nn.Linear(3, 1), COUNTS)
    starts = torch.tensor([0, *np.cumsum(sizes)[:-1]])
    found = evaluation.evaluate(task, task.start(), cs.Rows(x=x, y=y, starts=starts, sizes=torch.tensor(sizes)))
    output = task.apply(task.start(), x, train=False)[0]
    for client, (start, size) in enumerate(zip(starts.tolist(), sizes)):
        own = slice(start, start + size)
        wanted = explained_value(explained_sums(output[own], y[own], torch.ones(size))) if size else torch.nan
        assert found.clients.values[client] == pytest.approx(float(wanted), rel=1e-9, nan_ok=True)


# --- where it must be seen -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known() -> Iterator[None]:
    """The data set is one of the package's, with its kind of task."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "_factories", lambda: {"visits": visits})
        yield


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def ran(known: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run, and what was printed."""
    folder = tmp_path_factory.mktemp("runs") / "own"
    settings = ("algorithm=ditto", "evaluation.local=true")
    done = call("run", *SMALL, *settings, "--folder", str(folder))
    assert done.exit_code == 0, done.output
    return folder, done.output


def record(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_it_is_recorded_overall_of_clients_and_of_their_own_models(ran: tuple[Path, str]) -> None:
    first, last = record(ran[0])
    assert {"loss", "unexplained", "miss"} <= set(last) and "accuracy" not in last and "absolute_error" not in last
    for whose in ("client", "personal", "local"):
        assert {f"{whose}_unexplained_{name}" for name in ("mean", "worst_tenth", "spread")} <= set(last)
        assert last[f"{whose}_unexplained_worst_tenth"] >= last[f"{whose}_unexplained_mean"], "lower is better"
    data, model = visits(), torch.nn.Linear(3, 1)
    assert last["unexplained"] < first["unexplained"] and 0 < last["miss"] < 5
    values = list(safetensors.torch.load((ran[0] / "model.safetensors").read_bytes()).values())
    weight, bias = sorted(values, key=lambda value: -value.numel())
    model.load_state_dict({"weight": weight.reshape(1, 3), "bias": bias})
    rate = model(data.test_x).squeeze(1).exp().detach()
    spread = (data.test_y - data.test_y.mean()).square().sum()
    assert last["unexplained"] == pytest.approx(float((data.test_y - rate).square().sum() / spread), rel=1e-5)
    assert last["miss"] == pytest.approx(float((data.test_y - rate).abs().mean()), rel=1e-5)


def test_it_is_in_the_log_of_clients(ran: tuple[Path, str]) -> None:
    clients = record(ran[0], "clients.jsonl")[-1]
    assert len(clients["unexplained"]) == len(clients["personal_unexplained"]) == 4
    mean = np.mean(clients["unexplained"])
    assert mean == pytest.approx(record(ran[0])[-1]["client_unexplained_mean"], abs=1e-4)


def test_the_terminal_shows_it(ran: tuple[Path, str]) -> None:
    folder, printed = ran
    assert "round 2/2  unexplained variance" in printed or "unexplained variance 0." in printed
    assert "missed visits" in printed and "clients: mean" in printed
    shown = call("show", str(folder)).output
    assert "unexplained variance" in shown and "missed visits" in shown and "personal: mean" in shown
    tested = call("eval", str(folder)).output
    last = record(folder)[-1]
    for value in (last["unexplained"], last["miss"], last["client_unexplained_worst_tenth"]):
        assert f"{value:.4f}" in tested
    worst = [line for line in tested.splitlines() if line.strip().startswith(("0 ", "1 ", "2 ", "3 "))]
    values = [float(line.split()[2]) for line in worst]
    assert len(values) == 4 and values == sorted(values, reverse=True), "the worst client comes first"
    assert "unexplained variance: worst tenth" in tested  # of personal models
    listed = call("show", "--runs", str(folder.parent)).output
    assert "unexplained variance" in listed and f"{last['unexplained']:.4f}" in listed


def test_the_best_round_is_the_one_with_the_lowest_value() -> None:
    sent = {"bytes_up_total": 1, "bytes_down_total": 1}
    history = [{"round": n, "unexplained": value, **sent} for n, value in ((1, 3.0), (2, 2.0), (3, 5.0))]
    table = terminal.results(history, [], [UNEXPLAINED.row(main=True)])
    text = io.StringIO()
    Console(file=text, width=100).print(table)
    assert text.getvalue().splitlines()[1].split() == ["unexplained", "variance", "5.0000", "2.0000", "2"]


def test_report_and_dashboard_read_it_from_the_folder_alone(ran: tuple[Path, str], tmp_path: Path) -> None:
    """The code of the metric need not be there any more."""
    pytest.importorskip("matplotlib")
    from consilience.dashboard.pages import Pages
    from consilience.dashboard.watch import Watch
    from consilience.reporting.report import write

    folder = ran[0]
    stored = RunFolder.open(folder).facts()["metrics"]
    assert [row["name"] for row in stored] == ["loss", "unexplained", "miss"] and stored[2]["unit"] == "visits"
    html = write([folder], tmp_path / "report.html", pictures=False).read_text()
    watch = Watch(folder.parent)
    pages = Pages(watch, refresh=0, with_similarity=False)
    for page in (html, pages.report("own") or ""):
        assert "<h3>Unexplained variance</h3>" in page and "What a constant guess would do is 1." in page
        assert '<th scope="col">unexplained variance</th>' in page and '<th scope="col">missed visits</th>' in page
        assert "<h3>Missed visits</h3>" in page and "<h3>Worst tenth</h3>" in page
        assert "Clients&#39; unexplained variance" in page and "Personal unexplained variance" in page
        assert "<h3>Unexplained variance against traffic</h3>" in page
    assert watch.overview(0)["runs"][0]["metric"]["title"] == "unexplained variance"
    curves_shown = json.dumps(watch.curves(["own"], 100))
    assert "unexplained variance" in curves_shown and "missed visits" in curves_shown
    with_units = [column.axis for column in curves._ranked(grouped([read(folder)])) if column.key == "miss"]
    assert with_units == ["test missed visits (visits)"]


def test_a_comparison_tests_it_and_writes_it(known: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"algorithms": ["fedavg", "fedprox"], "seeds": [0, 1], "folder": tmp_path / "cells"}
    comparison = plan(None, [*SMALL, "algorithm=fedavg"], target=1.5, **options)
    assert carry_out(comparison, jobs=1, quiet=False) == 0
    page = (comparison.folder / "table.md").read_text()
    assert "| method | seeds | unexplained variance | best | clients: mean | worst tenth | missed visits |" in page
    assert "Unexplained variance minus that of fedavg, paired by seed (below 0 is better)" in page
    assert "To unexplained variance 1.5" in page
    lines = list(csv.DictReader((comparison.folder / "cells.csv").read_text().splitlines()))
    assert len(lines) == 4 and all(float(line["miss"]) > 0 and float(line["unexplained"]) > 0 for line in lines)
    heads = (comparison.folder / "methods.csv").read_text().splitlines()[0]
    assert "best_unexplained_mean" in heads and "miss_deviation" in heads and "accuracy" not in heads
    assert "unexplained variance" in capsys.readouterr().out
    by_miss = plan(None, [*SMALL, "algorithm=fedavg"], metric="miss", **options)
    assert carry_out(by_miss, jobs=1, quiet=True) == 0
    assert "Missed visits minus that of fedavg" in (comparison.folder / "table.md").read_text()
    with pytest.raises(cs.Invalid, match=r"metric = 'accuracy' is not one of unexplained, .*miss"):
        carry_out(plan(None, SMALL, metric="accuracy", **{**options, "folder": tmp_path / "x"}), jobs=1, quiet=True)


def test_trackers_get_it(ran: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: dict[str, dict[tuple[str, int], float]] = {"tensorboard": {}, "mlflow": {}}

    class Writer:
        """A stand-in for TensorBoard's, and for MLflow's client."""

        def __init__(self, log_dir: str = "") -> None:
            self.add_text = self.flush = self.close = self.log_param = lambda *_: None
            self.file_writer = types.SimpleNamespace(add_summary=lambda summary: None)

        def add_scalar(self, key: str, value: float, step: int) -> None:
            logged["tensorboard"][key, step] = value

        def log_batch(self, run: str, metrics: list[tuple[str, float, int]]) -> None:
            logged["mlflow"] |= {(key, step): value for key, value, step in metrics}

        def get_experiment_by_name(self, name: str) -> Any:
            return types.SimpleNamespace(experiment_id="7")

        def create_run(self, number: str, run_name: str) -> Any:
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="7-0"))

        def get_metric_history(self, run: str, key: str) -> list[Any]:
            return []

    entities = types.SimpleNamespace(Metric=lambda key, value, now, step: (key, value, step))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    summaries = types.SimpleNamespace(hparams=lambda settings, metrics: ("table", "settings", "end"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.summary", summaries)
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=Writer, entities=entities))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    folder = RunFolder.open(shutil.copytree(ran[0], tmp_path / "copy"))
    last = record(ran[0])[-1]
    for name, found in logged.items():
        trackers.opened(name, folder, {})
        for key in ("unexplained", "miss", "client_unexplained_mean", "personal_unexplained_worst_tenth"):
            assert found[key, 2] == last[key] and (key, 1) in found


def test_python_gets_it_next_to_a_built_in_kind() -> None:
    """One object passed with the task."""
    sure = cs.Metric.mean(lambda o, t, m: o.softmax(1).amax(1).to(m.dtype), key="sure", unit="share")
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(12, 4, generator=draw), torch.randint(0, 3, (12,), generator=draw)) for _ in range(3)]
    federation = cs.Federation.from_clients(clients, client_tests=clients)
    task = cs.Task(nn.Linear(4, 3), kind="classification", metrics=(sure,))
    options: dict[str, Any] = {"rounds": 2, "progress": False, "lane": "serial", "device": "cpu"}
    result = cs.train(task, federation, cs.fedavg(lr=0.1), **options)
    plain = cs.train(nn.Linear(4, 3), federation, cs.fedavg(lr=0.1), **options).history
    assert set(result.history[0]) - set(plain[0]) == {"sure"} and set(plain[0]) <= set(result.history[0])
    assert "f1" in plain[0] and "sure" in result.table().splitlines()[0]
    expected = result.model(torch.cat([x for x, _ in clients])).softmax(1).amax(1).mean()
    assert result.history[-1]["sure"] == pytest.approx(float(expected.detach()), rel=1e-6)


def test_python_gets_a_kind(tmp_path: Path) -> None:
    federation = cs.Federation.from_clients([rows(20, k) for k in range(3)], client_tests=[rows(9, 9)] * 3)
    result = cs.train(
        cs.Task(nn.Linear(3, 1), kind=COUNTS), federation, cs.fedavg(lr=0.02), rounds=2, progress=False, lane="serial"
    )
    assert result.table().splitlines()[0].split()[:4] == ["round", "loss", "unexplained", "variance"]
    assert result.history[-1]["client_unexplained_mean"] == pytest.approx(result.history[-1]["unexplained"], rel=1e-6)


def test_runs_of_old_are_read_with_the_built_in_table(tmp_path: Path) -> None:
    old = read(written(tmp_path, "old"))
    assert [row.key for row in old.metrics] == ["loss", "accuracy"] and old.metrics[1].main


def test_damaged_rows_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"name": "good", "title": "<b>\x1b good", "better": "lower", "main": True},
        *({"name": "../evil"}, {"title": "no name"}, 7, {"name": "good", "title": "twice"}),
        {"name": "odd", "better": "sideways", "caption": ["no text"], "unit": None, "main": "yes"},
    ]
    found = read(written(tmp_path, "damaged", metrics=rows)).metrics
    assert [row.key for row in found] == ["good", "odd"] and found[0].main and not found[1].main
    assert found[0].better == "lower" and "\x1b" not in found[0].title and found[1].better == "higher"
