"""One process at a time on one run folder, by a lock the system releases however the process ends."""

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
from consilience.runs.disk import explain, read_file, write_all
from consilience.runs.names import plain

_TAKEN = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK}
_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
_FAR_BYTE = 1 << 30  # Windows hides locked bytes from other readers: lock one behind the owner's note


class RunLocked(RuntimeError):
    """Another process works in this run folder; the message says which, and what to do."""


class RunLock:
    """`with RunLock(path):` holds the lock file `path`, or raises `RunLocked` naming its owner."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._fd: int | None = None
        self._claim: Path | None = None

    def acquire(self) -> RunLock:
        """Take the lock now or refuse; never waits."""
        if self._fd is not None:
            raise RunLocked(f"{self.path.parent} is locked by this very object already")
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        except OSError as problem:
            raise RunLocked(explain("open the lock file", self.path, problem)) from problem
        try:
            self._claim = self._take(fd)
            os.ftruncate(fd, 0)
            with contextlib.suppress(OSError):  # the note only serves the message: a full disk is no obstacle
                write_all(fd, canonical.encode(_identity()))
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
        if self._claim is not None:
            self._claim.unlink(missing_ok=True)
        os.ftruncate(self._fd, 0)
        self._forget()

    def __enter__(self) -> RunLock:
        return self if self._fd is not None else self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _take(self, fd: int) -> Path | None:
        """Lock the open file; where the disk knows no locks, the claim file that stands in for one."""
        try:
            _lock(fd)
        except OSError as problem:
            if problem.errno in _UNSUPPORTED:
                return _claim(self.path)
            taken = problem.errno in _TAKEN
            text = _refusal(self.path, self.path) if taken else explain("lock", self.path, problem)
            raise RunLocked(text) from problem
        return None

    def _forget(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = self._claim = None
        _held.discard(self)


_held: set[RunLock] = set()  # keeps a lock that nobody refers to held until the process ends


def is_alive(pid: int) -> bool:
    """Whether a process of this number runs on this machine (a guess of True where it cannot be known)."""
    if sys.platform == "win32" or pid <= 0:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


if sys.platform == "win32":
    import msvcrt

    def _lock(fd: int) -> None:
        os.lseek(fd, _FAR_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(fd, 0, os.SEEK_SET)

else:
    import fcntl

    def _lock(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _leave_to_parent() -> None:
        """A forked child shares the lock: unless it lets go, it would keep it when its parent is killed."""
        for lock in list(_held):
            lock._forget()

    os.register_at_fork(after_in_child=_leave_to_parent)


def _claim(path: Path) -> Path:
    """A file that only one process can create; one left by a dead process of this machine is taken over."""
    claim = path.with_name(path.name + ".claim")
    while True:
        try:
            fd = os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            owner = _owner(claim)
            stale = owner.get("host") == socket.gethostname() and not is_alive(int(owner.get("pid", 0)))
            if not stale or not _set_aside(claim, owner):
                raise RunLocked(_refusal(path, claim)) from None
            continue
        with contextlib.closing(os.fdopen(fd, "wb")) as file:
            file.write(canonical.encode(_identity()))
        return claim


def _set_aside(claim: Path, owner: dict[str, Any]) -> bool:
    """Move a stale claim away; False, with the claim back in place, if a new owner was quicker."""
    aside = claim.with_name(f".{claim.name}.stale-{os.getpid()}")
    try:
        os.rename(claim, aside)
    except FileNotFoundError:
        return True
    same = _owner(aside) == owner
    if not same:
        with contextlib.suppress(FileExistsError):
            os.link(aside, claim)
    aside.unlink()
    return same


def _identity() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname()}


def _owner(file: Path) -> dict[str, Any]:
    """What the owner wrote, as far as it can be read and is what an owner writes."""
    with contextlib.suppress(OSError, ValueError):
        note = canonical.decode(read_file(file, most=4096))
        if isinstance(note, dict) and type(note.get("pid")) is int and isinstance(note.get("host"), str):
            return note
    return {}


def _refusal(path: Path, note: Path) -> str:
    owner = _owner(note)
    who = f"process {owner['pid']} on {plain(owner['host'])}" if owner else "another process"
    remedy = f"; if it is certain that nothing runs there, delete {note}" if note != path else ""
    return (
        f"run folder {plain(path.parent, most=400)} is in use by {who}: "
        f"wait for it to end, stop it, or start a run under another name{remedy}"
    )
