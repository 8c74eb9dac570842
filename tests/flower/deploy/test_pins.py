"""Only the app that was agreed on runs: what its digest covers, and what happens to a task of another."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')

from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import user_config_to_proto
from flwr.proto.runtime_pb2 import PullTaskInputResponse
from flwr.supercore.constant import TaskType
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.superexec.executor.types import LaunchResultStatus

from consilience import cli
from consilience.core.settings import Invalid
from consilience.flower.deploy import executor, pins, template
from consilience.flower.deploy.pins import CLIENT, SERVER


@pytest.fixture
def app(tmp_path: Path) -> Path:
    template.init(tmp_path / "app", clients=2)
    return tmp_path / "app"


def task(app: Path, *, settings: str = "", **said: str) -> Any:
    """What Flower's process is given to run this app."""
    given = PullTaskInputResponse()
    given.fab.content = build_fab_from_disk(app)
    given.fab.hash_str = said.get("hash_str", hashlib.sha256(given.fab.content).hexdigest())
    given.run.fab_id = said.get("fab_id", "consilience/app")
    given.run.fab_version = said.get("fab_version", "1.0.0")
    for config in (given.run.override_config, given.context.run_config):
        for name, value in user_config_to_proto({"settings": settings, "runs": "/srv/runs"}).items():
            config[name].CopyFrom(value)
    return given


@pytest.mark.parametrize("role", [SERVER, CLIENT])
def test_the_agreed_app_may_run_and_its_digest_is_what_the_command_prints(role: str, app: Path) -> None:
    said = CliRunner().invoke(cli.app, ["deploy", "digest", str(app)])
    assert said.exit_code == 0 and said.output.strip() == hashlib.sha256(build_fab_from_disk(app)).hexdigest()
    assert pins.refusal(task(app), role, frozenset({said.output.strip()})) == ""
    words = ["rounds=5", "algorithm.lr=0.5"]
    said = CliRunner().invoke(cli.app, ["deploy", "digest", str(app), *words])
    assert pins.refusal(task(app, settings=" ".join(words)), role, frozenset({said.output.strip()})) == ""


@pytest.mark.parametrize("role", [SERVER, CLIENT])
@pytest.mark.parametrize("file", ["client_app.py", "server_app.py", "federation.py", "config.toml", "pyproject.toml"])
def test_a_change_of_any_file_is_another_app(role: str, file: str, app: Path) -> None:
    allowed = frozenset({pins.digest(app)})
    with open(app / file, "a") as text:
        text.write("\n[project.urls]\nx = 'y'\n" if file == "pyproject.toml" else "\n# changed\n")
    assert "is not allowed here" in pins.refusal(task(app), role, allowed)
    assert pins.digest(app) not in allowed


@pytest.mark.parametrize("role", [SERVER, CLIENT])
def test_settings_are_part_of_what_was_agreed(role: str, app: Path) -> None:
    """Or a server could take the noise, or secure sums, away from an app that the client has read."""
    plain, secret = (frozenset({pins.digest(app, words)}) for words in ([], ["deploy.secure_aggregation=true"]))
    assert "with settings" in pins.refusal(task(app, settings="deploy.secure_aggregation=false"), role, plain)
    assert "is not allowed here" in pins.refusal(task(app), role, secret)
    assert "is not allowed here" in pins.refusal(task(app, settings="rounds=1"), role, secret)
    assert pins.refusal(task(app, settings="deploy.secure_aggregation=true"), role, secret) == ""


def test_a_client_goes_by_the_config_that_it_will_run_with(app: Path) -> None:
    """Flower keeps one config for all runs of a series, so the run's own overrides say nothing about it."""
    given = task(app)
    given.context.run_config["settings"].string = "rounds=9"
    allowed = frozenset({pins.digest(app)})
    assert "with settings 'rounds=9'" in pins.refusal(given, CLIENT, allowed)
    assert pins.refusal(given, SERVER, allowed) == ""


def test_settings_of_the_apps_own_pyproject_are_part_of_it(app: Path) -> None:
    project = app / "pyproject.toml"
    project.write_text(project.read_text().replace('settings = ""', 'settings = "rounds=7"'))
    assert pins.refusal(task(app, settings="rounds=7"), CLIENT, frozenset({pins.digest(app)})) == ""


