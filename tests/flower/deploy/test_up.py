"""What the launcher does when a deployment's processes die, with processes that only pretend (FAULTS row 38)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from consilience.core.settings import Invalid
from consilience.flower.deploy import template
from consilience.flower.deploy import up as launcher
from consilience.flower.deploy.local_deployment import LocalDeployment
from consilience.flower.deploy.processes import ProcessFailed


class Pretended:
    """A stage whose SuperLink dies in its first `deaths` lives, and Flower's own command with it."""

    deaths, lives = 1, 0

    def __init__(self, app: Path, **settings: Any) -> None:
        self.nodes: list[Any] = []
        self.servers: set[int] = set()
        self.size, self.folder = 4, Path(app) / "runs" / "there"

    def __enter__(self) -> Pretended:
        type(self).lives += 1
        return self

    def __exit__(self, *problem: object) -> None:
        pass

    def run(self, **run_config: Any) -> Any:
        return SimpleNamespace(code=1, log="run.log", tail=lambda: "the connection is gone", wait=lambda seconds: 1)

    @property
    def link(self) -> Any:
        return SimpleNamespace(code=-9 if self.lives <= self.deaths else None)


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    template.init(tmp_path / "app", clients=4)
    monkeypatch.setattr(launcher, "LocalDeployment", Pretended)
    monkeypatch.setattr(Pretended, "lives", 0)
    return tmp_path / "app"


def test_row_38_a_lost_superlink_is_started_again_once_and_that_is_said(
    app: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Pretended, "deaths", 2)
    with pytest.raises(ProcessFailed, match=r"the SuperLink died, again: .* can be continued with the same command"):
        launcher.up(app, say=said.append)
    assert Pretended.lives == 2
    assert [line for line in said if "once" in line] == [
        "the SuperLink died; starting again from the last checkpoint, once"
    ]


def test_row_38_a_server_that_stops_because_its_superlink_died_was_not_interrupted(
    app: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower ends a ServerApp whose SuperLink is gone by a signal, after which its folder says `interrupted`."""
    found = iter([{}, {"server_pid": 1, "status": "interrupted"}])
    monkeypatch.setattr(launcher, "facts_of", lambda folder: next(found))
    stage = Pretended(app)
    with pytest.raises(launcher.ServerLost, match="the SuperLink died"):
        launcher.follow(stage, stage.run(), stage.folder, lambda line: None)  # type: ignore[arg-type]
    monkeypatch.setattr(Pretended, "deaths", -1)
    found = iter([{}, {"server_pid": 1, "status": "interrupted"}])
    launcher.follow(stage, stage.run(), stage.folder, lambda line: None)  # type: ignore[arg-type]


def test_a_command_that_ends_while_the_superlink_lives_is_no_reason_to_start_again(
    app: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pretended, "deaths", 0)
    with pytest.raises(ProcessFailed, match="the run ended without a result"):
        launcher.up(app, say=lambda line: None)
    assert Pretended.lives == 1


def test_a_superlink_without_a_file_cannot_be_restarted(app: Path, tmp_path: Path) -> None:
    stage = LocalDeployment(app, shares=[[0]], place=tmp_path / "stage", secure=False)
    with pytest.raises(Invalid, match="keeps its state in memory cannot be restarted"):
        stage.restart_link()
