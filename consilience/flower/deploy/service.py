"""`consilience deploy link` and `consilience deploy node`: the two sides of a deployment, one command each."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from consilience.flower.audit.log import KEYS
from consilience.flower.audit.receipts import RECEIPTS
from consilience.flower.deploy import keys, member_list, pins, programs
from consilience.flower.deploy.member_list import FILE, MEMBERS
from consilience.flower.deploy.processes import (
    Process,
    environment,
    free_port,
    interrupt,
    stop,
    wait_until_listening,
)
from consilience.flower.deploy.serving import CONNECTION

Say = Callable[[str], None]
TOLD = (CONNECTION, MEMBERS, KEYS, RECEIPTS)  # environment variables that are empty unless given to a process
RESTARTS = 3  # of a SuperLink that ends: its state is in a file, and its runs continue
UNIT = """\
[Unit]
Description=consilience deploy {name}
After=network-online.target
Wants=network-online.target

[Service]
ExecStart={command}
WorkingDirectory={folder}
Restart=on-failure
RestartSec=10
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=full
UMask=0077

[Install]
WantedBy=multi-user.target
"""


class Service:
    """Processes in one folder: started in order, monitored, and stopped together, also on SIGTERM."""

    def __init__(self, place: Path, say: Say) -> None:
        self.place, self.say, self.processes = Path(place).resolve(), say, dict[str, Process]()
        self._before: Any = None  # the previous SIGTERM handler

    def __enter__(self) -> Service:
        for folder in ("home", "logs"):
            (self.place / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        self.place.chmod(0o700)
        self._before = signal.signal(signal.SIGTERM, interrupt)
        return self

    def __exit__(self, *problem: object) -> None:
        for process in reversed(list(self.processes.values())):
            stop([process])
        signal.signal(signal.SIGTERM, self._before)

    def start(self, name: str, command: Sequence[str], **known: str) -> Process:
        """Start one of them, with these in its environment; its log is in the folder."""
        around = {**environment(self.place / "home"), **dict.fromkeys(TOLD, ""), **known}
        self.processes[name] = Process(name, command, self.place / "logs" / f"{name}.log", around)
        return self.processes[name]

    def watch(self, again: Callable[[str], bool] = lambda name: False) -> NoReturn:
        """Wait for a signal; `ProcessFailed` if a process ends and `again` does not restart it."""
        while True:
            for name, process in list(self.processes.items()):
                if process.code is not None and not again(name):
                    process.refuse_dead()
            time.sleep(0.5)


@dataclass(frozen=True, kw_only=True)
class AllowedApp:
    """The app that may run: a folder with settings, and digests of further ones."""

    app: Path
    settings: Sequence[str] = ()
    more: Sequence[str] = ()

    def write(self, file: Path) -> str:
        """Write the list of what is allowed; the digest of the folder."""
        found = pins.digest(self.app, self.settings)
        pins.write(file, [found, *self.more])
        return found


def link(pinned: AllowedApp, *, listen: str, folder: Path, place: Path, control: int, say: Say) -> NoReturn:
    """The server's side: a SuperLink on loopback, the executor of the allowed app, and the gateway for nodes."""
    host, port = programs.address(listen, "--listen")
    made, members = keys.load(folder), Path(folder).resolve() / FILE
    listed = member_list.read(members) if members.exists() else None
    with Service(place, say) as service:
        secret, allowed = keys.secret(service.place / "superexec"), service.place / "allowed"
        digest = pinned.write(allowed)
        command = programs.superlink(control, keys=made, secret=secret, database=service.place / "state.db")
        wait_until_listening(service.start("superlink", command), programs.LOOPBACK, control)
        begin = programs.executor(pins.SERVER, control, secret=secret, allowed=allowed, authority=made.authority)
        known = {CONNECTION: "tls", KEYS: str(Path(folder).resolve()), MEMBERS: "" if listed is None else str(members)}
        service.start("serverapps", begin, **known)
        guard = programs.gateway(host, port, superlink=control, keys=made)
        near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # one of those that it listens on
        wait_until_listening(service.start("gateway", guard), near, port)
        home = service.place / "home"
        (home / "config.toml").write_text(programs.connection("link", control, made.authority), encoding="utf-8")
        say(f"nodes connect to {listen}, which serves the routes of nodes only")
        say(f"keys are registered and runs started on this machine: export FLWR_HOME={shlex.quote(str(home))}")
        say(f"the app that may run: {digest}")
        if listed is None:
            say(f"no {members}: any registered node may say that it is any client (`consilience deploy keys --help`)")
        ends = 0

        def again(name: str) -> bool:
            nonlocal ends
            ends += name == "superlink"
            if name != "superlink" or ends > RESTARTS:
                return False
            say(f"the SuperLink ended with code {service.processes[name].code}: starting it again, with its state")
            service.start("superlink", command)
            return True

        service.watch(again)


def node(
    pinned: AllowedApp, *, superlink: str, authority: Path, key: Path, node_config: str, place: Path, say: Say
) -> NoReturn:
    """A client's side: a SuperNode, and the executor of the allowed app."""
    programs.address(superlink, "the SuperLink")
    with Service(place, say) as service:
        secret, allowed, port = keys.secret(service.place / "superexec"), service.place / "allowed", free_port()
        digest = pinned.write(allowed)
        command = programs.supernode(
            superlink, port, secret=secret, authority=authority, key=key, node_config=node_config
        )
        service.start("supernode", command)
        begin = programs.executor(pins.CLIENT, port, secret=secret, allowed=allowed, authority=None)
        service.start("clientapps", begin, **{RECEIPTS: str(service.place / "receipts")})
        say(f"a node of {superlink}; logs are in {service.place / 'logs'}, receipts in {service.place / 'receipts'}")
        say(f"the app that may run: {digest}")
        service.watch()


def unit(name: str, arguments: Sequence[str]) -> str:
    """A systemd unit that runs `consilience deploy` with these arguments."""
    command = shlex.join([sys.executable, "-m", "consilience", "deploy", *arguments])
    return UNIT.format(name=name, command=command.replace("%", "%%"), folder=Path.cwd())
