"""One process at a time in one run folder, by a lock that the system releases however the process ends.

`filelock` takes the lock, on a descriptor that we open ourselves: before version 4 its own `FileLock` empties whatever
stands at the lock's path, also a hard link to a file elsewhere. Ours are the note of who holds the lock, which its
messages lack, and releasing it in forked children, which share the descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from consilience.runs import canonical
from consilience.runs.disk import explain, open_file, read_file, write_all
from consilience.runs.names import plain

_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


class RunLocked(RuntimeError):
    """Another process works in this run folder; the message says which, and what to do."""


class RunLock:
    """`with RunLock(path):` holds the lock file `path`, or raises `RunLocked` naming its owner."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._fd: int | None = None
        self._claim: Any = None  # a filelock.SoftFileLock, for file systems without locks

    def acquire(self) -> RunLock:
        """Take the lock now or refuse; never waits."""
        if self._fd is not None:
            raise RunLocked(f"{self.path.parent} is locked by this object already")
        try:
            fd = open_file(self.path, os.O_RDWR | os.O_CREAT)
        except OSError as problem:
            raise RunLocked(explain("open the lock file", self.path, problem)) from problem
        try:
            self._take(fd)
            os.ftruncate(fd, 0)
            with contextlib.suppress(OSError):  # the note is for the message only: a full disk must not prevent locking
                write_all(fd, canonical.encode({"pid": os.getpid(), "host": socket.gethostname()}))
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        _held.add(self)
        return self

    def release(self) -> None:
        """Give the lock back; the file stays, since removing it would race with the next owner."""
        if self._fd is None:
            return
        os.ftruncate(self._fd, 0)
        if self._claim is not None:
            self._claim.release()
        self._forget()

    def __enter__(self) -> RunLock:
        return self if self._fd is not None else self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _take(self, fd: int) -> None:
        """Lock the open file; on file systems without locks, create a claim file exclusively."""
        import filelock

        try:
            if not filelock.lock_descriptor(fd, blocking=False):
                raise RunLocked(_refusal(self.path))
        except OSError as problem:
            if problem.errno not in _UNSUPPORTED:
                raise RunLocked(explain("lock", self.path, problem)) from problem
            place = self.path.with_name(self.path.name + ".claim")
            claim = filelock.SoftFileLock(place, thread_local=False)
            try:
                claim.acquire(timeout=0.5, poll_interval=0.1)  # time to take over a lock left by a dead process
            except (filelock.Timeout, RuntimeError) as refused:
                raise RunLocked(_refusal(self.path, claim=place)) from refused
            self._claim = claim

    def _forget(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = self._claim = None
        _held.discard(self)


_held: set[RunLock] = set()  # keeps an unreferenced lock held until the process ends


def _leave_to_parent() -> None:
    """A forked child shares the lock: unless it lets go, it would keep it when its parent is killed."""
    for lock in list(_held):
        lock._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def is_alive(pid: int) -> bool:
    """Whether a process of this number runs on this machine (a guess of True where it cannot be known)."""
    if sys.platform == "win32" or pid <= 0:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def owner(path: Path) -> dict[str, Any]:
    """Process (`pid`) and machine (`host`) that hold a lock file, as far as that can be read: nothing on Windows,
    which hides locked bytes from others."""
    with contextlib.suppress(OSError, ValueError):
        note = canonical.decode(read_file(path, most=4096))
        if isinstance(note, dict) and type(note.get("pid")) is int and isinstance(note.get("host"), str):
            return note
    return {}


def _refusal(path: Path, claim: Path | None = None) -> str:
    known = owner(path)
    who = f"process {known['pid']} on {plain(known['host'])}" if known else "another process"
    remedy = f"; if it is certain that nothing runs there, delete {claim}" if claim else ""
    return (
        f"run folder {plain(path.parent, most=400)} is in use by {who}: "
        f"wait for it to end, stop it, or start a run under another name{remedy}"
    )
