"""A stranger with nothing but ca.crt, at a deployment as docs/deploy.md starts it: list, register, join, run, pull.

127.0.0.2 stands for the address that other machines reach, 127.0.0.1 for what is this machine's own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from local_deployments import digest_here, digest_of, rows, until, write_app

from consilience.flower.deploy import keys, pins, programs
from consilience.flower.deploy.processes import Process, environment, free_port
from consilience.flower.deploy.up import facts_of

pytest.importorskip("flwr", reason='Flower is not installed: pip install "consilience[flower]"')
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is this machine's own on Linux only"),
]

OUTSIDE = "127.0.0.2"
PROJECT = """
[project]
name = "evil"
version = "1.0.0"
description = "x"
license = { text = "x" }
dependencies = []

[tool.flwr.app]
publisher = "mallory"

[tool.flwr.app.components]
serverapp = "at_server:app"
clientapp = "at_client:app"
"""
AT_SERVER = """
from pathlib import Path

Path("MARK-server").write_text("run")

from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    asked = [Message(content=RecordDict(), message_type="query", dst_node_id=node) for node in grid.get_node_ids()]
    replies = grid.send_and_receive(asked, timeout=60)
    Path("MARK-replies").write_text("\\n".join(str(reply.has_error() and reply.error.reason) for reply in replies))
"""
AT_CLIENT = """
from pathlib import Path

Path("MARK-client").write_text("run")

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def answer(message, context):
    return Message(content=RecordDict(), reply_to=message)
"""


def write_evil(folder: Path, mark: Path) -> Path:
    """A stranger's app, which leaves a file wherever it is run."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    for name, text in (("at_server.py", AT_SERVER), ("at_client.py", AT_CLIENT)):
        (folder / name).write_text(text.replace("MARK", str(mark)))
    return folder


class Deployment:
    """The server's side and two clients' sides, by their own commands, in folders of their own."""

    def __init__(self, place: Path) -> None:
        self.place, self.started = place, list[Process]()
        self.app, self.mark = write_app(place / "app"), place / "ran"
        self.evil = write_evil(place / "evil", self.mark)
        self.port, self.control = free_port(OUTSIDE), free_port()
        self.address = f"{OUTSIDE}:{self.port}"

    def start(self, name: str, *words: object) -> Process:
        """`consilience deploy ...`, until the end of the test."""
        command = [sys.executable, "-m", "consilience", "deploy", *map(str, words)]
        self.started.append(Process(name, command, self.place / f"{name}.log", dict(environment(self.place / name))))
        return self.started[-1]

    def flwr(self, home: str, *words: object, seconds: float = 90.0) -> tuple[int, str]:
        """Flower's own command, by somebody with this home."""
        around = environment(self.place / home)
        done = subprocess.run(
            ["flwr", *map(str, words)], capture_output=True, text=True, timeout=seconds, env=around, cwd=self.place
        )
        return done.returncode, done.stdout + done.stderr

    def node(self, number: int) -> Process:
        """A client's side."""
        told = f'clients="{number}" memory="{self.place}/memory-{number}"'
        words = ["--root-certificates", self.place / "keys" / "ca.crt", "--key", self.place / f"keys-{number}" / "node"]
        words += ["--state", self.place / f"node-{number}", "--node-config", told]
        return self.start(f"at-{number}", "node", self.address, self.app, *words)

    def close(self) -> None:
        """Stop what was started, the nodes first."""
        for process in reversed(self.started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)  # its own handler stops its children
            process.wait(30)
            process.signal(signal.SIGKILL)


