"""Crash-safe writing; all calls that change the disk go through `disk`, so that tests can make each fail.

A run folder may come from an archive or be writable by others, so nothing inside it is
trusted: symbolic links are not followed, pipes and devices not waited on, and a file with a
second name (a hard link) is not written to, since that would change a file elsewhere. Where a system has no O_NOFOLLOW
(Windows), links are looked for just before a file is opened, which leaves a short race.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from consilience.runs.names import plain

Bytes = bytes | memoryview

_CLOSED_ON_EXEC = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_NO_WAITING = getattr(os, "O_NONBLOCK", 0)  # opening a pipe left in place of a file must not hang
_ONLY_FOLDERS = getattr(os, "O_DIRECTORY", 0)
_WRONG_KINDS = {errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.EMLINK}  # of `open_file`, `is_folder`
_CHUNK = 1 << 24  # bytes handed to one write call


class Disk:
    """The calls by which a run folder changes the disk; replace one on the `disk` instance to fail it."""

    open = staticmethod(os.open)
    write = staticmethod(os.write)
    truncate = staticmethod(os.ftruncate)
    fsync = staticmethod(os.fsync)
    close = staticmethod(os.close)
    rename = staticmethod(os.replace)
    mkdir = staticmethod(os.mkdir)
    unlink = staticmethod(os.unlink)
    remove_folder = staticmethod(shutil.rmtree)


disk = Disk()


def temporary(path: Path) -> Path:
    """The temporary name under which `path` is written before the rename: hidden, in the same folder, with our pid."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


def is_temporary(name: str, of: str) -> bool:
    """Whether a file name is what `temporary` makes for names that match the regular expression `of`."""
    return re.fullmatch(rf"\.(?:{of})\.tmp-\d+", name) is not None