@pytest.mark.parametrize(
    "said",
    [{"hash_str": "0" * 64}, {"fab_version": "1.0.0/../../../elsewhere"}, {"fab_id": "mallory/app"}, {"fab_id": ""}],
)
def test_an_allowed_app_that_points_to_another_folder_is_refused(said: dict[str, str], app: Path) -> None:
    """Flower loads the folder that the announced name, version and hash make up."""
    assert "is announced as" in pins.refusal(task(app, **said), CLIENT, frozenset({pins.digest(app)}))


def test_without_a_list_nothing_is_allowed(app: Path, tmp_path: Path) -> None:
    assert pins.read(tmp_path / "missing") == frozenset()
    assert "none of the 0 on the list" in pins.refusal(task(app), CLIENT, pins.read(tmp_path / "missing"))
    for wrong in ("", "abc", "0" * 63, "G" * 64, "0" * 64 + "\n"):
        with pytest.raises(Invalid, match="is no digest"):
            pins.write(tmp_path / "list", [wrong])


PROCESSES = [(CLIENT, "flwr.supernode.runtime.run_clientapp"), (SERVER, "flwr.superlink.runtime.run_serverapp")]


@pytest.mark.parametrize(("role", "name"), PROCESSES)
def test_a_tampered_app_is_emptied_before_it_is_unpacked(
    role: str, name: str, app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's own processes, with a SuperLink that sends two apps: the agreed one is installed, the other is not."""
    process = importlib.import_module(name)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(process, "install_from_fab", process.install_from_fab)  # put back at the end, and the next too
    sent: list[Any] = [task(app)]
    monkeypatch.setattr(RuntimeHttpClient, "PullTaskInput", lambda self, request: sent.pop())
    pins.enforce(process, role, frozenset({pins.digest(app)}))
    client = SimpleNamespace()
    process.install_from_fab(RuntimeHttpClient.PullTaskInput(client, None).fab.content, skip_prompt=True)  # type: ignore[arg-type]
    assert len(list((tmp_path / "home" / "apps").iterdir())) == 1

    (app / "client_app.py").write_text("raise SystemExit('this must not run')")
    sent.append(task(app))
    received = RuntimeHttpClient.PullTaskInput(client, None)  # type: ignore[arg-type]
    assert received.fab.content == b""
    with pytest.raises(pins.AppRefused, match="is not allowed here"):
        process.install_from_fab(received.fab.content, skip_prompt=True)
    assert len(list((tmp_path / "home" / "apps").iterdir())) == 1


@pytest.mark.parametrize(("role", "kind"), [(SERVER, TaskType.SERVER_APP), (CLIENT, TaskType.CLIENT_APP)])
def test_tasks_of_other_kinds_are_neither_asked_for_nor_started(
    role: str, kind: TaskType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SuperLink may send agents, models and connectors, which are programs as well."""
    started: list[Any] = []
    monkeypatch.setattr(executor.subprocess, "Popen", lambda *words, **options: started.append(words))
    monkeypatch.setattr(executor.os, "fork", lambda: started.append("fork"))
    mine = executor.PinnedExecutor(role, tmp_path / "allowed", warm=True)
    assert mine.get_eligible_capacity(set(TaskType), insecure=True) == ({kind}, set())
    for other in set(TaskType) - {kind}:
        assert mine.launch(SimpleNamespace(task_type=other)).status == LaunchResultStatus.FAILED
    assert started == []


def test_a_fresh_process_gets_its_token_in_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of a process can be read by everybody on the machine."""
    written: list[bytes] = []
    commands: list[list[str]] = []

    def popen(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(stdin=SimpleNamespace(write=written.append, close=lambda: None), poll=lambda: None)

    monkeypatch.setattr(executor.subprocess, "Popen", popen)
    spec = SimpleNamespace(
        task_type=TaskType.SERVER_APP,
        runtime_api_address="127.0.0.1:1",
        token="secret-token",
        insecure=True,
        root_certificates_path=None,
    )
    mine = executor.PinnedExecutor(SERVER, tmp_path / "allowed", warm=False)
    assert mine.launch(spec).status == LaunchResultStatus.ACCEPTED
    assert commands[0][:4] == [sys.executable, "-m", "consilience.flower.deploy.executor", "server"]
    assert "secret-token" not in " ".join(commands[0]) and b"secret-token" in written[0]
