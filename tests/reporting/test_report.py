"""The page: whole by itself, right in its figures, deaf to script in names; shown by a real browser if there is one."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from html_pages import EVIL, EVIL_IN_A_DRAWING, alone, figure_data, tags, without_scripts
from sample_runs import real, replace_rows, written
from typer.testing import CliRunner

from consilience import cli
from consilience.reporting import report, style
from consilience.reporting.figure_set import compiled
from consilience.reporting.figures import similarity, weights
from consilience.reporting.groups import grouped
from consilience.reporting.runs import find
from consilience.runs.folder import RunFolder
from consilience.runs.names import plain

pytest.importorskip("matplotlib", reason='needs pip install "consilience[report]"')

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MATHS = "$x_{"


def drawn(*paths: Path) -> set[str]:
    """Names of the figures that a report on these has."""
    with style.drawing():
        return {picture.name for picture in compiled(grouped(find(paths)[0])).pictures()}


@pytest.fixture(scope="module")
def swapping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real(tmp_path_factory.mktemp("runs") / "swap", "algorithm=simfedswap", "rounds=4")


@pytest.fixture(scope="module")
def text(swapping: Path) -> str:
    return report.write([swapping]).read_text()


def test_a_real_run_has_its_figures(swapping: Path) -> None:
    everything = {"accuracy", "loss", "train_loss", "drift_relative", "client_accuracy_worst_tenth", "clients_accuracy"}
    everything |= {"traffic", "accuracy_against_traffic", "accuracy_against_time", "partition", "rows", "weights"}
    everything |= {"similarity", "similarity_trend", "swaps", "spread_accuracy", "seconds"}
    assert everything <= drawn(swapping)
    assert not drawn(swapping) & {"learned_weights", "staleness", "missing", "accuracy_against_virtual_time"}


def test_captions_say_which_way_is_better(swapping: Path) -> None:
    with style.drawing():
        captions = {one.name: one.caption for one in compiled(grouped(find([swapping])[0])).pictures()}
    assert "Higher is better; a good curve rises quickly" in captions["accuracy"]
    assert "Lower is better; a good curve falls quickly" in captions["loss"]


def test_a_run_of_old_without_client_rows_has_the_others(tmp_path: Path) -> None:
    run = written(tmp_path, "old")
    (run / "clients.jsonl").unlink()
    found = drawn(run)
    assert {"accuracy", "loss", "traffic", "weights", "seconds"} <= found
    assert not found & {"similarity", "swaps", "partition", "clients_accuracy"}


def test_a_run_that_has_only_begun_or_lasted_one_round(tmp_path: Path) -> None:
    begun, one = written(tmp_path, "begun", accuracies=()), written(tmp_path, "one", accuracies=(0.5,))
    for run in (begun, one):
        assert tags(report.write([run]).read_text())
    assert "accuracy" in drawn(one) and "accuracy" not in drawn(begun)


def test_learned_weights_staleness_and_lost_replies_are_drawn(tmp_path: Path) -> None:
    run = written(tmp_path, "duw", algorithm="duw_fedavg")
    rows = RunFolder.open(run).rows().rows
    changed = [
        {**row, "staleness": [0, 2], "silent": 1, "rejected": {"shape": 1}, "simulated_seconds": 5.0 * row["round"]}
        for row in rows
    ]
    replace_rows(run, changed)
    assert {"learned_weights", "staleness", "missing", "accuracy_against_virtual_time"} <= drawn(run)


def test_weights_are_laid_out_client_by_round(tmp_path: Path) -> None:
    (run,) = find([written(tmp_path, "a")])[0]
    table = weights.table(run)
    assert table.shape == (4, 3)
    assert table[0].tolist() == [0.25] * 3 and table[2].tolist() == [0.75] * 3
    assert np.isnan(table[[1, 3]]).all()


def test_similarities_and_swaps_are_read_back(tmp_path: Path) -> None:
    rows = ({"round": 1, "compared": [0, 2, 3], "similarity": [0.1, 0.2, 0.3], "model_of": [2, 0]},)
    rows += ({"round": 2, "model_of": [2, 0]}, {"round": 3, "model_of": [0, 2]})
    (run,) = find([written(tmp_path, "a", clients=rows)])[0]
    ids, matrix = similarity.similarities(run)[1]
    assert ids.tolist() == [0, 2, 3]
    assert matrix[1, 0] == matrix[0, 1] == 0.1 and matrix[0, 2] == 0.2 and matrix[2, 1] == 0.3
    assert similarity.swapped(run) == {(0, 2): 2}  # in round 3 everyone kept its own


def test_who_resembles_whom_can_be_left_out(swapping: Path) -> None:
    groups = grouped(find([swapping])[0])
    with style.drawing():
        hidden = {picture.name for picture in compiled(groups, with_similarity=False).pictures()}
    assert drawn(swapping) - hidden == {"map", "transfer", "similarity", "similarity_trend", "swaps"}


def test_clients_of_a_real_federation_are_not_compared_unasked(tmp_path: Path) -> None:
    rows = ({"round": 1, "compared": [0, 2], "similarity": [0.1], "model_of": [2, 0]},)
    deployed = written(tmp_path, "a", clients=rows, deployed=True)
    flower = written(tmp_path, "b", clients=rows, more='\n[engine]\nname = "flower"\n')
    assert not drawn(deployed) & {"similarity", "swaps"} and not drawn(flower) & {"similarity", "swaps"}


def test_the_page_loads_nothing_and_runs_nothing(text: str) -> None:
    alone(text)
    assert len(without_scripts(text)) < 400_000


def test_the_page_is_the_same_each_time_and_takes_its_colours_from_css(
    swapping: Path, text: str, tmp_path: Path
) -> None:
    first = report.write([swapping], tmp_path / "again.html", pictures=False).read_text()
    assert first == text
    body = without_scripts(first).partition("<body>")[2]
    assert "var(--line-0)" in body and "var(--ink)" in body
    assert not [colour for colour in (style.INK, style.SOFT, *style.LINES) if colour in body]
    for name in (*(f"--line-{n}" for n in range(len(style.LINES))), "--ink", "--soft", "--rule", "--empty"):
        assert first.partition("<body>")[0].count(f"{name}:") == 3, name  # light, dark, print


def test_names_are_text_wherever_they_come_from(tmp_path: Path) -> None:
    names = {"names": [EVIL, EVIL_IN_A_DRAWING, MATHS, "d"], "labels": [EVIL_IN_A_DRAWING, "b"]}
    names |= {"train_rows": [1, 2, 3, 4], "class_counts": [[1, 0], [0, 1], [1, 1], [0, 2]]}
    clients = ({"round": 1, "model_of": [2, 0], "accuracy": [0.1, 0.2, 0.3, 0.4]},)
    more = f'note = "{EVIL}"\n'
    run = written(tmp_path, "a", federation=names, clients=clients, more=more, reason=EVIL, versions={"torch": EVIL})
    facts = json.loads((run / "run.json").read_text())
    facts = {**facts, "format": 1, "status": "diverged", "created": EVIL_IN_A_DRAWING}
    (run / "run.json").write_text(json.dumps({key: value for key, value in facts.items() if key != "digest"}))
    written(tmp_path, "b", algorithm="fedprox")
    (tmp_path / "plan.json").write_text(json.dumps({"cells": {"a": {"method": EVIL}, "b": {"method": MATHS}}}))
    text = report.write([tmp_path]).read_text()
    alone(text)
    drawn = without_scripts(text)
    assert "script" not in {tag for tag, _ in tags(drawn)} and "<script" not in drawn
    assert "&lt;script&gt;alert(1)" in drawn and MATHS in drawn
    assert figure_data(text)["1_partition"]["down"]["names"] == [plain(name, most=24) for name in names["names"]]


def test_secrets_do_not_reach_the_page(tmp_path: Path) -> None:
    run = written(tmp_path, "a")
    text = (run / "config.toml").read_text()
    text = 'data_dir = "/home/somebody"\nhub_token = "hf_123456"\n' + text
    RunFolder.open(run).store("config.toml", text.encode())
    made = report.write([run]).read_text()
    assert "hf_123456" not in made and "somebody" not in made and "***" in made


def test_pictures_lie_beside_and_old_ones_go(tmp_path: Path) -> None:
    run = written(tmp_path, "a")
    folder = report.figures_of(report.write([run]))
    assert folder == run / "report-figures"
    (folder / "of_an_earlier_report.png").write_bytes(b"")
    report.write([run])
    found = {path.name for path in folder.iterdir()}
    assert {"accuracy.png", "weights.png"} <= found and "of_an_earlier_report.png" not in found
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [written(tmp_path / "runs", f"a{seed}", seed=seed) for seed in (0, 1)]
    done = CliRunner().invoke(cli.app, ["report", *map(str, runs), "--out", "both.html"])
    assert done.exit_code == 0 and done.stdout.split() == ["both.html", "both-figures"], done.output
    assert "0.6000 ±\N{NO-BREAK SPACE}0.0000" in (tmp_path / "both.html").read_text()
    for arguments, words in ((["nowhere"], "is no folder"), ([str(runs[0]), "--out", "x.pdf"], ".html")):
        refused = CliRunner().invoke(cli.app, ["report", *arguments])
        assert refused.exit_code == 2 and words in refused.stderr


@pytest.mark.usefixtures("untraced")
def test_a_run_ends_by_saying_where_its_report_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ("rounds=1", "model.hidden=[4]", "partition.clients=3", "algorithm.epochs=1", "engine.lane=serial")
    done = CliRunner().invoke(cli.app, ["run", *small, "--name", "a", "--report"])
    assert done.exit_code == 0 and "report: runs/a/report.html" in done.stdout
    assert tags((tmp_path / "runs/a/report.html").read_text())
    monkeypatch.setattr(report, "is_possible", lambda: False)
    done = CliRunner().invoke(cli.app, ["resume", "runs/a", "rounds=2", "--report"])
    assert done.exit_code == 0 and 'pip install "consilience[report]"' in done.stdout
    done = CliRunner().invoke(cli.app, ["resume", "runs/a", "rounds=3", "--no-report"])
    assert done.exit_code == 0 and "report" not in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
def test_a_browser_shows_it_in_light_and_dark_and_prints_it(swapping: Path, tmp_path: Path) -> None:
    """Light is bright and dark is dark, at desktop and phone width; the print is a PDF of several pages."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    made = report.write([swapping], tmp_path / "page.html", pictures=False)
    for name, size, flags, bright in (
        ("light", "1280,1500", [], True),
        ("dark", "1280,1500", ["--blink-settings=preferredColorScheme=0"], False),
        ("phone", "500,1500", [], True),
    ):
        shot = tmp_path / f"{name}.png"
        _browse(tmp_path, made, f"--screenshot={shot}", f"--window-size={size}", *flags)
        mean = float(np.asarray(image.open(shot).convert("L")).mean())
        assert (mean > 200) if bright else (mean < 70), (name, mean)
    _browse(tmp_path, made, f"--print-to-pdf={tmp_path / 'page.pdf'}")
    assert (tmp_path / "page.pdf").read_bytes().count(b"/Type /Page\n") >= 2


def _browse(folder: Path, target: Path, *flags: str) -> None:
    assert CHROMIUM is not None
    fresh = folder / "profile"
    quiet = ("--disable-gpu", "--disable-background-networking", "--no-first-run", f"--user-data-dir={fresh}")
    command = [CHROMIUM, "--headless", "--no-sandbox", *quiet, *flags, target.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=90)