def typed(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "consilience", "deploy", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    place = tmp_path_factory.mktemp("stranger")
    made = Deployment(place)
    assert typed("keys", place / "keys", "--host", OUTSIDE).returncode == 0
    for number in (0, 1):
        assert typed("keys", place / f"keys-{number}", "--node").returncode == 0
    words = ["--listen", made.address, "--control", made.control, "--keys", place / "keys", "--state", place / "link"]
    # The evil app may run at the server, so that what its nodes do with it can be seen.
    link = made.start("link-side", "link", made.app, *words, "--allow", pins.digest(made.evil))
    try:
        until(lambda: "the app that may run" in link.log.read_text(), 90, unless=lambda: ended(link))
        for number in (0, 1):
            code, said = made.flwr("link/home", "supernode", "register", place / f"keys-{number}" / "node.pub")
            assert code == 0, said
        outside = programs.connection("fl", made.port, place / "keys" / "ca.crt")
        (place / "stranger").mkdir()
        (place / "stranger" / "config.toml").write_text(outside.replace(programs.LOOPBACK, OUTSIDE))
        nodes = [made.node(number) for number in (0, 1)]
        for number, node in enumerate(nodes):
            log = place / f"node-{number}" / "logs" / "supernode.log"
            there = lambda log=log: log.exists() and "SuperNode ID" in log.read_text()  # noqa: E731
            until(there, 90, unless=lambda node=node: ended(node))
        yield made
    finally:
        made.close()


def ended(process: Process) -> str:
    return "" if process.code is None else process.tail(40)


def test_a_stranger_can_neither_list_nor_register_nor_run(deployment: Deployment) -> None:
    """Each of the same commands works for whoever is on the server's own machine: it is the address that is closed."""
    key = keys.node_key(deployment.place / "strangers-key")
    attempts: Sequence[tuple[object, ...]] = (
        ("supernode", "list"),
        ("supernode", "register", f"{key}.pub"),
        ("run", deployment.evil),
        ("list",),
    )
    for words in attempts:
        code, said = deployment.flwr("stranger", *words)
        assert code != 0 and "404" in said, said
    code, said = deployment.flwr("link/home", "supernode", "list")
    assert code == 0 and said.count("online") == 2, said  # the two that were registered, and no third
    assert not Path(f"{deployment.mark}-server").exists()


def test_a_stranger_cannot_join(deployment: Deployment) -> None:
    place = deployment.place
    key = keys.node_key(place / "unregistered")
    for name, more in (("own-key", ["--auth-supernode-private-key", str(key)]), ("no-key", [])):
        command = ["flower-supernode", "--superlink", deployment.address, "--max-retries", "1", "--host", "127.0.0.1"]
        command += ["--port", str(free_port()), "--root-certificates", str(place / "keys" / "ca.crt"), *more]
        joining = Process(name, command, place / f"{name}.log", environment(place / name))
        deployment.started.append(joining)
        until(lambda joining=joining: joining.code is not None, 60)
        assert joining.code != 0 and "SuperNode ID" not in joining.log.read_text()
        assert "Failed to initialize the connection" in joining.log.read_text()


def test_a_stranger_finds_no_route_but_those_of_nodes(deployment: Deployment) -> None:
    """Every route of a SuperLink, asked for without a key: nothing but 404, and 401 where nodes are served."""
    import ssl

    import httpx
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
    from flwr.supercore.runtime import RuntimeHttpClient

    from consilience.flower.deploy import gateway

    authority = deployment.place / "keys" / "ca.crt"
    trust = ssl.create_default_context(cafile=str(authority))
    with httpx.Client(verify=trust, base_url=f"https://{deployment.address}") as stranger:
        for _, path in PROTOBUF_REQUEST_TYPES:
            code = stranger.post(path, headers={"content-type": "application/protobuf"}).status_code
            assert code == (401 if path.encode() in gateway.ROUTES else 404), path
        for path in ("/", "/docs", "/openapi.json", "/health", "/v1/responses"):
            assert stranger.get(path).status_code == 404
    client = RuntimeHttpClient.from_server_address(deployment.address, False, str(authority), interceptors=[])
    with contextlib.closing(client), pytest.raises(httpx.HTTPStatusError, match="404"):
        client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))


def test_check_says_which_address_is_closed_and_which_is_open(deployment: Deployment) -> None:
    trust = ["--root-certificates", deployment.place / "keys" / "ca.crt"]
    closed = typed("check", deployment.address, *trust)
    assert closed.returncode == 0 and "only the routes of nodes can be reached" in closed.stdout, closed
    opened = typed("check", f"127.0.0.1:{deployment.control}", *trust)  # as if the SuperLink itself were reachable
    assert opened.returncode == 2 and "its control routes answer without an account (code 200)" in opened.stderr, opened


def test_nodes_refuse_an_app_that_they_have_not_agreed_to(deployment: Deployment) -> None:
    """Somebody at the server's machine starts another app; the server is even told to allow it."""
    code, said = deployment.flwr("link/home", "run", deployment.evil)
    assert code == 0, said
    replies = Path(f"{deployment.mark}-replies")
    until(replies.exists, 120)
    until(replies.read_text, 10)
    assert replies.read_text().count("is not allowed here") == 2, replies.read_text()
    assert Path(f"{deployment.mark}-server").exists() and not Path(f"{deployment.mark}-client").exists()


def test_the_server_refuses_an_app_that_it_was_not_started_with(deployment: Deployment) -> None:
    Path(f"{deployment.mark}-server").unlink(missing_ok=True)
    with open(deployment.evil / "at_server.py", "a") as text:
        text.write("# another digest\n")
    code, said = deployment.flwr("link/home", "run", deployment.evil)
    assert code == 0, said
    log = deployment.place / "link" / "logs" / "serverapps.log"
    until(lambda: "is not allowed here" in log.read_text(), 90)
    assert not Path(f"{deployment.mark}-server").exists()


def test_a_superlink_that_dies_is_started_again_with_its_nodes(deployment: Deployment) -> None:
    """And the next test's run goes over it."""
    link = deployment.started[0]
    (first,) = [pid for pid in children(link.pid) if "flower-superlink" in command_of(pid)]
    os.kill(first, signal.SIGKILL)
    until(lambda: "the SuperLink ended with code -9: starting it again" in link.log.read_text(), 30)
    until(lambda: deployment.flwr("link/home", "supernode", "list")[1].count("online") == 2, 120)
    assert first not in children(link.pid) and link.code is None


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_the_agreed_run_completes_with_the_same_bits(deployment: Deployment) -> None:
    runs = deployment.place / "runs"
    code, said = deployment.flwr("link/home", "run", deployment.app, "--run-config", f'runs="{runs}"')
    assert code == 0, said
    folder = runs / "real"
    until(lambda: facts_of(folder).get("status") == "finished", 400)
    assert [row["cohort"] for row in rows(folder)] == [[0, 1]] * 3
    assert digest_of(folder) == digest_here(deployment.app)


def test_the_command_stops_all_that_it_started(deployment: Deployment) -> None:
    """The last test of this file: systemd sends SIGTERM."""
    deployment.close()
    for process in deployment.started:
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(deployment.place) not in left
