"""Stop a run of this user on this machine, or resume it as a process of its own.

Stopping sends the signal that ends a run after the round in progress, with a checkpoint; it is sent only to a process
that holds the run's lock open, since a number in a stale lock file may belong to another program by now.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from consilience.core.settings import Invalid
from consilience.runs.folder import RESUME_LOG, RunFolder
from consilience.runs.lock import is_alive, owner
from consilience.runs.names import plain


def possible(path: Path, facts: dict[str, Any]) -> str:
    """'stop' or 'resume', whichever this process may do with the run; '' if neither."""
    if not _is_ours(path) or facts.get("deployed"):
        return ""
    known = owner(path / "lock")
    if known and known["host"] != socket.gethostname():
        return ""
    if known and _holds(known["pid"], path / "lock"):
        return "stop"
    return "" if facts.get("status") == "finished" else "resume"


def stop(path: Path) -> int:
    """Ask the run's process to end after the round in progress; its number."""
    folder = RunFolder.open(path)
    if possible(path, folder.facts()) != "stop":
        raise Invalid(f"{folder.name} cannot be stopped here: {_why_not(path, folder.facts(), 'it is not running')}")
    process = int(owner(path / "lock")["pid"])
    try:
        os.kill(process, signal.SIGTERM)
    except ProcessLookupError:
        raise Invalid(f"{folder.name} has just ended") from None
    return process


def resume(path: Path) -> int:
    """`consilience resume` as a process that outlives this one, its output in the run folder; its number."""
    folder = RunFolder.open(path)
    if possible(path, folder.facts()) != "resume":
        raise Invalid(
            f"{folder.name} cannot be resumed here: {_why_not(path, folder.facts(), 'it is running, or has finished')}"
        )
    command = [sys.executable, "-m", "consilience", "resume", str(path.resolve())]
    with folder.open_log(RESUME_LOG) as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the run gets no signals to this process and survives its end
            close_fds=True,
        )
    _children.append(process)
    return process.pid


_children: list[subprocess.Popen[bytes]] = []


def reap() -> None:
    """Forget runs of ours that have ended, so that none stays behind as a zombie that seems to be alive."""
    _children[:] = [process for process in _children if process.poll() is None]


def _is_ours(path: Path) -> bool:
    return os.name == "posix" and path.stat().st_uid == os.getuid()


def _holds(pid: int, lock: Path) -> bool:
    """Whether a process of this user has the lock file open; without /proc, whether it is alive."""
    place = Path("/proc") / str(pid)
    if not Path("/proc/self/fd").is_dir():
        return is_alive(pid)
    try:
        wanted = os.stat(lock)
        if place.stat().st_uid != os.getuid():
            return False
        for descriptor in os.scandir(place / "fd"):
            try:
                found = os.stat(descriptor.path)
            except OSError:  # closed since
                continue
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    except OSError:
        return False
    return False


def _why_not(path: Path, facts: dict[str, Any], otherwise: str) -> str:
    if facts.get("deployed"):
        return "it is a deployed run, which `consilience deploy` starts and stops"
    if not _is_ours(path):
        return "its folder belongs to another user"
    known = owner(path / "lock")
    if known and known["host"] != socket.gethostname():
        return f"it runs on {plain(known['host'])}"
    return otherwise
