"""`deploy check` as a stranger sees an address, and command lines that cannot open a deployment."""

from __future__ import annotations

import contextlib
import ipaddress
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from consilience import cli
from consilience.core.settings import Invalid
from consilience.flower.deploy import keys, pins, probe, processes, programs, service


@contextlib.contextmanager
def answering(control: int, runtime: int) -> Iterator[tuple[str, list[str]]]:
    """The address of a server that answers these codes, and what it was asked for."""
    asked: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            kind = self.path.split("/")[2]
            self.send_response({"control": control, "runtime": runtime}[kind])
            self.send_header("content-length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    made = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{made.server_port}", asked
    finally:
        made.shutdown()
        made.server_close()
        thread.join(5)


@pytest.mark.parametrize(
    ("control", "runtime", "code", "words"),
    [
        (404, 404, 0, "only the routes of nodes can be reached"),
        (401, 401, 0, "its control and runtime routes can be reached, and need an account"),
        (200, 404, 2, "its control routes answer without an account (code 200)"),
        (404, 200, 2, "its runtime routes answer without an account (code 200)"),
        (401, 200, 2, "its runtime routes answer without an account"),
        (500, 404, 2, "its control routes answer without an account (code 500)"),  # whatever it is, it is served
        (400, 401, 2, "its control routes answer without an account (code 400)"),
    ],
)
def test_check_fails_where_a_stranger_is_answered(control: int, runtime: int, code: int, words: str) -> None:
    with answering(control, runtime) as (address, asked):
        said = CliRunner().invoke(cli.app, ["deploy", "check", address, "--insecure"])
    assert said.exit_code == code and words in said.output, said.output
    assert asked == list(probe.ROUTES.values())
    assert ("consilience deploy link" in said.output) == (code == 2)


def test_the_routes_that_are_tried_are_flowers_and_harmless() -> None:
    pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
    from flwr.supercore.servicer.runtime.runtime_handlers import acquire_task

    assert all(("POST", route) in PROTOBUF_REQUEST_TYPES for route in probe.ROUTES.values())
    assert PROTOBUF_MEDIA_TYPE == "application/protobuf"
    nothing: Any = None  # it would fail if it were looked at
    assert not acquire_task(AcquireTaskRequest(), nothing).token


def addresses(command: list[str]) -> list[str]:
    """What a command is told to listen on."""
    return [command[number + 1] for number, word in enumerate(command) if word == "--host"]


def test_flowers_processes_listen_on_loopback_and_start_no_apps_themselves(tmp_path: Path) -> None:
    made = keys.Keys(tmp_path / "ca.crt", tmp_path / "server.pem", tmp_path / "server.key", ())
    for command in (
        programs.superlink(1, keys=made, secret=tmp_path / "s", database=tmp_path / "d"),
        programs.superlink(1, keys=None, secret=tmp_path / "s"),
        programs.supernode("fl.example.org:8000", 2, secret=tmp_path, authority=tmp_path, key=tmp_path, node_config=""),
        programs.supernode("127.0.0.1:8000", 2, secret=tmp_path, authority=None, key=None, node_config=""),
    ):
        (host,) = addresses(command)
        assert ipaddress.ip_address(host).is_loopback
        assert command[command.index("--isolation") + 1] == "process"
        assert "--superexec-auth-secret-file" in command
    assert "--enable-supernode-auth" in programs.superlink(1, keys=made, secret=tmp_path / "s")
    for role in (pins.SERVER, pins.CLIENT):
        command = programs.executor(role, 1, secret=tmp_path, allowed=tmp_path / "allowed", authority=None)
        assert command[1:4] == ["-m", "consilience.flower.deploy.executor", role] and "--allowed" in command


def test_flowers_older_listeners_stay_off_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`FLWR_INTERNAL_GRPC_CONTROL_API=1` would serve the control API at 0.0.0.0:9093."""
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_FLEET_API", "1")
    around = processes.environment(tmp_path)
    assert around["FLWR_INTERNAL_GRPC_CONTROL_API"] == around["FLWR_INTERNAL_GRPC_FLEET_API"] == "0"


@pytest.mark.parametrize("wrong", ["fl.example.org", "fl:0", "fl:65536", "fl:http", ":8000", ""])
def test_addresses_are_checked(wrong: str) -> None:
    with pytest.raises(Invalid, match="is no address"):
        programs.address(wrong, "--listen")


def test_a_private_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="comes with Flower")
    keys.make(tmp_path / "keys")
    assert keys.load(tmp_path / "keys").authority == tmp_path / "keys" / "ca.crt"
    (tmp_path / "keys" / "server.key").chmod(0o644)
    with pytest.raises(Invalid, match="can be read by others"):
        keys.load(tmp_path / "keys")
    with pytest.raises(Invalid, match=r"ca.crt is missing"):
        keys.load(tmp_path)


def test_a_unit_runs_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["deploy", "link", "hospital", "rounds=5", "--listen", "10.0.0.5:8000", "--allow", "0" * 64]
    said = CliRunner().invoke(cli.app, [*words, "--write-unit", "fl.service"])
    assert said.exit_code == 0, said.output
    text = (tmp_path / "fl.service").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    assert f"-m consilience deploy link {tmp_path}/hospital rounds=5 --listen 10.0.0.5:8000" in line
    assert f"--keys {tmp_path}/keys --state {tmp_path}/link --control 8001 --allow {'0' * 64}" in line
    assert "NoNewPrivileges=yes" in text and "write-unit" not in text
    assert service.unit("node", ["node", "--node-config", 'data="/srv/100%"']).count("100%%") == 1
