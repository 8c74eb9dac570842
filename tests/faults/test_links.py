"""Whatever stands in place of a run folder's files, nothing outside it changes and no command hangs (FAULTS 52)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from consilience import cli
from consilience.compare import cells, pages
from consilience.compare.plan import plan
from consilience.reporting import report, style
from consilience.runs import checkpoint
from consilience.runs.folder import RecordError

pytestmark = pytest.mark.usefixtures("untraced", "quick_pictures")

SETTINGS = (
    *("data.name=digits", "model=logistic", "partition.clients=4", "rounds=2", "algorithm.epochs=1"),
    *("engine.lane=serial", "engine.device=cpu"),
)
NEWEST = "checkpoints/round-00000002"
READ_BY_RESUME = {
    *("lock", "run.json", "config.toml", "metrics.jsonl", "timing.jsonl", "clients.jsonl", "federation.json"),
    *("partition.npz", "checkpoints"),
}
REPLACED_BY_RESUME = {"model.safetensors", "model.json"}
READ_BY_REPORT = {"run.json", "config.toml", "metrics.jsonl"}


@pytest.fixture
def quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "svg", lambda picture: "")
    monkeypatch.setattr(style, "png", lambda picture: b"picture")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds with everything that commands leave in its folder."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert command("run", *SETTINGS, "--folder", folder, "--quiet")[0] == 0
    (folder / "report.html").write_text("an earlier report")
    (folder / "report-figures").mkdir()
    (folder / "report-figures" / "accuracy.png").write_bytes(b"a picture")
    (folder / "report-figures" / "gone.png").write_bytes(b"a picture that the next report has not")
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "events.out.tfevents.1").write_bytes(b"events")
    return folder


def command(*arguments: Any) -> tuple[int, str]:
    """Exit code and output of a command, which has a minute: a pipe must not make it wait."""
    with deadline(60):
        found = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert "Traceback" not in found.output and not isinstance(found.exception, TimeoutError), arguments
    return found.exit_code, found.output


@contextlib.contextmanager
def deadline(seconds: int) -> Iterator[None]:
    def late(number: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def entries(folder: Path) -> list[str]:
    """Everything in a run folder, the older checkpoint and all pictures but two left out; and names of drafts."""
    found = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    drafts = [".run.json.tmp-1", ".metrics.jsonl.tmp-1", f"checkpoints/.{Path(NEWEST).name}.tmp-1"]
    return sorted(name for name in found if not name.startswith("checkpoints/round-00000001")) + drafts


def held(folder: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


def linked(place: Path, outside: Path) -> None:
    """A link to the very same content elsewhere: nothing but the link itself gives it away."""
    outside.mkdir()
    if place.is_dir():
        shutil.copytree(place, outside / "victim")
        shutil.rmtree(place)
    elif place.exists():
        shutil.move(place, outside / "victim")
    else:
        (outside / "victim").write_text("precious")
    place.symlink_to(outside / "victim")


def linked_to_folder(place: Path, outside: Path) -> None:
    cleared(place)
    (outside / "victim").mkdir(parents=True)
    for name in ("precious", "manifest.json", "gone.png", "events.out.tfevents.1"):
        (outside / "victim" / name).write_text("precious")
    (outside / "victim" / Path(NEWEST).name).mkdir()
    place.symlink_to(outside / "victim")


def linked_to_nothing(place: Path, outside: Path) -> None:
    cleared(place)
    outside.mkdir()
    place.symlink_to(outside / "absent")


def pipe(place: Path, outside: Path) -> None:
    cleared(place)
    outside.mkdir()
    os.mkfifo(place)


def cleared(place: Path) -> None:
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "a link to the same content": linked,
    "a link to a folder": linked_to_folder,
    "a dangling link": linked_to_nothing,
    "a pipe": pipe,
}


REST = [kind for kind in KINDS if kind != "a link to the same content"]


@pytest.mark.parametrize(
    "kind", ["a link to the same content", *(pytest.param(k, marks=pytest.mark.slow) for k in REST)]
)
def test_no_command_follows_a_link_out_of_a_run_folder(finished: Path, tmp_path: Path, kind: str) -> None:
    refused: dict[str, set[str]] = {"show": set(), "eval": set(), "resume": set()}
    for number, name in enumerate(entries(finished)):
        folder, outside = tmp_path / f"{number}", tmp_path / f"outside-{number}"
        shutil.copytree(finished, folder)
        KINDS[kind](folder / name, outside)
        before = held(outside)
        for action, more in (("show", ()), ("eval", ()), ("resume", ("rounds=3", "--no-report"))):
            code, said = command(action, folder, *more)
            assert held(outside) == before, (action, name)
            if code:
                refused[action].add(name)
                assert code in (2, 4) and Path(name).name in said, (action, name, said)
                assert code == 2 or "in its place" in said, (action, name, said)
        if name not in refused["resume"]:
            assert checkpoint.load_latest(folder / "checkpoints").round == 3  # type: ignore[union-attr]
            assert all((folder / made).is_file() and not (folder / made).is_symlink() for made in REPLACED_BY_RESUME)
    missing = {"federation.json"}  # a file that is not there is written anew
    assert refused["resume"] == READ_BY_RESUME - (missing if kind == "a dangling link" else set())
    assert refused["show"] == {"run.json", "config.toml", "metrics.jsonl", "timing.jsonl"}
    assert refused["eval"] == {"run.json", "config.toml", "checkpoints", "federation.json"}


@pytest.mark.parametrize("kind", KINDS)
def test_no_report_is_written_through_a_link(finished: Path, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib")
    names = [*READ_BY_REPORT, "federation.json", "report.html", ".report.html.tmp-1", "report-figures"]
    refused = set()
    for number, name in enumerate([*names, "report-figures/accuracy.png", "report-figures/gone.png"]):
        folder, outside = tmp_path / f"{number}", tmp_path / f"outside-{number}"
        shutil.copytree(finished, folder)
        KINDS[kind](folder / name, outside)
        before = held(outside)
        code, said = command("report", folder)
        assert held(outside) == before, name
        if code:
            refused.add(name)
            assert Path(name).name in said and "in its place" in said, (name, said)
        else:
            assert "<html" in (folder / "report.html").read_text() and not (folder / "report.html").is_symlink()
    assert refused == READ_BY_REPORT | {"report-figures"}


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "timing.jsonl", "clients.jsonl"])
def test_a_file_with_a_second_name_is_not_written_to(finished: Path, tmp_path: Path, name: str) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(finished, folder)
    os.link(folder / name, outside)
    before = outside.read_bytes()
    code, said = command("resume", folder, "rounds=3", "--no-report")
    assert code == 4 and name in said and "hard links" in said and outside.read_bytes() == before
    shutil.copy(folder / name, tmp_path / "copy")  # the remedy that the message names
    os.replace(tmp_path / "copy", folder / name)
    assert command("resume", folder, "rounds=3", "--no-report")[0] == 0 and outside.read_bytes() == before


def test_a_run_folder_may_be_named_through_a_link(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "latest").symlink_to("run")
    for arguments in (("resume", tmp_path / "latest", "rounds=3", "--no-report"), ("show", tmp_path / "latest")):
        assert command(*arguments)[0] == 0
    assert checkpoint.load_latest(tmp_path / "run" / "checkpoints").round == 3  # type: ignore[union-attr]


def test_tensorboard_files_are_not_removed_through_a_link(finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    shutil.copytree(finished, tmp_path / "run")
    linked(tmp_path / "run" / "tensorboard", tmp_path / "outside")
    before = held(tmp_path / "outside")
    code, said = command("resume", tmp_path / "run", "rounds=3", "log=tensorboard", "--no-report")
    assert code == 2 and "symbolic link" in said and held(tmp_path / "outside") == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_comparison_writes_nothing_through_a_link(tmp_path: Path, kind: str) -> None:
    for number, name in enumerate(("comparison.html", "table.md", "methods.csv", "cells.csv", "results.json")):
        folder, outside = tmp_path / f"{number}", tmp_path / f"outside-{number}"
        comparison = plan(None, algorithms=["fedavg"], seeds=[0], folder=folder)
        folder.mkdir()
        pages.write(comparison)
        KINDS[kind](folder / name, outside)
        before = held(outside)
        pages.write(comparison)
        assert held(outside) == before and not (folder / name).is_symlink()


@pytest.mark.parametrize("name", ["lock", "plan.json"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_comparison_is_not_run_over_a_link(tmp_path: Path, kind: str, name: str) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    KINDS[kind](folder / name, outside)
    before = held(outside)
    code, said = command("compare", "--algorithms", "fedavg", "--seeds", "0", "--out", folder, *SETTINGS)
    assert code == 4 and name in said and "in its place" in said and held(outside) == before


def test_a_cell_that_is_a_link_to_a_run_elsewhere_is_refused(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "fedavg-seed0").symlink_to(finished)
    with pytest.raises(RecordError, match=r"fedavg-seed0: it is a symbolic link.*in its place"):
        cells.status_of(tmp_path / "fedavg-seed0")
    assert cells.status_of(finished) == "finished"


def test_the_report_of_several_runs_goes_where_the_user_says(finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "real").mkdir()
    (tmp_path / "shortcut").symlink_to("real")
    assert report.write([finished], tmp_path / "shortcut" / "page.html", pictures=True).is_file()
    assert (tmp_path / "real" / "page.html").is_file() and list((tmp_path / "real" / "page-figures").glob("*.png"))
