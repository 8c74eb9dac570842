"""What can go wrong, when: a schedule is a list of faults drawn from a seed, printed where a case fails."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["kill", "pause", "cut", "clock", "full"]
Target = Literal["run", "server", "link", "node"]
LOCAL: tuple[tuple[Kind, Target], ...] = (
    ("kill", "run"),
    ("kill", "run"),
    ("pause", "run"),
    ("clock", "run"),
    ("full", "run"),
)
DEPLOYED: tuple[tuple[Kind, Target], ...] = (
    *(("kill", "server"), ("kill", "link"), ("pause", "node"), ("pause", "server"), ("cut", "node"), ("clock", "node")),
    ("full", "server"),
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens once a round is on disk, some seconds later."""

    kind: Kind
    target: Target
    after_round: int
    delay: float  # seconds
    amount: float  # seconds of a pause or a cut, of a clock's jump; bytes that still fit on a disk


def drawn(draw: random.Random, kinds: tuple[tuple[Kind, Target], ...], rounds: int, count: int) -> list[Fault]:
    """A schedule, in the order of the rounds after which things happen."""
    found = []
    for _ in range(count):
        kind, target = draw.choice(kinds)
        amount = {
            "kill": 0.0,
            "pause": draw.uniform(0.2, 3.0),
            "cut": draw.uniform(0.5, 8.0),
            "clock": draw.choice((-1, 1)) * draw.uniform(1, 120),
            "full": float(draw.randrange(0, 2000)),
        }[kind]
        after, delay = draw.randrange(0, rounds), draw.choice((0.0, draw.uniform(0, 0.05), draw.uniform(0, 2)))
        found.append(Fault(kind=kind, target=target, after_round=after, delay=delay, amount=amount))
    return sorted(found, key=lambda fault: fault.after_round)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def pause(pid: int, seconds: float) -> None:
    """Stop a process and let it go on."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)


def fill(pid: int, folder: Path, room: float) -> None:
    """From now on no file of a process can grow beyond the longest one of its run, and this much more."""
    longest = max((file.stat().st_size for file in folder.glob("*.jsonl")), default=0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (longest + int(room), resource.RLIM_INFINITY))


CLOCK = '''
"""A machine whose clock jumps: every Python that starts here adds what a file says to the time of day."""
import os
import time

_file, _right = os.environ.get("CHAOS_CLOCK", ""), time.time


def _shift():
    try:
        with open(_file) as file:
            return float(file.read() or 0)
    except (OSError, ValueError):
        return 0.0


if _file:
    time.time = lambda: _right() + _shift()
    try:
        import datetime

        from flwr.supercore import date

        _now = date.now
        date.now = lambda: _now() + datetime.timedelta(seconds=_shift())
    except ImportError:
        pass
'''


class Clock:
    """The clock of all processes that are started with `environment`."""

    def __init__(self, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        (place / "sitecustomize.py").write_text(CLOCK)
        self.file, self._place = place / "shift", place

    @property
    def environment(self) -> dict[str, str]:
        before = os.environ.get("PYTHONPATH", "")
        return {
            "PYTHONPATH": os.pathsep.join([str(self._place), before]).rstrip(os.pathsep),
            "CHAOS_CLOCK": str(self.file),
        }

    def jump(self, seconds: float) -> None:
        self.file.write_text(str(seconds))


class Line:
    """A loopback proxy in front of a port, which can be cut: connections break, and new ones are refused."""

    def __init__(self, port: int) -> None:
        self._to, self._open, self._cut = port, set[socket.socket](), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> None:
        self._cut.set()
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        time.sleep(seconds)
        self._cut.clear()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._cut.is_set():
                    raise OSError("cut")
                far = socket.create_connection(("127.0.0.1", self._to), timeout=10)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            for one, other in ((near, far), (far, near)):
                self._open.add(one)
                threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                other.sendall(data)
        except OSError:
            pass
        finally:
            self._open.discard(one)
            for end in (one, other):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            one.close()
