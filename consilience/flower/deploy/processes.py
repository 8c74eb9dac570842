"""Flower's processes on this machine: started in their own process groups, monitored, and stopped by their ids."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

OFFLINE = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_INTERNAL_GRPC_CONTROL_API": "0",  # Flower's older listeners, which would be open to all addresses
    "FLWR_INTERNAL_GRPC_FLEET_API": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds until a message's process is started; Flower's own is 1
}


class ProcessFailed(RuntimeError):
    """A process of Flower's ended, or did not start; the message shows the end of its log."""


class Process:
    """One process with its children, and its log."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        program = shutil.which(command[0], path=environment["PATH"])
        if program is None:
            raise ImportError(f'{command[0]} is not installed: pip install "consilience[flower]"')
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                [program, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the process; also that of its group."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """The exit code, or None if it still runs after so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def signal(self, number: int) -> None:
        """Send a signal to it and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def tail(self, lines: int = 15) -> str:
        """The end of the log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def refuse_dead(self) -> None:
        """Raise `ProcessFailed` with the end of its log, if it has ended."""
        if self.code is not None:
            raise ProcessFailed(
                f"{self.name} ended with code {self.code}; its log, {self.log}, ends with:\n{self.tail()}"
            )


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """A signal handler that ends this process by way of its `finally` blocks."""
    raise SystemExit(128 + number)


def stop(processes: Sequence[Process], seconds: float = 5.0) -> None:
    """Ask processes and their children to end; those still running after so many seconds are killed."""
    for process in processes:
        process.signal(signal.SIGTERM)
    end = time.monotonic() + seconds
    for process in processes:
        process.wait(max(0.0, end - time.monotonic()))
        process.signal(signal.SIGKILL)
    for process in processes:
        process.wait(seconds)


def alive(pid: int) -> bool:
    """Whether a process of this machine runs; a zombie does not."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.parent.parent.joinpath("self").exists():
        try:
            return stat.read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
        except OSError:
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def end(pid: int, seconds: float = 5.0) -> None:
    """End one process by its id: terminated, then killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
        until = time.monotonic() + seconds
        while alive(pid) and time.monotonic() < until:
            time.sleep(0.1)
        if not alive(pid):
            return


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes: offline, their own Flower home, this interpreter's commands first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, **OFFLINE, "FLWR_HOME": str(home), "PATH": path, "PYTHONUNBUFFERED": "1"}


def free_port(host: str = "127.0.0.1") -> int:
    """A port of an address of this machine that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def wait_until_listening(process: Process, host: str, port: int, seconds: float = 90.0) -> None:
    """Return when the process accepts connections; `ProcessFailed` if it ends or takes too long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        process.refuse_dead()
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1.0):
            return
        time.sleep(0.1)
    raise ProcessFailed(f"{process.name} did not listen on {host}:{port} after {seconds:g} seconds:\n{process.tail()}")
