"""SuperLink and SuperNodes of an app on this machine, with new TLS and node keys."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from consilience.core.settings import Invalid
from consilience.flower.audit.log import KEYS
from consilience.flower.audit.receipts import RECEIPTS
from consilience.flower.deploy import keys, member_list, pins, programs
from consilience.flower.deploy.processes import (
    Process,
    ProcessFailed,
    end,
    environment,
    free_port,
    interrupt,
    stop,
    wait_until_listening,
)
from consilience.flower.deploy.programs import LOOPBACK, is_loopback
from consilience.flower.deploy.serving import CONNECTION

LINK = "local"  # name of the connection in Flower's config


class LocalDeployment:
    """`with LocalDeployment(app, shares=[[0], [1]]) as stage: stage.run()`; all started processes end with it.

    shares: the clients of each SuperNode. place: folder for Flower's homes, keys and logs. secure: TLS, node keys,
    and a gateway on `host`, the only listener for SuperNodes; otherwise everything is on 127.0.0.1. node_config: more
    for every node. lasting: the SuperLink keeps its state in a file, so that a run survives `restart_link`.
    """

    def __init__(
        self,
        app: Path,
        *,
        shares: Sequence[Sequence[int]],
        place: Path,
        secure: bool = True,
        host: str = LOOPBACK,
        node_config: Mapping[str, Any] | None = None,
        lasting: bool = False,
    ) -> None:
        if not secure and not is_loopback(host):
            raise Invalid(
                f"host = {host} can be reached from other machines, and without TLS and node keys anybody could join: "
                "leave out --insecure, or use 127.0.0.1"
            )
        self.app, self.place = Path(app).resolve(), Path(place).resolve()
        self._shares, self._secure, self._host = [list(share) for share in shares], secure, host
        self.port = 0  # where SuperNodes find the SuperLink
        self.control_port = 0  # of the SuperLink itself, on loopback
        self.link: Process | None = None
        self.nodes: list[Process] = []
        self.keys: keys.Keys | None = None
        self.servers: set[int] = set()  # process ids of ServerApps that were seen
        self._runs: list[Process] = []
        self._beside: list[Process] = []  # of the SuperLink: what starts ServerApps, and the gateway
        self._helpers: list[Process] = []  # what starts the nodes' client processes
        self._before: Any = None  # the previous SIGTERM handler
        self._node_config, self._lasting = dict(node_config or {}), lasting
        self._digests: list[str] = []  # apps, with their settings, that were submitted here

    def __enter__(self) -> LocalDeployment:
        if threading.current_thread() is threading.main_thread():  # SIGTERM must stop the started processes, too
            self._before = signal.signal(signal.SIGTERM, interrupt)
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
        """Start everything: keys, link, registrations, nodes."""
        for folder in ("home", "logs", "keys", "memory"):
            (self.place / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._secure and self.keys is None:
            hosts = tuple(dict.fromkeys((self._host, LOOPBACK, "localhost")))
            self.keys = keys.make(self.place / "keys", hosts=hosts, nodes=len(self._shares))
            self._members.unlink(missing_ok=True)
            for node, share in zip(self.keys.nodes, self._shares):
                member_list.add(self._members, Path(f"{node}.pub"), share)
        self.start_link()
        for number in range(len(self._shares)):
            self.start_node(number)

    def start_link(self) -> None:
        """The SuperLink, on a free port of loopback, its executor and gateway, and the nodes' keys registered."""
        self.control_port = self.port = free_port()
        if self._lasting:
            for file in self.place.glob("state.db*"):  # left by another local deployment
                file.unlink()
        self._launch_link("superlink")
        authority = self.keys.authority if self.keys else None
        begin = programs.executor(
            pins.SERVER, self.control_port, secret=self._secret, allowed=self._allowed, authority=authority
        )
        self._beside = [self._process("serverapps", begin, connection="tls" if self.keys else "loopback")]
        if self.keys is not None:
            self.port = free_port(self._host)
            guard = programs.gateway(self._host, self.port, superlink=self.control_port, keys=self.keys)
            self._beside.append(self._process("gateway", guard))
            wait_until_listening(self._beside[-1], self._host, self.port)
        text = programs.connection(LINK, self.control_port, authority)
        (self.place / "home" / "config.toml").write_text(text, encoding="utf-8")
        registering = [self.register(Path(f"{node}.pub")) for node in (self.keys.nodes if self.keys else ())]
        for process in registering:
            if process.wait(60) != 0:
                raise ProcessFailed(f"a node key was not registered:\n{process.tail()}")

    def restart_link(self) -> None:
        """The SuperLink again, on its port, with its state; nodes, ServerApp and runs continue. Only if `lasting`."""
        if not self._lasting or self.link is None:
            raise Invalid(
                "a SuperLink that keeps its state in memory cannot be restarted: use LocalDeployment(lasting=True)"
            )
        stop([self.link])
        self._launch_link("superlink-again")

    def _launch_link(self, name: str) -> None:
        database = self.place / "state.db" if self._lasting else None
        command = programs.superlink(self.control_port, keys=self.keys, secret=self._secret, database=database)
        self.link = self._process(name, command)
        wait_until_listening(self.link, LOOPBACK, self.control_port)

    @property
    def _secret(self) -> Path:
        return keys.secret(self.place / "keys" / "superexec")

    @property
    def _members(self) -> Path:
        return self.place / "keys" / member_list.FILE

    @property
    def _allowed(self) -> Path:
        return self.place / "allowed"

    def register(self, public_key: Path) -> Process:
        """Register a node's public key with the SuperLink."""
        return self._process(f"register-{public_key.stem}", ["flwr", "supernode", "register", str(public_key), LINK])

    def start_node(self, number: int, *, key: Path | None = None, authority: Path | None = None) -> Process:
        """One SuperNode with its own Flower home, as on a machine of its own."""
        held = {"clients": ",".join(map(str, self._shares[number])), "memory": str(self.place / "memory" / str(number))}
        node_config = " ".join(f"{name}={json.dumps(value)}" for name, value in {**held, **self._node_config}.items())
        port = free_port()
        command = programs.supernode(
            f"{self._host}:{self.port}",
            port,
            secret=self._secret,
            authority=(authority or self.keys.authority) if self.keys else None,
            key=(key or self.keys.nodes[number]) if self.keys else None,
            node_config=node_config,
        )
        node = self._process(f"supernode-{number}{'-' + key.name if key else ''}", command, home=f"home-{number}")
        self.nodes.append(node)
        begin = programs.executor(pins.CLIENT, port, secret=self._secret, allowed=self._allowed, authority=None)
        begin += ["--parent-pid", str(node.pid)]  # it waits for its node, and ends with it
        kept = str(self.place / "receipts" / str(number))
        self._helpers.append(self._process(f"clients-{number}", begin, home=f"home-{number}", receipts=kept))
        return node

    def run(self, **run_config: Any) -> Process:
        """Submit the app, which server and nodes then allow with these settings; the process ends when the run does."""
        self._digests.append(pins.digest(self.app, str(run_config.get("settings", "")).split()))
        pins.write(self._allowed, self._digests)
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
        stop([*self._beside, *([self.link] if self.link else [])])
        for server in self.servers:  # it has a session of its own, and survives a killed SuperLink
            end(server)
        self.servers = set()
        self._runs, self._helpers, self._beside, self.nodes, self.link = [], [], [], [], None

    def _process(
        self, name: str, command: Sequence[str], home: str = "home", connection: str = "", receipts: str = ""
    ) -> Process:
        (self.place / home).mkdir(parents=True, exist_ok=True, mode=0o700)
        listed = str(self._members) if self.keys else ""
        around = {**environment(self.place / home), CONNECTION: connection, member_list.MEMBERS: listed}
        around |= {KEYS: str(self.place / "keys") if self.keys and connection else "", RECEIPTS: receipts}
        return Process(name, command, self.place / "logs" / f"{name}.log", around)