def open_file(path: Path, flags: int) -> int:
    """A descriptor of a regular file, or an `OSError` that says what is there instead, and the fix."""
    writing = bool(flags & (os.O_WRONLY | os.O_RDWR))
    if not _NO_LINKS:
        check_file(path)
    opened = disk.open if writing else os.open
    try:
        fd = opened(path, flags | _NO_LINKS | _NO_WAITING | _CLOSED_ON_EXEC, 0o666)
    except OSError:
        check_file(path)  # a link, folder or pipe gets its own message
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _wrong_kind(path, status.st_mode)
        if writing and status.st_nlink > 1:
            reason = f"it has {status.st_nlink} names (hard links), and writing to it would change the others"
            raise OSError(errno.EMLINK, f"{reason}: put a copy of the file in its place", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_file(path: Path) -> None:
    """Raise an `OSError` if `path` exists and is not a regular file."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            raise _wrong_kind(path, mode)


def is_folder(path: Path) -> bool:
    """Whether a folder is at `path`, an `OSError` if a link or a file is."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        raise _wrong_kind(path, mode, wanted="folder")
    return True


def _wrong_kind(path: Path, mode: int, wanted: str = "file") -> OSError:
    kinds = {
        stat.S_IFLNK: (errno.ELOOP, "a symbolic link, which is not followed"),
        stat.S_IFDIR: (errno.EISDIR, "a folder"),
        stat.S_IFREG: (errno.ENOTDIR, "a file"),
    }
    number, kind = kinds.get(stat.S_IFMT(mode), (errno.EINVAL, "a pipe, socket or device"))
    return OSError(number, f"it is {kind}: remove it, or put the {wanted} itself in its place", str(path))


def write_file(path: Path, chunks: Iterable[Bytes], *, mode: int = 0o666) -> tuple[int, str]:
    """Create a file, flushed to the device; its byte length and SHA-256."""
    digest, length = hashlib.sha256(), 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS | _CLOSED_ON_EXEC
    with _opened(path, disk.open, flags, mode) as fd:
        for chunk in chunks:
            write_all(fd, chunk)
            digest.update(chunk)
            length += len(chunk)
        disk.fsync(fd)
    return length, digest.hexdigest()


def append_file(path: Path, data: bytes, *, at: int, sync: bool) -> None:
    """Append `data` at byte `at`, the current end of the file; all of it, or nothing."""
    with _opened(path, open_file, os.O_WRONLY | os.O_APPEND) as fd:
        size = os.fstat(fd).st_size
        if size != at:
            raise OSError(errno.EBUSY, f"holds {size} bytes where {at} were left", str(path))
        try:
            write_all(fd, data)
            if sync:
                disk.fsync(fd)
        except OSError:
            with contextlib.suppress(OSError):
                disk.truncate(fd, at)
            raise


def cut_file(path: Path, length: int) -> None:
    """Truncate the file to `length` bytes, durably."""
    with _opened(path, open_file, os.O_WRONLY) as fd:
        disk.truncate(fd, length)
        disk.fsync(fd)


def sync_file(path: Path) -> None:
    """Make what was written to a file durable."""
    with _opened(path, open_file, os.O_WRONLY) as fd:
        disk.fsync(fd)


def replace_file(path: Path, data: bytes) -> None:
    """Make `path` hold `data`: a reader, or a crash, sees the old content or the new, never a part."""
    for leftover in path.parent.iterdir():
        if is_temporary(leftover.name, re.escape(path.name)):
            disk.unlink(leftover)
    draft = temporary(path)
    try:
        write_file(draft, [data])
        disk.rename(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            disk.unlink(draft)
        raise
    sync_folder(path.parent)


def write_all(fd: int, data: Bytes) -> None:
    """Write every byte, however few the system takes at a time."""
    view = memoryview(data)
    while len(view):
        written = disk.write(fd, view[:_CHUNK])
        if written <= 0:
            raise OSError(errno.EIO, "the system took none of the bytes")
        view = view[written:]


def make_folder(path: Path) -> None:
    """Make a folder named by the user and its parents, durably; an existing one is unchanged."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with contextlib.suppress(FileExistsError):
        disk.mkdir(path)
    sync_folder(path.parent)


def make_inner_folder(path: Path) -> None:
    """Make a folder of our own inside another; a link of that name is refused, even one to a folder."""
    if is_folder(path):
        return
    make_folder(path.parent)
    disk.mkdir(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, where the system knows how to."""
    if os.name == "nt":
        return
    with _opened(path, disk.open, os.O_RDONLY | _ONLY_FOLDERS | _CLOSED_ON_EXEC) as fd:
        try:
            disk.fsync(fd)
        except OSError as problem:
            # Some network file systems cannot flush a folder; that is no sign of a failing disk.
            if problem.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
                raise


def read_file(path: Path, *, most: int | None = None) -> bytes:
    """A regular file of at most `most` bytes, sized before it is read; follows no link, waits on no pipe."""
    fd = open_file(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if most is not None and size > most:
            raise OSError(errno.EFBIG, f"it holds {size} bytes, at most {most} belong", str(path))
        with open(fd, "rb", closefd=False) as file:
            return file.read(size)
    finally:
        os.close(fd)


def explain(doing: str, path: Path, problem: OSError) -> str:
    """One line for the user: what failed, on which file, why, and how much room the disk has if that can matter."""
    place = plain(str(problem.filename or path), most=400)
    reason = plain(problem.strerror or str(problem), most=300)
    room = "" if problem.errno in _WRONG_KINDS else f" ({free_space(path)})"
    return f"cannot {doing} {place}: {reason}{room}"


def free_space(path: Path) -> str:
    """'12.3 MB free' on the disk that holds the nearest existing parent of `path`."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            return f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB free on that disk"
    return "free space unknown"


@contextlib.contextmanager
def _opened(path: Path, how: Callable[..., int], *flags: int) -> Iterator[int]:
    """A descriptor that is closed on exit; an error of close is raised unless another error came first.

    Errors of calls on a descriptor do not say which file: its path is added.
    """
    try:
        fd = how(path, *flags)
        try:
            yield fd
        except BaseException:
            with contextlib.suppress(OSError):
                disk.close(fd)
            raise
        disk.close(fd)
    except OSError as problem:
        if problem.filename is None:
            problem.filename = str(path)
        raise
