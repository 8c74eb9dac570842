"""Flower's SuperExec, which starts a process for every task, with two differences: only allowed apps, and forks.

Only apps on a list of digests are run (`pins`), and only tasks of one kind: ServerApps, or messages to ClientApps.
Where a fork of a process that has loaded torch is safe (Linux), messages are answered by forks; Flower's own executors
start a fresh interpreter each time. Tasks, tokens, heartbeats and transport are Flower's.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from consilience.flower.deploy import pins

PRELOADED = (
    *("torch", "sklearn.datasets", "consilience.flower.deploy.hosting", "consilience.experiments.config.catalogue"),
    "flwr.client.mod",  # with what secure sums need
)


def is_warm() -> bool:
    """Whether a fork of a process that has loaded torch is safe here."""
    return sys.platform == "linux"


class PinnedExecutor:
    """Flower's subprocess executor, for one kind of task and the apps of a list."""

    def __init__(self, role: str, allowed: Path, *, warm: bool) -> None:
        from flwr.supercore.constant import TaskType
        from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor

        self._flower = SubprocessExecutor()
        self._role, self._allowed, self._warm = role, allowed, warm
        self._kind = TaskType.SERVER_APP if role == pins.SERVER else TaskType.CLIENT_APP
        self._children: list[subprocess.Popen[bytes]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flower, name)

    def get_eligible_capacity(self, supported: set[Any], **connection: Any) -> tuple[set[Any], set[str]]:
        """Request tasks of one kind only."""
        return supported & {self._kind}, set()

    def launch(self, spec: Any) -> Any:
        """Start the task of the spec, if it is of the right kind; its process checks the list."""
        from flwr.supercore.superexec.executor.types import LaunchResult

        if spec.task_type != self._kind:
            return LaunchResult.failed(f"{spec.task_type} is not run here, only {self._kind}")
        task = {
            "runtime_api_address": spec.runtime_api_address,
            "token": spec.token,
            "insecure": spec.insecure,
            "certificates": spec.root_certificates_path,
            "parent_pid": os.getpid(),
        }
        if self._warm:
            if os.fork() == 0:
                _in_fork(self._role, self._allowed, task)
            return LaunchResult.accepted()
        self._children = [child for child in self._children if child.poll() is None]
        command = [sys.executable, "-m", __spec__.name, self._role, "--allowed", str(self._allowed), "--task"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert child.stdin is not None
        child.stdin.write(json.dumps(task).encode())  # not as an argument, which other users could read
        child.stdin.close()
        self._children.append(child)
        return LaunchResult.accepted()


def run_task(role: str, allowed: Path, task: dict[str, Any]) -> None:
    """One ServerApp, or one message to a ClientApp, as Flower runs it, if its app is on the list."""
    from flwr.supercore.tls import validate_and_resolve_root_certificates

    certificates = validate_and_resolve_root_certificates(task["certificates"], task["insecure"])
    task = {**task, "certificates": certificates, "runtime_dependency_install": False}
    if role == pins.CLIENT:
        client = importlib.import_module("flwr.supernode.runtime.run_clientapp")
        pins.enforce(client, role, pins.read(allowed))
        client.run_clientapp(**task)
        return
    from queue import Queue

    from flwr.supercore.logger import mirror_output_to_queue, restore_output

    server = importlib.import_module("flwr.superlink.runtime.run_serverapp")
    pins.enforce(server, role, pins.read(allowed))
    queue: Queue[str | None] = Queue()
    mirror_output_to_queue(queue)
    server.run_serverapp(log_queue=queue, **task)
    restore_output()


def _in_fork(role: str, allowed: Path, task: dict[str, Any]) -> NoReturn:
    """The child process: answer one message, then exit in any case."""
    code = 1
    try:
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        run_task(role, allowed, task)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        os._exit(code)


def main() -> None:
    """`python -m consilience.flower.deploy.executor server|client --allowed FILE`, and what flower-superexec takes."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("role", choices=(pins.SERVER, pins.CLIENT))
    parser.add_argument("--allowed", type=Path, required=True)
    parser.add_argument("--task", action="store_true")  # on standard input
    given, rest = parser.parse_known_args()
    if given.task:
        run_task(given.role, given.allowed, json.load(sys.stdin))
        return
    warm = given.role == pins.CLIENT and is_warm()
    if warm:
        for module in PRELOADED:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forget forks that have ended
    if given.role == pins.SERVER:  # runs are rare, and each poll writes to the SuperLink's database
        os.environ["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "1"
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.superexec import run_superexec

    if not hasattr(run_superexec, "get_executor"):  # replaced, because Flower's own executor runs any app
        raise SystemExit("this version of Flower is not known: its SuperExec cannot be restricted to allowed apps")
    run_superexec.get_executor = lambda *_, **__: PinnedExecutor(  # type: ignore[assignment]
        given.role, given.allowed, warm=warm
    )
    sys.argv = ["flower-superexec", *rest]
    flower_superexec()


if __name__ == "__main__":
    main()
