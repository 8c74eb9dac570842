"""SuperLink and SuperNodes of an app on this machine, with TLS and node keys made on the spot."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from consilience.core.settings import Invalid
from consilience.flower.deploy import executor, keys
from consilience.flower.deploy.processes import (
    Process,
    ProcessFailed,
    end,
    environment,
    free_port,
    stop,
    wait_until_listening,
)
from consilience.flower.deploy.serving import is_loopback

LINK = "local"  # what Flower's own config calls the connection


class LocalDeployment:
    """`with LocalDeployment(app, shares=[[0], [1]]) as stage: stage.run()`; all it started is stopped at the end.

    shares: the clients of each SuperNode. place: where homes, keys and logs go. secure: TLS and node keys.
    warm_clients: messages are answered by forks of a process that has imported torch. node_config: more for every node.
    lasting: the SuperLink keeps its state in a file and the ServerApp is no child of its, so that a run survives
    `restart_link`.
    """

    def __init__(
        self,
        app: Path,
        *,
        shares: Sequence[Sequence[int]],
        place: Path,
        secure: bool = True,
        host: str = "127.0.0.1",
        insecure_allowed: bool = False,
        warm_clients: bool = True,
        node_config: Mapping[str, Any] | None = None,
        lasting: bool = False,
    ) -> None:
        if not secure and not is_loopback(host) and not insecure_allowed:
            raise Invalid(
                f"host = {host} is another machine's network, and TLS is off: say --insecure if that is meant"
            )
        self.app, self.place = Path(app).resolve(), Path(place).resolve()
        self._shares, self._secure, self._host = [list(share) for share in shares], secure, host
        self.port = 0
        self.link: Process | None = None
        self.nodes: list[Process] = []
        self.keys: keys.Keys | None = None
        self._runs: list[Process] = []
        self.servers: set[int] = set()  # process ids of ServerApps that were seen
        self._helpers: list[Process] = []  # what starts the nodes' client processes
        self._before: Any = None  # what SIGTERM did
        self._node_config = dict(node_config or {})
        self._warm, self._lasting = warm_clients and executor.is_possible(), lasting

    def __enter__(self) -> LocalDeployment:
        if threading.current_thread() is threading.main_thread():  # SIGTERM must stop what was started, too
            self._before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    @property
    def size(self) -> int:
        """SuperNodes."""
        return len(self._shares)

    def start(self) -> None:
        """Bring everything up: keys, link, registrations, nodes."""
        for folder in ("home", "logs", "keys", "memory"):
            (self.place / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._secure and self.keys is None:
            hosts = tuple(dict.fromkeys((self._host, "127.0.0.1", "localhost")))
            self.keys = keys.make(self.place / "keys", hosts=hosts, nodes=len(self._shares))
        self.start_link()
        for number in range(len(self._shares)):
            self.start_node(number)

    def start_link(self) -> None:
        """The SuperLink, on a free port, with its keys registered."""
        self.port = free_port()
        if self._lasting:
            for file in self.place.glob("state.db*"):  # of another rehearsal: its runs are not this one's
                file.unlink()
        self._launch_link()
        self._write_connection()
        registering = [self.register(Path(f"{node}.pub")) for node in (self.keys.nodes if self.keys else ())]
        for process in registering:
            if process.wait(60) != 0:
                raise ProcessFailed(f"a node key was not registered:\n{process.tail()}")

    def restart_link(self) -> None:
        """The SuperLink again, on its port, with its state; nodes, ServerApp and runs go on. Only if `lasting`."""
        if not self._lasting or self.link is None:
            raise Invalid(
                "a SuperLink that keeps its state in memory cannot go on: LocalDeployment(lasting=True) lets it"
            )
        stop([self.link])
        self._launch_link()

    def _launch_link(self) -> None:
        command = ["flower-superlink", "--host", self._host, "--port", str(self.port)]
        command.append("--disable-runtime-dependency-installation")
        if self.keys is None:
            command.append("--insecure")
        else:
            command += ["--ssl-ca-certfile", str(self.keys.authority), "--ssl-certfile", str(self.keys.certificate)]
            command += ["--ssl-keyfile", str(self.keys.certificate_key), "--enable-supernode-auth"]
        again = self.link is not None
        if self._lasting:
            secret = keys.secret(self.place / "keys" / "superexec")
            command += ["--database", str(self.place / "state.db"), "--isolation", "process"]
            command += ["--superexec-auth-secret-file", str(secret)]
        self.link = self._process("superlink-again" if again else "superlink", command)
        wait_until_listening(self.link, self._host, self.port)
        if self._lasting and not again:  # what starts ServerApps, and is no child of the SuperLink's
            begin = ["flower-superexec", "--runtime-api-address", f"{self._host}:{self.port}"]
            begin += ["--superexec-auth-secret-file", str(secret)]
            begin += ["--insecure"] if self.keys is None else ["--root-certificates", str(self.keys.authority)]
            self._helpers.append(self._process("serverapps", begin))

    def register(self, public_key: Path) -> Process:
        """Let the SuperLink know a node's public key."""
        return self._process(f"register-{public_key.stem}", ["flwr", "supernode", "register", str(public_key), LINK])

    def start_node(self, number: int, *, key: Path | None = None, authority: Path | None = None) -> Process:
        """One SuperNode, with its own home: what it would have on a machine of its own."""
        told = {"clients": ",".join(map(str, self._shares[number])), "memory": str(self.place / "memory" / str(number))}
        text = " ".join(f"{name}={json.dumps(value)}" for name, value in {**told, **self._node_config}.items())
        command = ["flower-supernode", "--superlink", f"{self._host}:{self.port}", "--node-config", text]
        port = str(free_port())
        command += ["--host", "127.0.0.1", "--port", port, *(["--isolation", "process"] if self._warm else [])]
        if self.keys is None:
            command.append("--insecure")
        else:
            command += ["--root-certificates", str(authority or self.keys.authority)]
            command += ["--auth-supernode-private-key", str(key or self.keys.nodes[number])]
        node = self._process(f"supernode-{number}{'-' + key.name if key else ''}", command, home=f"home-{number}")
        self.nodes.append(node)
        if self._warm:  # it waits for its node, and ends with it
            begin = [
                sys.executable,
                "-m",
                "consilience.flower.deploy.executor",
                "--insecure",
                "--parent-pid",
                str(node.pid),
            ]
            begin += ["--runtime-api-address", f"127.0.0.1:{port}"]
            self._helpers.append(self._process(f"clients-{number}", begin, home=f"home-{number}"))
        return node

    def run(self, **run_config: Any) -> Process:
        """Submit the app; the process ends when the run does."""
        text = " ".join(f"{name}={json.dumps(value)}" for name, value in run_config.items())
        command = ["flwr", "run", str(self.app), LINK, "--stream", *(["--run-config", text] if text else [])]
        process = self._process(f"run-{len(self._runs) + 1}", command)
        self._runs.append(process)
        return process

    def check(self) -> None:
        """`ProcessFailed` if the SuperLink has ended."""
        if self.link is not None:
            self.link.refuse_dead()

    def stop(self) -> None:
        """End everything, nodes before the link; safe to call twice."""
        stop([*self._runs, *self._helpers, *self.nodes])
        stop([self.link] if self.link else [])
        for server in self.servers:  # Flower gives it a session of its own, and a link that was killed leaves it behind
            end(server)
        self.servers = set()
        self._runs, self._helpers, self.nodes, self.link = [], [], [], None

    def _process(self, name: str, command: Sequence[str], home: str = "home") -> Process:
        (self.place / home).mkdir(parents=True, exist_ok=True, mode=0o700)
        return Process(name, command, self.place / "logs" / f"{name}.log", environment(self.place / home))

    def _write_connection(self) -> None:
        """How `flwr` finds the SuperLink."""
        trust = (
            "insecure = true" if self.keys is None else f"root-certificates = {json.dumps(str(self.keys.authority))}"
        )
        address = json.dumps(f"{self._host}:{self.port}")
        text = f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\naddress = {address}\n{trust}\n'
        (self.place / "home" / "config.toml").write_text(text, encoding="utf-8")


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
